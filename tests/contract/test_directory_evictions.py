"""What every directory remembers of evictions: who made room for whom, and which misses more room would have spared."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from services.cache.domain.cache import SegmentCache
from services.cache.domain.evictions import Eviction, Miss, MissCause
from services.cache.domain.orders import PublishReply
from services.cache.domain.values import EntryKind, Limits, PublishOutcome
from tests.contract.directory_rig import LIMITS, SECRET, Rig, create_rig
from tests.redis_server import RedisServer

NEW = Miss(MissCause.NEW)
# A tenant's share is gone with its next call, so that any other may take all that it has.
UNSHARED = replace(LIMITS, share_seconds=1e-9)
MakeRig = Callable[[Limits], Awaitable[Rig]]


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []

    async def make(limits: Limits) -> Rig:
        rigs.append(create_rig(request.param, redis_server.url, limits))
        await rigs[-1].beat("w1")
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.directory.check_integrity()
        await rig.directory.close()


def room(missing_bytes: int) -> Miss:
    return Miss(MissCause.ROOM, missing_bytes)


async def misses(rig: Rig, *contents: str, tenant: str = "acme") -> list[Miss | None]:
    reply = await rig.plan(*contents, tenant=tenant)
    await rig.cache.release(reply.lease_id)
    return [entry.miss for entry in reply.entries]


async def table(rig: Rig) -> list[tuple[str, str, int, int]]:
    """Rows with the tenants' names."""
    return [(row.evictor, row.victim, row.num_entries, row.size_bytes) for row in await rig.cache.evictions()]


async def publish(rig: Rig, content: str, size: int, tenant: str = "acme") -> PublishReply:
    """The directory's own answer."""
    replies: list[PublishReply] = []
    inner = rig.directory.publish

    async def spy(order: object) -> PublishReply:
        replies.append(await inner(order))  # type: ignore[arg-type]
        return replies[-1]

    rig.directory.publish = spy  # type: ignore[method-assign]
    try:
        await rig.store(content, size=size, tenant=tenant)
    finally:
        rig.directory.publish = inner  # type: ignore[method-assign]
    return replies[-1]


async def test_the_table_names_who_made_room_for_whom(rig: Rig) -> None:
    # Of equally long ones the larger has the lower score, and leaves first.
    for name, size in {"a": 204, "b": 203, "c": 202, "d": 201, "e": 190}.items():
        await rig.store(name, size=size)
    assert await table(rig) == []
    await rig.store("f", size=189, tenant="beta")
    await rig.store("g", size=188, tenant="beta")
    assert await table(rig) == [("beta", "acme", 2, 407)]
    # Here acme is at its share.
    await rig.store("h", size=187, tenant="beta")
    assert await table(rig) == [("beta", "acme", 2, 407), ("beta", "beta", 1, 189)]
    (row, _) = await rig.cache.evictions()
    assert row.num_tokens == 200


async def test_every_copy_counts_once_as_an_entry_and_with_its_bytes(rig: Rig) -> None:
    await rig.beat("w2")
    planned = (await rig.plan("a")).entries[0]
    await rig.publish(planned, "w1", size=400)
    await rig.publish(planned, "w2", size=400)
    rig.clock.now += 31
    await rig.beat("w1", [planned.key])
    await rig.beat("w2", [planned.key])
    await rig.store("b", size=900)
    assert await table(rig) == [("acme", "acme", 1, 800)]


async def test_what_an_invalidation_takes_is_no_eviction(rig: Rig) -> None:
    await rig.store("a", size=600)
    await rig.invalidate_tenant("acme")
    await rig.store("b", size=600)
    assert await table(rig) == []


