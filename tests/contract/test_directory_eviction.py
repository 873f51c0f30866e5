"""What every directory does about room: the byte budget, eviction, and the copies that are to be dropped."""

from services.cache.domain.values import PlanOutcome, PublishOutcome
from tests.contract.directory_rig import Rig

HIT, COLD = PlanOutcome.HIT, PlanOutcome.COLD


async def test_a_leased_entry_is_never_evicted(rig: Rig) -> None:
    await rig.store("a", "b", size=400)
    lease = await rig.plan("a")
    reply = await rig.plan("c", "d")
    assert (await rig.publish(reply.entries[0], size=500)).outcome is PublishOutcome.ACCEPTED
    assert (await rig.publish(reply.entries[1], size=200)).outcome is PublishOutcome.OVER_BUDGET
    assert await rig.outcomes("a", "b", "c") == [HIT, COLD, HIT]
    await rig.cache.release(lease.lease_id)
    retry = await rig.plan("d")
    assert (await rig.publish(retry.entries[0], size=200)).outcome is PublishOutcome.ACCEPTED
    assert await rig.outcomes("a", "d") == [COLD, HIT]


async def test_a_lapsed_lease_protects_nothing(rig: Rig) -> None:
    await rig.store("a", size=900)
    await rig.plan("a")
    rig.clock.now += 31
    await rig.directory.usage()
    await rig.beat("w2")
    reply = await rig.plan("b")
    assert (await rig.publish(reply.entries[0], worker="w2", size=900)).outcome is PublishOutcome.ACCEPTED


async def test_the_owners_lease_protects_what_it_published(rig: Rig) -> None:
    owner, other = await rig.plan("a"), await rig.plan("b")
    await rig.publish(owner.entries[0], size=900)
    assert (await rig.publish(other.entries[0], size=200)).outcome is PublishOutcome.OVER_BUDGET
    assert await rig.outcomes("a") == [HIT]


async def test_an_entry_larger_than_the_budget_evicts_nothing(rig: Rig) -> None:
    await rig.store("a", "b")
    reply = await rig.plan("huge")
    assert (await rig.publish(reply.entries[0], size=1001)).outcome is PublishOutcome.OVER_BUDGET
    assert await rig.outcomes("a", "b", "huge") == [HIT, HIT, COLD]


async def test_the_budget_can_be_filled_to_the_last_byte(rig: Rig) -> None:
    await rig.store("a", size=1000)
    assert (await rig.directory.usage()).used_bytes == 1000
    await rig.store("b", size=1)
    assert (await rig.directory.usage()).used_bytes == 1


async def test_every_copy_counts_and_eviction_tells_every_holder(rig: Rig) -> None:
    await rig.beat("w2")
    planned = await rig.plan("a")
    await rig.publish(planned.entries[0], "w1", size=400)
    await rig.publish(planned.entries[0], "w2", size=400)
    await rig.cache.release(planned.lease_id)
    key = planned.entries[0].key
    assert (await rig.directory.usage()).used_bytes == 800
    reply = await rig.plan("b")
    assert (await rig.publish(reply.entries[0], "w2", size=300)).drop_keys == (key,)
    assert (await rig.directory.usage()).used_bytes == 300
    assert await rig.beat("w1", [key]) == {key}
    assert await rig.beat("w2", [key, reply.entries[0].key]) == {key}


async def test_a_second_copy_never_evicts_its_own_entry(rig: Rig) -> None:
    await rig.beat("w2")
    planned = await rig.plan("a")
    await rig.publish(planned.entries[0], "w1", size=400)
    await rig.cache.release(planned.lease_id)
    rig.clock.now += 1
    (other,) = await rig.store("b", size=400)
    assert (await rig.publish(planned.entries[0], "w2")).outcome is PublishOutcome.ACCEPTED
    assert await rig.beat("w1", [other]) == {other}
    assert await rig.outcomes("a", "b") == [HIT, COLD]
    alone = await rig.plan("c")
    await rig.publish(alone.entries[0], "w1", size=600)
    await rig.cache.release(alone.lease_id)
    assert (await rig.publish(alone.entries[0], "w2")).outcome is PublishOutcome.OVER_BUDGET
    assert await rig.outcomes("c") == [HIT]


async def test_an_evicted_copy_does_not_come_back_by_its_receipt(rig: Rig) -> None:
    (old,) = await rig.store("a", size=900)
    (new,) = await rig.store("b", size=200)
    for _ in range(3):
        rig.clock.now += 4
        assert await rig.beat("w1", [old, new]) == {old}
    assert await rig.beat("w1", [new]) == set()
    assert await rig.outcomes("a", "b") == [COLD, HIT]


async def test_an_evicted_key_that_is_published_again_stays(rig: Rig) -> None:
    (key,) = await rig.store("a", size=900)
    await rig.store("b", size=200)
    assert await rig.store("a", size=700) == [key]
    assert await rig.beat("w1", [key]) == set()
    assert await rig.outcomes("a") == [HIT]


async def test_room_is_made_from_many_small_entries(rig: Rig) -> None:
    names = [f"small-{number}" for number in range(250)]
    await rig.store(*names, size=4)
    result = await rig.publish((await rig.plan("b")).entries[0], size=1000)
    assert result.outcome is PublishOutcome.ACCEPTED
    assert len(result.drop_keys) == 250
