"""What every directory does about who may stay: scores, shares of tenants, pins, age, and admission."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from services.cache.domain.errors import PinLimitError
from services.cache.domain.orders import PinReply
from services.cache.domain.values import EntryKind, Limits, PlanOutcome, PublishOutcome
from tests.contract.directory_rig import LIMITS, Rig, create_rig
from tests.redis_server import RedisServer

HIT, COLD, LIVE = PlanOutcome.HIT, PlanOutcome.COLD, PlanOutcome.LIVE

MakeRig = Callable[[Limits], Awaitable[Rig]]


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[MakeRig]:
    """Rigs with limits of the test's own; their indexes must agree afterwards."""
    rigs: list[Rig] = []

    async def make(limits: Limits) -> Rig:
        rigs.append(create_rig(request.param, redis_server.url, limits))
        await rigs[-1].beat("w1")
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.directory.check_integrity()
        await rig.directory.close()


async def test_what_saves_most_per_byte_and_is_used_most_stays(rig: Rig) -> None:
    await rig.store("bulky", size=500)
    await rig.store("small", size=100)
    await rig.store("used", size=300)
    for _ in range(3):
        await rig.outcomes("used")
    await rig.store("new", size=400)
    assert await rig.outcomes("bulky", "small", "used", "new") == [COLD, HIT, HIT, HIT]


async def test_what_was_once_used_often_ages(rig: Rig) -> None:
    await rig.store("popular", size=500)
    for _ in range(4):
        await rig.outcomes("popular")
    for number in range(3):
        await rig.store(f"new {number}", size=400)
    assert await rig.outcomes("popular") == [HIT]
    for number in range(3, 20):
        await rig.store(f"new {number}", size=400)
    assert await rig.outcomes("popular", "new 19") == [COLD, HIT]


async def test_a_plan_counts_one_use_however_often_it_names_a_part(rig: Rig) -> None:
    await rig.store("a", size=500)
    await rig.store("b", size=450)
    lease = await rig.plan("a", "a", "a")
    await rig.plan("a", lease_id=lease.lease_id)
    await rig.cache.release(lease.lease_id)
    for _ in range(2):
        await rig.outcomes("b")
    await rig.store("c", size=300)
    assert await rig.outcomes("a", "b") == [COLD, HIT]


async def test_a_flood_leaves_another_tenant_its_share(rig: Rig) -> None:
    await rig.store("mine", size=400, tenant="quiet")
    for number in range(30):
        reply = await rig.plan(f"flood {number}", tenant="loud")
        outcome = (await rig.publish(reply.entries[0], size=150)).outcome
        assert outcome is PublishOutcome.ACCEPTED
        await rig.cache.release(reply.lease_id)
        await rig.outcomes(f"flood {number}", tenant="loud")
    assert await rig.outcomes("mine", tenant="quiet") == [HIT]


async def test_a_tenant_above_its_share_gives_room(rig: Rig) -> None:
    await rig.store(*(f"early {number}" for number in range(10)), tenant="first")
    for number in range(10):
        reply = await rig.plan(f"late {number}", tenant="second")
        await rig.publish(reply.entries[0])
        await rig.cache.release(reply.lease_id)
    early = await rig.outcomes(*(f"early {number}" for number in range(10)), tenant="first")
    late = await rig.outcomes(*(f"late {number}" for number in range(10)), tenant="second")
    assert early.count(HIT) == late.count(HIT) == 5


async def test_a_tenant_that_stays_away_loses_its_share(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, share_seconds=100.0))
    (old,) = await rig.store("old", size=400, tenant="away")
    for seconds, dropped in ((99, set()), (2, {old})):
        rig.clock.now += seconds
        held = [key for _, key in rig.receipts]
        await rig.beat("w1", held)
        for number in range(3):
            await rig.store(f"{seconds} {number}", size=500, tenant="busy")
        assert await rig.beat("w1", [old]) == dropped


