"""Random histories: both directories answer as the brute-force model does, and never contradict themselves."""

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.cache.domain.directory import PlannedEntry
from services.cache.domain.errors import UnknownLeaseError, UnknownWorkerError
from services.cache.domain.values import Limits, PlanOutcome, RegisterOutcome
from tests.contract.directory_model import DirectoryModel, ModelRecord, ModelTicket, tenant_of
from tests.contract.directory_rig import LIMITS, Clock, create_rig
from tests.redis_server import RedisServer

CONTENTS = ("a", "b", "c", "d", "e", "f")
NAMES = st.sampled_from(CONTENTS)
# Two tenants with a namespace each, and the public one that they share.
TENANTS = st.sampled_from(["acme", "acme", "other", "public"])
TAGS = st.sampled_from([frozenset(), frozenset({"t1"}), frozenset({"t1", "t2"})])
BUDGETS = replace(LIMITS, namespace_budget_bytes=800)
# No sums of what `advance` offers, so that nothing depends on the microsecond.
STRICT = replace(BUDGETS, share_seconds=40.25, entry_ttl_seconds=150.25, min_uses=2)
WORKERS = st.sampled_from(["w1", "w2"])
SECONDS = st.sampled_from([5.0, 30.0, 90.0])
# Prefer recent leases and tickets: the index counts from the end.
RECENT = st.integers(min_value=0, max_value=5)

_STEPS = 50

Reply = TypeVar("Reply")


