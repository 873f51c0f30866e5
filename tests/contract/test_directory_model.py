"""Random histories: both directories answer as the brute-force model does, and never contradict themselves."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from services.cache.domain.cache import ResidentCopy
from services.cache.domain.errors import PinLimitError, UnknownLeaseError, UnknownWorkerError
from services.cache.domain.orders import PinReply, PlannedEntry
from services.cache.domain.values import Limits, PlanOutcome, RegisterOutcome
from services.cache.domain.workers import WorkerRecord
from tests.contract.directory_model import DirectoryModel, ModelRecord, ModelTicket, tenant_of
from tests.contract.directory_rig import LIMITS, Clock, Rig, create_rig, journaled_rig
from tests.redis_server import RedisServer

CONTENTS = ("a", "b", "c", "d", "e", "f")
NAMES = st.sampled_from(CONTENTS)
# Two tenants with a namespace each, and the public one that they share.
TENANTS = st.sampled_from(["acme", "acme", "other", "public"])
TAGS = st.sampled_from([frozenset(), frozenset({"t1"}), frozenset({"t1", "t2"})])
BUDGETS = replace(LIMITS, namespace_budget_bytes=800, pinned_share=0.9)
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
    # Over all histories of one subclass.
    num_checks: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.lives = 0
        # Receipts of copies that have fallen since, whose workers may not have heard of it.
        self.fallen: list[tuple[str, ResidentCopy]] = []
        self.rig = self.new_life(Clock())
        self.model = DirectoryModel(self.limits, self.rig.clock.now)
        self.lease_ids: list[str] = []
        self.tickets: list[tuple[ModelTicket, PlannedEntry]] = []
        self.heartbeat("w1", 0)

    def run(self, call: Coroutine[Any, Any, Reply]) -> Reply:
        return self.runner.run(call)

    def teardown(self) -> None:
        self.run(self.rig.directory.close())
        self.runner.close()
        self.folder.cleanup()

    def new_life(self, clock: Clock) -> Rig:
        """A directory without any memory."""
        self.lives += 1
        if self.kind == "memory":
            return journaled_rig(self.journal, self.limits, clock)
        return create_rig(self.kind, self.redis_url, self.limits, clock, life=str(self.lives))

    @property
    def journal(self) -> Path:
        return Path(self.folder.name) / f"journal {self.lives}"

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
        self._publish(*self.tickets[max(len(self.tickets) - 1 - recent, 0)], worker, size)

    @rule(names=st.lists(NAMES, min_size=1, max_size=3), tenant=TENANTS, worker=WORKERS)
    def store(self, names: list[str], tenant: str, worker: str) -> None:
        """A whole request, from its plan to the end of its lease."""
        self.plan(names, 30.0, tenant)
        lease = len(self.lease_ids) - 1
        for ticket, planned in [own for own in self.tickets if own[0].lease == lease]:
            self._publish(ticket, planned, worker, 100)
        self.release(0)

    def _publish(self, ticket: ModelTicket, planned: PlannedEntry, worker: str, size: int) -> None:
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
        self._note_fall({f"{tenant}/{content}"})
        removed = self.run(self.rig.invalidate_document(tenant, f"doc-{content}"))
        assert removed == self.model.invalidate({f"{tenant}/{content}"})
        self.model.forget({f"{tenant}/{content}"})
        self.model.unpin(f"{tenant}/{content}")

    @rule(content=NAMES, tenant=TENANTS, pinned=st.booleans())
    def pin_document(self, content: str, tenant: str, pinned: bool) -> None:
        pins, name = self.rig.pins, f"doc-{content}"
        change = pins.pin_document(tenant, name) if pinned else pins.unpin_document(tenant, name)
        self._settle_pin(change, f"{tenant}/{content}", pinned)

    @rule(tenant=TENANTS, pinned=st.sampled_from([True, False, False]))
    def pin_tenant(self, tenant: str, pinned: bool) -> None:
        pins = self.rig.pins
        self._settle_pin(pins.pin_tenant(tenant) if pinned else pins.unpin_tenant(tenant), tenant, pinned)

    def _settle_pin(self, change: Coroutine[Any, Any, PinReply], scope: str, pinned: bool) -> None:
        expected = self.model.pin(scope) if pinned else self.model.unpin(scope)
        if expected is None:
            with pytest.raises(PinLimitError):
                self.run(change)
        else:
            assert self.run(change) == expected

    @rule(content=NAMES, tenant=TENANTS, is_newer=st.booleans(), tags=TAGS)
    def register(self, content: str, tenant: str, is_newer: bool, tags: frozenset[str]) -> None:
        """The content itself becomes current, or one that no plan of this machine carries."""
        name = f"{tenant}/{content}"
        if self.model.records.get(name) != ModelRecord("newer" if is_newer else name, tags):
            self._note_fall({name})
        expected = self.model.register(name, ModelRecord("newer" if is_newer else name, tags))
        current = "newer" if is_newer else content
        reply = self.run(self.rig.register(f"doc-{content}", current, *sorted(tags), tenant=tenant))
        assert (reply.outcome is RegisterOutcome.UNCHANGED) == (expected is None)
        assert reply.removal.num_entries == (expected or 0)

    @rule(tag=st.sampled_from(["t1", "t2"]), tenant=TENANTS)
    def invalidate_tag(self, tag: str, tenant: str) -> None:
        names = {name for name in self.model.names_of(tag) if tenant_of(name) == tenant}
        self._note_fall(names)
        assert self.run(self.rig.invalidate_tag(tenant, tag)) == self.model.invalidate(names)
        self.model.forget({name for name in names if tag in self.tags_of(name)})

    def tags_of(self, name: str) -> frozenset[str]:
        record = self.model.records.get(name)
        return record.tags if record else frozenset()

    @rule(scope=st.sampled_from(["tenant", "model", "stranger"]), tenant=TENANTS)
    def invalidate_all(self, scope: str, tenant: str) -> None:
        names = {f"{each}/{content}" for each in ("acme", "other", "public") for content in CONTENTS}
        self._note_fall({name for name in names if scope == "model" or (scope, tenant_of(name)) == ("tenant", tenant)})
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

    def _note_fall(self, names: set[str]) -> None:
        """These contents are about to be invalidated."""
        keys = self._keys(names)
        fallen = [(worker, key) for worker, key in self.rig.receipts if key in keys]
        self.fallen += [(own[0], ResidentCopy(own[1], "host", self.rig.receipts[own])) for own in fallen]

    @rule(remembers=st.sampled_from([True, True, True, False]))
    def begin_anew(self, remembers: bool) -> None:
        self._restart() if remembers else self._lose_everything()

    def _restart(self) -> None:
        """What living workers hold comes back by their receipts, and nothing that has fallen.

        The Redis that is restarted has lost all data but its life, and with that what it knew of invalidations.
        """
        self.run(self.rig.directory.close())
        receipts, clock = self.rig.receipts, self.rig.clock
        if self.kind == "memory":
            self.rig = journaled_rig(self.journal, self.limits, clock)
        else:
            self.rig = create_rig(self.kind, self.redis_url, self.limits, clock, life=str(self.lives))
            self.model.lose_documents()
            self.fallen = []
        self.rig.receipts = receipts
        for worker in self.model.workers:
            held = self._keys(self.model.held_by(worker))
            fallen = {copy.key: copy for name, copy in self.fallen if name == worker and copy.key not in held}
            self._offer(worker, [self._copy(worker, key) for key in held], list(fallen.values()))
        self.model.restart()

    def _lose_everything(self) -> None:
        """A directory that remembers nothing takes nothing back."""
        self.run(self.rig.directory.close())
        receipts = self.rig.receipts
        self.rig = self.new_life(self.rig.clock)
        self.rig.receipts = receipts
        for worker in self.model.workers:
            self._offer(worker, [], [self._copy(worker, key) for key in self._keys(self.model.held_by(worker))])
        self.model.lose_everything()
        self.fallen = []

    def _copy(self, worker: str, key: bytes) -> ResidentCopy:
        return ResidentCopy(key, "host", self.rig.receipts[worker, key])

    def _offer(self, worker: str, good: list[ResidentCopy], bad: list[ResidentCopy]) -> None:
        """A heartbeat that lists copies that are taken back, and others that are to be dropped."""
        dropped = self.run(self.rig.cache.heartbeat(WorkerRecord(worker, f"{worker}.test:7201"), [*bad, *good]))
        assert set(dropped) == {copy.key for copy in bad}

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
        type(self).num_checks += 1


# A check of everything behind every step, on a machine that may be busy; `make soak` takes longer for many more steps.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("limits", [BUDGETS, STRICT], ids=["plain", "strict"])
@pytest.mark.parametrize(("kind", "examples"), [("memory", 80), ("redis", 25)])
def test_random_histories_agree_with_the_model(
    kind: str,
    examples: int,
    limits: Limits,
    redis_server: RedisServer,
    record_property: Callable[[str, object], None],
) -> None:
    """`HYPIC_STATE_MACHINE_STEPS` asks for at least this many steps of each directory."""
    examples = max(examples, -(-int(os.environ.get("HYPIC_STATE_MACHINE_STEPS", "0")) // _STEPS))
    machine = type("Machine", (DirectoryMachine,), {"kind": kind, "redis_url": redis_server.url, "limits": limits})
    assert issubclass(machine, DirectoryMachine)
    steps = settings(
        max_examples=examples,
        stateful_step_count=_STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    run_state_machine_as_test(machine, settings=steps)
    record_property("checks", machine.num_checks)
    record_property("of", f"{kind}, {'strict' if limits is STRICT else 'plain'} limits")
