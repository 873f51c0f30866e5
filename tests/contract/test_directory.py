"""What every directory does about plans, leases, tickets and publishing."""

import asyncio
from dataclasses import replace

import pytest

from services.cache.domain.errors import InvalidOrderError, UnknownLeaseError, UnknownWorkerError
from services.cache.domain.orders import PublishOrder
from services.cache.domain.values import Holder, PlanOutcome, PublishOutcome
from tests.contract.directory_rig import Rig, gather_plans

HIT, COLD, PENDING = PlanOutcome.HIT, PlanOutcome.COLD, PlanOutcome.PENDING


async def test_cold_then_published_then_hit(rig: Rig) -> None:
    reply = await rig.plan("a")
    assert reply.entries[0].outcome is COLD
    assert len(reply.entries[0].key) == 32
    assert (await rig.publish(reply.entries[0])).outcome is PublishOutcome.ACCEPTED
    again = (await rig.plan("a")).entries[0]
    assert again.outcome is HIT
    assert again.key == reply.entries[0].key
    assert again.holders == (Holder("w1", "w1.test:7201", "host"),)
    assert again.ticket is None


async def test_another_lease_waits_for_the_owner(rig: Rig) -> None:
    await rig.plan("a")
    rig.clock.now += 10
    waiting = (await rig.plan("a")).entries[0]
    assert waiting.outcome is PENDING
    assert waiting.ticket is None
    assert waiting.owner_expires_in_seconds == pytest.approx(50)


@pytest.mark.parametrize("count", [2, 40])
async def test_concurrent_plans_give_one_ticket(rig: Rig, count: int) -> None:
    replies = await gather_plans(rig, count, "a", "b")
    for place in range(2):
        outcomes = [reply.entries[place].outcome for reply in replies]
        assert outcomes.count(COLD) == 1
        assert outcomes.count(PENDING) == count - 1


async def test_concurrent_publishes_of_one_ticket_count_once(rig: Rig) -> None:
    planned = (await rig.plan("a")).entries[0]
    results = await asyncio.gather(*(rig.publish(planned) for _ in range(10)))
    assert {result.outcome for result in results} == {PublishOutcome.ACCEPTED}
    assert (await rig.directory.usage()).used_bytes == 100


async def test_the_same_segment_twice_shares_a_ticket(rig: Rig) -> None:
    first, other, second = (await rig.plan("a", "b", "a")).entries
    assert first.ticket == second.ticket
    assert first.ticket != other.ticket


async def test_the_owner_that_plans_again_keeps_its_ticket(rig: Rig) -> None:
    first = await rig.plan("a")
    again = await rig.plan("a", lease_id=first.lease_id)
    assert again.lease_id == first.lease_id
    assert again.entries[0].outcome is COLD
    assert again.entries[0].ticket == first.entries[0].ticket


async def test_a_lease_can_be_extended_by_what_was_pending(rig: Rig) -> None:
    owner, waiter = await rig.plan("a"), await rig.plan("a", "b")
    await rig.publish(owner.entries[0])
    await rig.cache.release(owner.lease_id)
    assert (await rig.plan("a", lease_id=waiter.lease_id)).entries[0].outcome is HIT
    reply = await rig.plan("big")
    assert (await rig.publish(reply.entries[0], size=950)).outcome is PublishOutcome.OVER_BUDGET


async def test_a_lapsed_lease_cannot_be_extended(rig: Rig) -> None:
    lease_id = (await rig.plan("a")).lease_id
    rig.clock.now += 31
    with pytest.raises(UnknownLeaseError):
        await rig.plan("a", lease_id=lease_id)


async def test_release_frees_unpublished_tickets_and_is_idempotent(rig: Rig) -> None:
    reply = await rig.plan("a", "b")
    await rig.publish(reply.entries[0])
    await rig.cache.release(reply.lease_id)
    await rig.cache.release(reply.lease_id)
    await rig.cache.release("never given")
    await rig.cache.release()
    assert (await rig.publish(reply.entries[1])).outcome is PublishOutcome.FENCED
    assert [entry.outcome for entry in (await rig.plan("a", "b")).entries] == [HIT, COLD]


async def test_several_leases_are_released_at_once_whatever_is_among_them(rig: Rig) -> None:
    await rig.store("kept")
    first, second, other = await rig.plan("kept", "a"), await rig.plan("kept", "b"), await rig.plan("c")
    await rig.cache.release(first.lease_id, "never given", second.lease_id, first.lease_id)
    assert [entry.outcome for entry in (await rig.plan("a", "b", "c")).entries] == [COLD, COLD, PENDING]
    filling = await rig.plan("big")
    assert (await rig.publish(filling.entries[0], size=1000)).outcome is PublishOutcome.ACCEPTED
    assert (await rig.publish(other.entries[0])).outcome is PublishOutcome.OVER_BUDGET