class DirectoryMachine(RuleBasedStateMachine):
    """Drives an adapter and the model side by side."""

    kind: ClassVar[str] = "memory"
    redis_url: ClassVar[str] = ""
    limits: ClassVar[Limits] = BUDGETS

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.rig = create_rig(self.kind, self.redis_url, self.limits, Clock())
        self.model = DirectoryModel(self.limits, self.rig.clock.now)
        self.lease_ids: list[str] = []
        self.tickets: list[tuple[ModelTicket, PlannedEntry]] = []
        self.heartbeat("w1", 0)

    def run(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.rig.directory.close())
        self.runner.close()

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), seconds=SECONDS, tenant=TENANTS)
    def plan(self, names: list[str], seconds: float, tenant: str) -> None:
        self.lease_ids.append("")
        self._plan(len(self.lease_ids) - 1, names, seconds, tenant)

    @precondition(lambda self: self.lease_ids)
    @rule(names=st.lists(NAMES, min_size=1, max_size=3), seconds=SECONDS, recent=RECENT, tenant=TENANTS)
    def extend(self, names: list[str], seconds: float, recent: int, tenant: str) -> None:
        lease = max(len(self.lease_ids) - 1 - recent, 0)
        if lease in self.model.leases:
            self._plan(lease, names, seconds, tenant)
        else:
            with pytest.raises(UnknownLeaseError):
                self.run(self.rig.plan(*names, lease_id=self.lease_ids[lease], seconds=seconds, tenant=tenant))

    def _plan(self, lease: int, contents: list[str], seconds: float, tenant: str) -> None:
        names = [f"{tenant}/{content}" for content in contents]
        expected = self.model.plan(lease, names, seconds)
        reply = self.run(self.rig.plan(*contents, lease_id=self.lease_ids[lease], seconds=seconds, tenant=tenant))
        self.lease_ids[lease] = reply.lease_id
        assert [entry.outcome for entry in reply.entries] == expected
        for name, planned in zip(names, reply.entries, strict=True):
            entry, ticket = self.model.found(name), self.model.live_ticket(name)
            is_hit = planned.outcome is PlanOutcome.HIT
            assert {holder.worker_id for holder in planned.holders} == (set(entry.since) if entry and is_hit else set())
            if is_hit:
                assert entry is not None
                assert planned.key == self.key_of(entry.ticket)
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

    @rule(content=NAMES, tenant=TENANTS)
    def invalidate_document(self, content: str, tenant: str) -> None:
        removed = self.run(self.rig.invalidate_document(tenant, f"doc-{content}"))
        assert removed == self.model.invalidate({f"{tenant}/{content}"})
        self.model.forget({f"{tenant}/{content}"})
        self.model.unpin(f"{tenant}/{content}")

    @rule(content=NAMES, tenant=TENANTS, pinned=st.booleans())
    def pin_document(self, content: str, tenant: str, pinned: bool) -> None:
        cache, model = self.rig.cache, self.model
        change, expected = (cache.pin_document, model.pin) if pinned else (cache.unpin_document, model.unpin)
        assert self.run(change(tenant, f"doc-{content}")) == expected(f"{tenant}/{content}")

    @rule(tenant=TENANTS, pinned=st.sampled_from([True, False, False]))
    def pin_tenant(self, tenant: str, pinned: bool) -> None:
        cache, model = self.rig.cache, self.model
        change, expected = (cache.pin_tenant, model.pin) if pinned else (cache.unpin_tenant, model.unpin)
        assert self.run(change(tenant)) == expected(tenant)

    @rule(content=NAMES, tenant=TENANTS, is_newer=st.booleans(), tags=TAGS)
    def register(self, content: str, tenant: str, is_newer: bool, tags: frozenset[str]) -> None:
        """The content itself becomes current, or one that no plan of this machine carries."""
        name = f"{tenant}/{content}"
        expected = self.model.register(name, ModelRecord("newer" if is_newer else name, tags))
        current = "newer" if is_newer else content
        reply = self.run(self.rig.register(f"doc-{content}", current, *sorted(tags), tenant=tenant))
        assert (reply.outcome is RegisterOutcome.UNCHANGED) == (expected is None)
        assert reply.removal.num_entries == (expected or 0)

    @rule(tag=st.sampled_from(["t1", "t2"]), tenant=TENANTS)
    def invalidate_tag(self, tag: str, tenant: str) -> None:
        names = {name for name in self.model.names_of(tag) if tenant_of(name) == tenant}
        assert self.run(self.rig.invalidate_tag(tenant, tag)) == self.model.invalidate(names)
        self.model.forget({name for name in names if tag in self.tags_of(name)})

    def tags_of(self, name: str) -> frozenset[str]:
        record = self.model.records.get(name)
        return record.tags if record else frozenset()

    @rule(scope=st.sampled_from(["tenant", "model", "stranger"]), tenant=TENANTS)
    def invalidate_all(self, scope: str, tenant: str) -> None:
        names = {f"{each}/{content}" for each in ("acme", "other", "public") for content in CONTENTS}
        if scope == "model":
            assert self.run(self.rig.invalidate_model("model-1")) == self.model.invalidate(names)
            self.model.change_keys(names)
            return
        tenant = tenant if scope == "tenant" else "stranger"
        names = {name for name in names if tenant_of(name) == tenant}
        assert self.run(self.rig.invalidate_tenant(tenant)) == self.model.invalidate(names)
        self.model.forget(names)
        self.model.change_keys(names)
        self.model.unpin(tenant)

    @rule(worker=WORKERS, missing=st.sampled_from([0, 0, 0, 0, 1, 9]))
    def heartbeat(self, worker: str, missing: int) -> None:
        """A worker lists what it holds, now and then without one of its copies, or after a crash without any."""
        listed = set(sorted(self.model.held_by(worker))[missing:])
        self.model.heartbeat(worker, listed)
        assert self.run(self.rig.beat(worker, self._keys(listed))) == set()

    @rule()
    def lose_memory(self) -> None:
        """The directory starts anew without anything; what living workers hold comes back by their receipts."""
        self.run(self.rig.directory.close())
        receipts = self.rig.receipts
        self.rig = create_rig(self.kind, self.redis_url, self.limits, self.rig.clock)
        self.rig.receipts = receipts
        for worker in self.model.workers:
            assert self.run(self.rig.beat(worker, self._keys(self.model.held_by(worker)))) == set()
        self.model.lose_memory()

    def _keys(self, names: set[str]) -> list[bytes]:
        return [self.key_of(entry.ticket) for entry in self.model.entries if entry.name in names]

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
        for tenant in ("acme", "other", "public"):
            page = self.run(self.rig.documents.page(tenant, "", 100))
            shown = [each.record.document_id for each in page.documents if each.record]
            assert shown == sorted(f"doc-{name[-1]}" for name in self.model.records if tenant_of(name) == tenant)
        assert usage.num_workers == len(self.model.workers)
        self.run(self.rig.directory.check_integrity())


# A check of everything behind every step, on a machine that may be busy; `make soak` takes longer for many more steps.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("limits", [BUDGETS, STRICT], ids=["plain", "strict"])
@pytest.mark.parametrize(("kind", "examples"), [("memory", 80), ("redis", 25)])
def test_random_histories_agree_with_the_model(
    kind: str, examples: int, limits: Limits, redis_server: RedisServer
) -> None:
    """`HYPIC_STATE_MACHINE_STEPS` asks for at least this many steps of each directory."""
    examples = max(examples, -(-int(os.environ.get("HYPIC_STATE_MACHINE_STEPS", "0")) // _STEPS))
    machine = type("Machine", (DirectoryMachine,), {"kind": kind, "redis_url": redis_server.url, "limits": limits})
    steps = settings(
        max_examples=examples,
        stateful_step_count=_STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=steps)