async def test_publishes_tell_what_left_for_the_tenants_own_budget(make: MakeRig) -> None:
    rig = await make(replace(UNSHARED, namespace_budget_bytes=500))
    await rig.store("a", size=251)
    await rig.store("b", size=249)
    await rig.store("c", size=500, tenant="beta")
    own = await publish(rig, "d", 250)
    assert (own.num_evicted, own.num_evicted_own) == (1, 1)
    assert await misses(rig, "a") == [Miss(MissCause.TENANT_BUDGET)]
    other = await publish(rig, "e", 100, tenant="gamma")
    assert (other.num_evicted, other.num_evicted_own) == (1, 0)
    assert own.outcome is other.outcome is PublishOutcome.ACCEPTED


async def test_a_miss_tells_how_much_more_room_would_have_kept_the_segment(rig: Rig) -> None:
    assert await misses(rig, "a") == [NEW]
    for name, size in {"a": 250, "b": 249, "c": 248, "d": 247, "e": 246, "f": 245}.items():
        await rig.store(name, size=size)
    # a went first, then b: of the two, b needed one more place and a both.
    assert await misses(rig, "a", "b", "c") == [room(499), room(249), None]
    await rig.store("a", size=250)
    # a came back in the place of d: c has been used since.
    assert await misses(rig, "a", "b", "d") == [None, room(496), room(248)]


async def test_an_order_tells_a_miss_once(rig: Rig) -> None:
    first = await rig.plan("a", "a")
    assert [entry.miss for entry in first.entries] == [NEW, None]
    again = await rig.plan("a", lease_id=first.lease_id)
    pending = await rig.plan("a")
    assert [again.entries[0].miss, pending.entries[0].miss] == [None, None]


async def test_a_prefix_is_no_miss(rig: Rig) -> None:
    assert (await rig.plan("a", kind=EntryKind.PREFIX)).entries[0].miss is None


async def test_what_is_not_admitted_is_missed_each_time(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, min_uses=3))
    assert await misses(rig, "a", "a") == [NEW, None]
    assert await misses(rig, "a") == [NEW]


async def test_another_tenants_eviction_is_not_ones_own_miss(rig: Rig) -> None:
    await rig.store("a", size=600)
    await rig.store("b", size=600)
    assert await misses(rig, "a", tenant="beta") == [NEW]


async def test_ghosts_are_bounded(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, max_ghosts=2))
    for name in "abcd":
        await rig.store(name, size=900)
    assert await misses(rig, "a", "b", "c") == [NEW, room(1800), room(900)]


async def test_the_table_is_bounded_and_keeps_who_evicts_most(make: MakeRig) -> None:
    rig = await make(replace(UNSHARED, max_eviction_pairs=2))
    for name in "abcd":
        await rig.store(name, size=900)
    await rig.store("e", size=900, tenant="beta")
    assert await table(rig) == [("acme", "acme", 3, 2700), ("beta", "acme", 1, 900)]
    await rig.store("f", size=900, tenant="gamma")
    assert await table(rig) == [("acme", "acme", 3, 2700), ("gamma", "beta", 1, 900)]
    for name in "ghi":
        await rig.store(name, size=900, tenant="gamma")
    assert await table(rig) == [("acme", "acme", 3, 2700), ("gamma", "gamma", 3, 2700)]
    # Ranks are taken over: whoever goes on evicting stays, and what evicted as many, but long ago, is pushed out.
    await rig.store("j", size=900, tenant="delta")
    assert await table(rig) == [("gamma", "gamma", 3, 2700), ("delta", "gamma", 1, 900)]


async def test_a_tenant_that_has_not_planned_here_is_shown_by_its_digest(make: MakeRig) -> None:
    rig = await make(UNSHARED)
    await rig.store("a", size=900)
    await rig.store("b", size=900, tenant="beta")
    (row,) = await rig.directory.evictions()
    assert row.evictor.startswith("tenant:")
    assert isinstance(row, Eviction)
    assert (await rig.cache.evictions())[0].victim == "acme"
    newcomer = SegmentCache(rig.directory, SECRET)
    assert await newcomer.evictions() == (row,)
