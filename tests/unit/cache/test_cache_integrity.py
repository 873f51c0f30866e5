"""Each broken invariant is seen: a check that cannot fail would hide every other fault."""

from dataclasses import replace

import pytest

from services.cache.domain.errors import IntegrityError
from services.cache.domain.integrity import (
    EntryState,
    LeaseState,
    RecordState,
    Snapshot,
    TicketState,
    require_integrity,
    violations,
)

A, B = b"a" * 32, b"b" * 32
SCOPES = frozenset({"tenant:1", "model:2", "document:3", "tag:4"})
ENTRY = EntryState(30, "tenant:1", 7, frozenset({"w1", "w2"}), frozenset({"l1"}), 1)
SOUND = Snapshot(
    budget_bytes=100,
    used_bytes=60,
    sequence=9,
    entries={A: ENTRY},
    tickets={"t1": TicketState(B, 9, "l1", dead=False), "t0": TicketState(B, 8, "gone", dead=True)},
    ticket_of={B: "t1"},
    leases={"l1": LeaseState(frozenset({A}), frozenset({"t1"}))},
    idle={},
    pinned=frozenset(),
    ages={A: 7},
    held={"w1": frozenset({A}), "w2": frozenset({A})},
    marked={"w1": frozenset({B})},
    scopes_of={A: SCOPES, B: SCOPES},
    keys_of_scope=dict.fromkeys(SCOPES, frozenset({A, B})),
    tenant_bytes={"tenant:1": 60},
    tenant_budgets={"tenant:1": 60},
    epochs={"tenant:1": 3, "tag:9": 4},
    links={A: frozenset({"tag:4"})},
    past=frozenset({(b"", "tag:9"), (A, "tag:4")}),
    records={"document:3": RecordState("tenant:1", frozenset({"tag:4"}), 9)},
    records_of=dict.fromkeys(("tenant:1", "tag:4"), frozenset({"document:3"})),
)
BROKEN = {
    "counter": replace(SOUND, used_bytes=30),
    "budget": replace(SOUND, budget_bytes=59),
    "no holder": replace(SOUND, used_bytes=0, held={}, entries={A: replace(ENTRY, holders=frozenset())}),
    "holder": replace(SOUND, held={"w1": frozenset({A})}),
    "marked": replace(SOUND, marked={"w1": frozenset({A})}),
    "lease": replace(SOUND, leases={"l1": LeaseState(frozenset(), frozenset({"t1"}))}),
    "lost lease": replace(SOUND, leases={}),
    "number of leases": replace(SOUND, entries={A: replace(ENTRY, num_leases=2)}),
    "idle": replace(SOUND, idle={"tenant:1": frozenset({A})}),
    "pinned": replace(
        SOUND,
        entries={A: replace(ENTRY, leases=frozenset(), num_leases=0)},
        leases={"l1": LeaseState(frozenset(), frozenset({"t1"}))},
        idle={"tenant:1": frozenset({A})},
        pinned=frozenset({"document:3"}),
    ),
    "age": replace(SOUND, ages={A: 8}),
    "owned": replace(SOUND, leases={"l1": LeaseState(frozenset({A}), frozenset())}),
    "past": replace(SOUND, past=frozenset({(b"", "tag:9")})),
    "epoch": replace(SOUND, epochs={"tenant:1": 10, "tag:9": 4}),
    "epoch beside a version": replace(
        SOUND,
        epochs={"document:3": 3, "tag:9": 4},
        past=frozenset({(b"", "tag:9"), (b"", "document:3"), (A, "tag:4")}),
    ),
    "live ticket": replace(SOUND, ticket_of={}),
    "dead ticket": replace(SOUND, ticket_of={B: "t0"}),
    "both": replace(SOUND, tickets={"t1": TicketState(A, 9, "l1", dead=False)}, ticket_of={A: "t1"}),
    "fence": replace(SOUND, sequence=8),
    "scope index": replace(SOUND, keys_of_scope=dict.fromkeys(SCOPES, frozenset({A}))),
    "scopes of nothing": replace(
        SOUND,
        scopes_of={**SOUND.scopes_of, b"c" * 32: SCOPES},
        keys_of_scope=dict.fromkeys(SCOPES, frozenset({A, B, b"c" * 32})),
    ),
    "tenant's counter": replace(SOUND, tenant_bytes={"tenant:1": 59}),
    "tenant's budget": replace(SOUND, tenant_budgets={"tenant:1": 59}),
    "another tenant": replace(
        SOUND,
        entries={A: replace(ENTRY, tenant="tenant:9")},
        tenant_bytes={"tenant:9": 60},
    ),
    "record index": replace(SOUND, records_of={"tenant:1": frozenset({"document:3"})}),
    "lost record": replace(SOUND, records={}),
    "version": replace(SOUND, records={"document:3": RecordState("tenant:1", frozenset({"tag:4"}), 10)}),
    "no tenant": replace(
        SOUND,
        scopes_of=dict.fromkeys((A, B), SCOPES - {"tenant:1"}),
        keys_of_scope=dict.fromkeys(SCOPES - {"tenant:1"}, frozenset({A, B})),
    ),
}


def test_a_sound_directory_has_no_violations() -> None:
    assert violations(SOUND) == []
    require_integrity(SOUND)


@pytest.mark.parametrize("fault", list(BROKEN))
def test_each_fault_is_found(fault: str) -> None:
    with pytest.raises(IntegrityError):
        require_integrity(BROKEN[fault])
