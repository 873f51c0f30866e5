"""How much more room would have kept what was missed: against caches of every size, run side by side."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.cache.adapters.memory import MemoryDirectory
from services.cache.adapters.memory_evictions import Evictions
from services.cache.adapters.metered import MeteredDirectory
from services.cache.domain.evictions import EvictionReason, MissCause
from services.cache.domain.values import Limits
from tests.contract.directory_rig import Clock, rig_over

_SIZE = 10


def least_room(accesses: list[int]) -> list[int | None]:
    """For each access the least number of entries that an LRU cache must hold to have it; None when it is the first."""
    needed: list[int | None] = []
    for at, name in enumerate(accesses):
        last = max((before for before in range(at) if accesses[before] == name), default=None)
        needed.append(None if last is None else len(set(accesses[last:at])))
    return needed


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 6))
def test_under_lru_the_missing_bytes_are_exact(accesses: list[int], capacity: int) -> None:
    evictions = Evictions(Limits(budget_bytes=capacity * _SIZE))
    held: OrderedDict[int, None] = OrderedDict()
    for name, needed in zip(accesses, least_room(accesses), strict=True):
        if name not in held:
            miss = evictions.miss_of(bytes([name]))
            assert (miss.cause is MissCause.NEW) == (needed is None)
            assert miss.missing_bytes == (0 if needed is None else (needed - capacity) * _SIZE)
            if len(held) == capacity:
                victim, _ = held.popitem(last=False)
                evictions.note(bytes([victim]), _SIZE, EvictionReason.ROOM)
            evictions.forget(bytes([name]))
        held[name] = None
        held.move_to_end(name)


async def _missed(accesses: list[int], places: int) -> tuple[int, CollectorRegistry]:
    """Accesses that a real directory with so many places did not serve, and its metrics."""
    registry, budget = CollectorRegistry(), places * _SIZE
    limits = Limits(budget_bytes=budget, worker_ttl_seconds=1e9)
    rig = rig_over(MeteredDirectory(MemoryDirectory(limits, Clock()), registry, budget), "memory", Clock())
    await rig.beat("w1")
    num_missed = 0
    for name in accesses:
        reply = await rig.plan(str(name), document="")
        if reply.entries[0].ticket:
            num_missed += 1
            await rig.publish(reply.entries[0], size=_SIZE)
        await rig.cache.release(reply.lease_id)
    return num_missed, registry


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_what_the_metric_promises_of_more_memory_is_about_what_it_buys(seed: int) -> None:
    """Documents of every popularity, whose fashions change. The directory's policy is not LRU, so the promise is an estimate."""
    source = random.Random(seed)
    accesses = [int(source.paretovariate(0.7)) % 300 + source.randrange(4) * (at // 500) for at in range(2000)]
    places = 20
    num_missed, registry = await _missed(accesses, places)

    def tokens(*budgets: str) -> float:
        samples = [registry.get_sample_value("hypic_cache_missed_tokens_total", {"budget": one}) for one in budgets]
        return sum(sample or 0.0 for sample in samples)

    every = ("1.25", "1.5", "2", "4", "8", "more", "tenant_budget", "new")
    assert tokens(*every) == 100 * num_missed
    assert tokens("new") == 100 * len(set(accesses))
    for count, factor in ((3, 2.0), (4, 4.0)):
        promised = tokens(*every[:count]) / 100
        bought = num_missed - (await _missed(accesses, round(places * factor)))[0]
        assert 0.75 * bought <= promised <= 1.25 * bought