async def test_a_tenant_keeps_its_own_bound(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, namespace_budget_bytes=300))
    await rig.store("other", size=100, tenant="other")
    await rig.store("a", "b", "c", size=100)
    await rig.store("d", size=100)
    assert (await rig.directory.usage()).used_bytes == 400
    assert (await rig.outcomes("a", "b", "c", "d")).count(HIT) == 3
    assert await rig.outcomes("other", tenant="other") == [HIT]
    reply = await rig.plan("huge")
    assert (await rig.publish(reply.entries[0], size=301)).outcome is PublishOutcome.OVER_BUDGET
    assert (await rig.directory.usage()).used_bytes == 400


async def test_a_pinned_document_is_never_evicted(rig: Rig) -> None:
    await rig.store("a", size=400)
    assert await rig.pins.pin_document("acme", "doc-a") == PinReply(1, 400, 1000)
    for number in range(10):
        await rig.store(f"new {number}", size=600)
    assert await rig.outcomes("a") == [HIT]
    reply = await rig.plan("large")
    assert (await rig.publish(reply.entries[0], size=700)).outcome is PublishOutcome.OVER_BUDGET
    await rig.cache.release(reply.lease_id)
    assert await rig.pins.unpin_document("acme", "doc-a") == PinReply(1, 0, 1000)
    await rig.store("large", size=1000)
    assert await rig.outcomes("a") == [COLD]


async def test_a_pin_holds_for_what_is_stored_later_and_ends_with_invalidation(rig: Rig) -> None:
    assert await rig.pins.pin_document("acme", "doc-a") == PinReply(0, 0, 1000)
    await rig.store("a", size=400)
    await rig.store("b", size=600)
    await rig.store("c", size=600)
    assert await rig.outcomes("a", "b") == [HIT, COLD]
    await rig.cache.invalidate_document("acme", "doc-a")
    await rig.store("a", size=400)
    await rig.store("large", size=1000)
    assert await rig.outcomes("a") == [COLD]


async def test_another_document_id_can_pin_what_is_stored_already(rig: Rig) -> None:
    await rig.store("a", size=400)
    await rig.pins.pin_document("acme", "favourite")
    lease = await rig.plan("a", document="favourite")
    await rig.cache.release(lease.lease_id)
    await rig.store("b", size=600)
    await rig.store("c", size=600)
    assert await rig.outcomes("a", "b") == [HIT, COLD]


async def test_a_whole_tenant_can_be_pinned_within_its_bound(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, namespace_budget_bytes=500))
    await rig.pins.pin_tenant("acme")
    await rig.store("a", "b", size=250)
    reply = await rig.plan("c")
    assert (await rig.publish(reply.entries[0], size=250)).outcome is PublishOutcome.OVER_BUDGET
    await rig.store("theirs", size=500, tenant="other")
    assert await rig.outcomes("a", "b") == [HIT, HIT]
    await rig.pins.unpin_tenant("acme")
    await rig.store("c", size=250)
    assert (await rig.outcomes("a", "b", "c")).count(HIT) == 2


async def test_pins_keep_no_more_than_their_share(make: MakeRig) -> None:
    """A tenant counts with its budget, whatever it holds; a document with what is stored when it is pinned."""
    rig = await make(replace(LIMITS, namespace_budget_bytes=300, pinned_share=0.5))
    await rig.store("a", "b", size=100)
    await rig.store("c", "d", size=110, tenant="other")
    assert await rig.pins.pin_tenant("acme") == PinReply(2, 300, 500)
    # A document of a pinned tenant counts with it.
    assert (await rig.pins.pin_document("acme", "doc-a")).promised_bytes == 300
    assert await rig.pins.pin_document("other", "doc-c") == PinReply(1, 410, 500)
    with pytest.raises(PinLimitError, match=r"pins would keep 520 bytes .* of 500") as refused:
        await rig.pins.pin_document("other", "doc-d")
    assert (refused.value.promised_bytes, refused.value.limit_bytes) == (520, 500)
    # What is pinned already may be pinned again, and what was refused is not.
    assert (await rig.pins.pin_document("other", "doc-c")).promised_bytes == 410
    described = [await rig.documents.describe("other", name) for name in ("doc-c", "doc-d")]
    assert [one.is_pinned for one in described if one] == [True, False]
    with pytest.raises(PinLimitError):
        await rig.pins.pin_tenant("other", 301)
    await rig.pins.unpin_document("other", "doc-c")
    assert (await rig.pins.unpin_tenant("acme")).promised_bytes == 100
    assert await rig.pins.pin_tenant("other", 220) == PinReply(2, 320, 500)