async def test_a_plan_may_name_more_parts_than_a_script_can_pass_at_once(rig: Rig) -> None:
    contents = [str(number) for number in range(4200)]
    reply = await rig.plan(*contents)
    assert {entry.outcome for entry in reply.entries} == {COLD}
    assert len({entry.key for entry in reply.entries}) == len(contents)
    await rig.directory.check_integrity()
    await rig.cache.release(reply.lease_id)
    assert await rig.outcomes(contents[0], contents[-1]) == [COLD, COLD]


async def test_a_ticket_outlives_a_lapsed_lease(rig: Rig) -> None:
    reply = await rig.plan("a")
    rig.clock.now += 45
    assert (await rig.plan("a")).entries[0].outcome is PENDING
    await rig.beat()
    assert (await rig.publish(reply.entries[0])).outcome is PublishOutcome.ACCEPTED


async def test_an_expired_ticket_is_taken_over_with_a_larger_fence(rig: Rig) -> None:
    late = (await rig.plan("a")).entries[0]
    rig.clock.now += 60
    await rig.beat()
    successor = (await rig.plan("a")).entries[0]
    assert late.ticket is not None
    assert successor.ticket is not None
    assert successor.outcome is COLD
    assert successor.ticket.fence > late.ticket.fence
    assert (await rig.publish(late)).outcome is PublishOutcome.FENCED
    assert (await rig.publish(successor)).outcome is PublishOutcome.ACCEPTED
    assert (await rig.publish(late)).outcome is PublishOutcome.FENCED


@pytest.mark.parametrize("change", [{"fence": 1}, {"ticket_id": "other"}, {"key": b"k" * 32}])
async def test_a_publish_that_does_not_match_its_ticket_is_fenced(rig: Rig, change: dict[str, object]) -> None:
    planned = (await rig.plan("a")).entries[0]
    assert planned.ticket is not None
    order = PublishOrder(planned.key, planned.ticket.ticket_id, planned.ticket.fence, "w1", "host", 100)
    wrong = await rig.cache.publish(replace(order, **change))  # type: ignore[arg-type] # values fit their fields
    assert wrong.outcome is PublishOutcome.FENCED
    assert wrong.receipt == b""
    assert (await rig.cache.publish(order)).outcome is PublishOutcome.ACCEPTED


async def test_renew_prolongs_the_lease_and_its_tickets(rig: Rig) -> None:
    owner = await rig.plan("a")
    for _ in range(6):
        rig.clock.now += 25
        await rig.cache.renew(owner.lease_id, 30)
    assert (await rig.plan("a")).entries[0].outcome is PENDING
    await rig.cache.renew(owner.lease_id, 1)
    rig.clock.now += 29
    await rig.cache.renew(owner.lease_id, 0)
    rig.clock.now += 31
    with pytest.raises(UnknownLeaseError):
        await rig.cache.renew(owner.lease_id, 30)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
async def test_malformed_durations_are_refused(rig: Rig, seconds: float) -> None:
    with pytest.raises(InvalidOrderError, match="lease_seconds"):
        await rig.plan("a", seconds=seconds)


async def test_publishing_needs_a_living_worker(rig: Rig) -> None:
    planned = (await rig.plan("a")).entries[0]
    with pytest.raises(UnknownWorkerError):
        await rig.publish(planned, worker="stranger")
    assert (await rig.publish(planned)).outcome is PublishOutcome.ACCEPTED


async def test_a_second_worker_under_the_same_ticket_is_another_holder(rig: Rig) -> None:
    await rig.beat("w2")
    planned = (await rig.plan("a")).entries[0]
    await rig.publish(planned, "w2")
    await rig.publish(planned, "w1")
    hit = (await rig.plan("a")).entries[0]
    assert [holder.worker_id for holder in hit.holders] == ["w1", "w2"]
    assert (await rig.directory.usage()).used_bytes == 200


async def test_namespaces_are_apart_and_together(rig: Rig) -> None:
    reply = await rig.plan("a", salt="s")
    await rig.publish(reply.entries[0])
    assert await rig.outcomes("a", salt="s") == [HIT]
    assert await rig.outcomes("a", salt="t") == [COLD]
    assert await rig.outcomes("a", salt="") == [COLD]
    assert await rig.outcomes("a", salt="s", tenant="other") == [COLD]
    foreign = await rig.plan("a", salt="s", tenant="other")
    await rig.publish(foreign.entries[0])
    assert await rig.outcomes("a", salt="s", tenant="other") == [HIT]
    assert foreign.entries[0].key != reply.entries[0].key


async def test_an_empty_plan_is_a_lease_over_nothing(rig: Rig) -> None:
    reply = await rig.plan()
    assert reply.entries == ()
    await rig.cache.renew(reply.lease_id, 30)
    assert (await rig.directory.usage()).num_leases == 1
