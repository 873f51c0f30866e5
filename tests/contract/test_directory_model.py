"""Random histories: both directories answer as the brute-force model does, and never contradict themselves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.cache.domain.directory import PlannedEntry
from services.cache.domain.errors import UnknownLeaseError, UnknownWorkerError
from services.cache.domain.values import PlanOutcome
from tests.contract.directory_model import DirectoryModel, ModelTicket
from tests.contract.directory_rig import LIMITS, Clock, create_rig
from tests.redis_server import RedisServer

NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
WORKERS = st.sampled_from(["w1", "w2"])
SECONDS = st.sampled_from([5.0, 30.0, 90.0])
# Prefer recent leases and tickets: the index counts from the end.
RECENT = st.integers(min_value=0, max_value=5)

Reply = TypeVar("Reply")


class DirectoryMachine(RuleBasedStateMachine):
    """Drives an adapter and the model side by side."""

    kind: ClassVar[str] = "memory"
    redis_url: ClassVar[str] = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.rig = create_rig(self.kind, self.redis_url, clock=Clock())
        self.model = DirectoryModel(LIMITS, self.rig.clock.now)
        self.lease_ids: list[str] = []
        self.tickets: list[tuple[ModelTicket, PlannedEntry]] = []
        self.keys: dict[str, set[bytes]] = {}
        self.heartbeat("w1", 0)

    def run(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.rig.directory.close())
        self.runner.close()

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), seconds=SECONDS)
    def plan(self, names: list[str], seconds: float) -> None:
        self.lease_ids.append("")
        self._plan(len(self.lease_ids) - 1, names, seconds)

    @precondition(lambda self: self.lease_ids)
    @rule(names=st.lists(NAMES, min_size=1, max_size=3), seconds=SECONDS, recent=RECENT)
    def extend(self, names: list[str], seconds: float, recent: int) -> None:
        lease = max(len(self.lease_ids) - 1 - recent, 0)
        if lease in self.model.leases:
            self._plan(lease, names, seconds)
        else:
            with pytest.raises(UnknownLeaseError):
                self.run(self.rig.plan(*names, lease_id=self.lease_ids[lease], seconds=seconds))

    def _plan(self, lease: int, names: list[str], seconds: float) -> None:
        expected = self.model.plan(lease, names, seconds)
        reply = self.run(self.rig.plan(*names, lease_id=self.lease_ids[lease], seconds=seconds))
        self.lease_ids[lease] = reply.lease_id
        assert [entry.outcome for entry in reply.entries] == expected
        for name, planned in zip(names, reply.entries, strict=True):
            self.keys.setdefault(name, set()).add(planned.key)
            entry, ticket = self.model.entry(name), self.model.live_ticket(name)
            assert {holder.worker_id for holder in planned.holders} == (set(entry.since) if entry else set())
            if planned.outcome is PlanOutcome.COLD:
                assert ticket is not None
                assert planned.ticket is not None
                assert planned.ticket.expires_in_seconds == pytest.approx(ticket.expires_at - self.model.now)
                known = [planned for one, planned in self.tickets if one is ticket]
                assert all(one.ticket is not None and one.ticket.fence == planned.ticket.fence for one in known)
                self.tickets.append((ticket, planned))

    @precondition(lambda self: self.tickets)
    @rule(recent=RECENT, worker=WORKERS, size=st.sampled_from([100, 300, 500, 1100]))
    def publish(self, recent: int, worker: str, size: int) -> None:
        ticket, planned = self.tickets[max(len(self.tickets) - 1 - recent, 0)]
        expected = self.model.publish(ticket, planned.key, worker, size)
        if expected is None:
            with pytest.raises(UnknownWorkerError):
                self.run(self.rig.publish(planned, worker, size))
        else:
            assert self.run(self.rig.publish(planned, worker, size)).outcome is expected

    @precondition(lambda self: self.lease_ids)
    @rule(recent=RECENT, seconds=SECONDS)
    def renew(self, recent: int, seconds: float) -> None:
        lease = max(len(self.lease_ids) - 1 - recent, 0)
        if self.model.renew(lease, seconds):
            self.run(self.rig.cache.renew(self.lease_ids[lease], seconds))
        else:
            with pytest.raises(UnknownLeaseError):
                self.run(self.rig.cache.renew(self.lease_ids[lease], seconds))

    @precondition(lambda self: self.lease_ids)
    @rule(recent=RECENT)
    def release(self, recent: int) -> None:
        lease = max(len(self.lease_ids) - 1 - recent, 0)
        self.model.release(lease)
        self.run(self.rig.cache.release(self.lease_ids[lease]))

    @rule(name=NAMES)
    def invalidate_document(self, name: str) -> None:
        removed = self.run(self.rig.cache.invalidate_document("acme", f"doc-{name}"))
        assert removed == self.model.invalidate({name})

    @rule(scope=st.sampled_from(["tenant", "model", "stranger"]))
    def invalidate_all(self, scope: str) -> None:
        if scope == "stranger":
            assert self.run(self.rig.cache.invalidate_tenant("stranger")) == 0
            return
        cache = self.rig.cache
        removed = self.run(cache.invalidate_tenant("acme") if scope == "tenant" else cache.invalidate_model("model-1"))
        assert removed == self.model.invalidate(set("abcdef"))

    @rule(worker=WORKERS, missing=st.sampled_from([0, 0, 0, 1]))
    def heartbeat(self, worker: str, missing: int) -> None:
        """A worker lists what it holds, now and then without one of its copies."""
        listed = set(sorted(self.model.held_by(worker))[missing:])
        held = self.run(self._held(worker))
        keys = [key for name in sorted(listed) for key in sorted(self.keys.get(name, set()) & held)]
        assert len(keys) == len(listed)
        self.model.heartbeat(worker, listed)
        assert self.run(self.rig.beat(worker, keys)) == set()

    async def _held(self, worker: str) -> set[bytes]:
        return {key for holder, key in self.rig.receipts if holder == worker} & self._current_keys()

    def _current_keys(self) -> set[bytes]:
        return {self.key_of(entry.ticket) for entry in self.model.entries}

    def key_of(self, ticket: ModelTicket) -> bytes:
        return next(planned.key for one, planned in self.tickets if one is ticket)

    @rule(seconds=st.sampled_from([0.5, 4.0, 14.0, 61.0]))
    def advance(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.model.advance(seconds)

    @invariant()
    def agree(self) -> None:
        usage = self.run(self.rig.directory.usage())
        assert usage.used_bytes == self.model.used_bytes()
        assert usage.num_entries == len(self.model.entries)
        assert usage.num_leases == len(self.model.leases)
        assert usage.num_tickets == sum(not ticket.ended for ticket in self.model.tickets)
        assert usage.num_workers == len(self.model.workers)
        self.run(self.rig.directory.check_integrity())


@pytest.mark.parametrize(("kind", "examples"), [("memory", 150), ("redis", 40)])
def test_random_histories_agree_with_the_model(kind: str, examples: int, redis_server: RedisServer) -> None:
    machine = type("Machine", (DirectoryMachine,), {"kind": kind, "redis_url": redis_server.url})
    limits = settings(
        max_examples=examples,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=limits)