async def test_a_pin_is_shown_with_its_document(rig: Rig) -> None:
    await rig.register("doc-a", "a")
    await rig.store("a", "b")
    assert await rig.documents.describe("acme", "ahead") is None
    await rig.pins.pin_document("acme", "doc-a")
    await rig.pins.pin_document("acme", "ahead")
    described = [await rig.documents.describe("acme", name) for name in ("doc-a", "doc-b", "ahead", "unknown")]
    assert [one and one.is_pinned for one in described] == [True, False, True, None]
    assert [one.is_pinned for one in (await rig.documents.page("acme", "", 10)).documents] == [True]
    await rig.pins.pin_tenant("acme")
    described = [await rig.documents.describe("acme", name) for name in ("doc-b", "unknown")]
    assert [one and one.is_pinned for one in described] == [True, None]


async def test_snapshots_with_a_pinned_document_are_evicted_as_ever(rig: Rig) -> None:
    """Else every prompt with it would leave one that stays for ever."""
    await rig.pins.pin_document("acme", "doc-a")
    await rig.store("a", size=200)
    reply = await rig.plan("chain", document="doc-a", kind=EntryKind.PREFIX)
    await rig.publish(reply.entries[0], size=700)
    await rig.cache.release(reply.lease_id)
    await rig.store("b", size=700)
    assert await rig.outcomes("a", "b") == [HIT, HIT]
    again = await rig.plan("chain", document="doc-a", kind=EntryKind.PREFIX)
    assert again.entries[0].outcome is COLD


async def test_an_entry_leaves_with_its_age(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, entry_ttl_seconds=100.0))
    (key,) = await rig.store("a")
    await rig.pins.pin_tenant("acme")
    for _ in range(9):
        rig.clock.now += 11
        assert await rig.beat("w1", [key]) == set()
        assert await rig.outcomes("a") == [HIT]
    lease = await rig.plan("a", seconds=60)
    rig.clock.now += 1.5
    assert (await rig.directory.usage()).num_entries == 0
    assert await rig.beat("w1", [key]) == {key}
    await rig.cache.release(lease.lease_id)
    assert await rig.outcomes("a") == [COLD]


async def test_a_receipt_does_not_make_an_entry_young_again(make: MakeRig) -> None:
    limits = replace(LIMITS, entry_ttl_seconds=100.0)
    before, after = await make(limits), await make(limits)
    (key,) = await before.store("a")
    after.receipts = before.receipts
    after.clock.now += 99
    await after.beat("w1")
    assert await after.beat("w1", [key]) == set()
    assert await after.outcomes("a") == [HIT]
    after.clock.now += 1.5
    await after.beat("w1")
    assert await after.beat("w1", [key]) == {key}
    assert await after.outcomes("a") == [COLD]


async def test_a_segment_is_captured_when_it_is_seen_again(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, min_uses=3))
    assert await rig.outcomes("a", "a", "b") == [LIVE, LIVE, LIVE]
    assert (await rig.directory.usage()).num_tickets == 0
    assert await rig.outcomes("a") == [LIVE]
    reply = await rig.plan("a", "a", "b")
    assert [entry.outcome for entry in reply.entries] == [COLD, COLD, LIVE]
    assert reply.entries[0].ticket == reply.entries[1].ticket
    await rig.publish(reply.entries[0])
    assert await rig.outcomes("a", "b") == [HIT, COLD]
    assert await rig.outcomes("a", tenant="other") == [LIVE]


async def test_snapshots_and_what_is_asked_for_are_captured_at_first_sight(make: MakeRig) -> None:
    rig = await make(replace(LIMITS, min_uses=2))
    assert [one.outcome for one in (await rig.plan("a", admit_all=True)).entries] == [COLD]
    assert [one.outcome for one in (await rig.plan("b", kind=EntryKind.PREFIX)).entries] == [COLD]
    assert [one.outcome for one in (await rig.plan("b")).entries] == [LIVE]
