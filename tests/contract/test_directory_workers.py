"""What every directory does about workers: heartbeats, lost copies, receipts after a lost memory."""

from collections.abc import AsyncIterator

import pytest

from services.cache.domain.orders import Claim
from services.cache.domain.receipts import ReceiptSigner
from services.cache.domain.values import PlanOutcome, PublishOutcome
from services.cache.domain.workers import WorkerRecord
from tests.contract.directory_rig import SECRET, Rig, create_rig

HIT, COLD = PlanOutcome.HIT, PlanOutcome.COLD


@pytest.fixture
async def reborn(rig: Rig) -> AsyncIterator[Rig]:
    """The same service after it lost all but its life: the secret, the clock and the workers' receipts remain."""
    fresh = create_rig(rig.kind, rig.redis_url, clock=rig.clock)
    fresh.receipts = rig.receipts
    yield fresh
    await fresh.directory.check_integrity()
    await fresh.directory.close()


async def test_entries_vanish_when_their_last_holder_is_silent(rig: Rig) -> None:
    await rig.beat("w2")
    (first,) = await rig.store("a", worker="w1")
    (second,) = await rig.store("b", worker="w2")
    rig.clock.now += 10
    await rig.beat("w2", [second])
    rig.clock.now += 6
    assert await rig.outcomes("a", "b") == [COLD, HIT]
    assert (await rig.directory.usage()).used_bytes == 100
    assert await rig.beat("w1", [first]) == set()
    assert await rig.outcomes("a") == [HIT]


async def test_a_silent_holders_entry_leaves_its_leases(rig: Rig) -> None:
    await rig.store("a")
    lease = await rig.plan("a")
    rig.clock.now += 16
    await rig.cache.renew(lease.lease_id, 30)
    assert (await rig.plan("a", lease_id=lease.lease_id)).entries[0].outcome is COLD


async def test_a_lease_of_an_entry_that_was_lost_ends_no_other_lease_of_what_came_back(rig: Rig) -> None:
    keys = await rig.store("a", size=600)
    old = await rig.plan("a", seconds=300)
    rig.clock.now += 16
    assert await rig.beat("w1", keys) == set()
    new = await rig.plan("a", seconds=300)
    assert new.entries[0].outcome is HIT
    await rig.cache.release(old.lease_id)
    await rig.directory.check_integrity()
    assert (await rig.publish((await rig.plan("b")).entries[0], size=600)).outcome is PublishOutcome.OVER_BUDGET
    await rig.cache.release(new.lease_id)
    assert (await rig.publish((await rig.plan("b")).entries[0], size=600)).outcome is PublishOutcome.ACCEPTED


async def test_a_copy_that_is_no_longer_listed_is_lost(rig: Rig) -> None:
    first, second = await rig.store("a", "b")
    rig.clock.now += 6
    assert await rig.beat("w1", [second]) == set()
    assert await rig.outcomes("a", "b") == [COLD, HIT]
    assert first != second


async def test_a_heartbeat_older_than_a_publish_costs_nothing(rig: Rig) -> None:
    await rig.store("a")
    rig.clock.now += 4
    assert await rig.beat("w1", []) == set()
    assert await rig.outcomes("a") == [HIT]


async def test_copies_without_a_proof_are_dropped(rig: Rig) -> None:
    (key,) = await rig.store("a")
    stranger = b"s" * 32
    assert await rig.beat("w1", [key, stranger]) == {stranger}
    await rig.beat("w2")
    rig.receipts["w2", key] = rig.receipts["w1", key]
    assert await rig.beat("w2", [key]) == {key}


async def test_an_address_change_reaches_the_holders(rig: Rig) -> None:
    await rig.store("a")
    await rig.cache.heartbeat(WorkerRecord("w1", "elsewhere:1"), [])
    assert (await rig.plan("a")).entries[0].holders[0].address == "elsewhere:1"


async def test_heartbeats_rebuild_a_lost_directory(rig: Rig, reborn: Rig) -> None:
    keys = await rig.store("a", "b")
    assert await reborn.outcomes("a", "b") == [COLD, COLD]
    assert await reborn.beat("w1", keys) == set()
    assert await reborn.outcomes("a", "b") == [HIT, HIT]
    assert (await reborn.directory.usage()).used_bytes == 200
    assert await reborn.invalidate_document("acme", "doc-a") == 1
    assert await reborn.beat("w1", keys) == {keys[0]}


async def test_a_forged_receipt_restores_nothing(rig: Rig, reborn: Rig) -> None:
    (key,) = await rig.store("a")
    receipt = rig.receipts["w1", key]
    forged = [receipt[:-1], receipt[:-2] + b" }", b"\0" * 32 + receipt[32:], b"", receipt[:10]]
    forged += [receipt.replace(b'"size":100', b'"size":101')]
    for attempt in forged:
        reborn.receipts["w1", key] = attempt
        assert await reborn.beat("w1", [key]) == {key}
    assert await reborn.outcomes("a") == [COLD]


@pytest.mark.parametrize("scope", ["tenant", "model", "document"])
async def test_a_receipt_from_before_an_invalidation_restores_nothing(rig: Rig, scope: str) -> None:
    (key,) = await rig.store("a")
    rig.clock.now += 20
    if scope == "tenant":
        await rig.invalidate_tenant("acme")
    elif scope == "model":
        await rig.invalidate_model("model-1")
    else:
        await rig.invalidate_document("acme", "doc-a")
    assert await rig.beat("w1", [key]) == {key}
    assert await rig.outcomes("a") == [COLD]


async def test_a_lost_epoch_is_learnt_from_a_newer_receipt(rig: Rig, reborn: Rig) -> None:
    (old,) = await rig.store("a")
    await rig.invalidate_tenant("acme")
    (new,) = await rig.store("b")
    assert await reborn.beat("w1", [old]) == set()
    waiting = (await reborn.plan("b")).entries[0]
    assert await reborn.beat("w1", [old, new]) == set()
    assert await reborn.outcomes("a", "b") == [COLD, HIT]
    assert await reborn.beat("w1", [old, new]) == {old}
    assert (await reborn.publish(waiting)).outcome is PublishOutcome.INVALIDATED


async def test_a_restored_entry_ends_the_ticket_that_would_replace_it(rig: Rig, reborn: Rig) -> None:
    (key,) = await rig.store("a")
    await reborn.beat("w2")
    late = (await reborn.plan("a", document="second name")).entries[0]
    assert await reborn.beat("w1", [key]) == set()
    assert (await reborn.publish(late, "w2")).outcome is PublishOutcome.FENCED
    assert await reborn.outcomes("a") == [HIT]
    assert await reborn.invalidate_document("acme", "second name") == 1


async def test_other_bytes_of_a_published_key_are_dropped(rig: Rig) -> None:
    (key,) = await rig.store("a", worker="w1")
    rig.clock.now += 16
    await rig.beat("w2")
    assert await rig.store("a", worker="w2") == [key]
    assert await rig.beat("w1", [key]) == {key}
    assert [holder.worker_id for holder in (await rig.plan("a")).entries[0].holders] == ["w2"]


async def test_restoring_respects_the_budget_and_evicts_nothing(rig: Rig) -> None:
    (old,) = await rig.store("a", size=600)
    rig.clock.now += 16
    await rig.beat("w1")
    await rig.store("b", size=600)
    assert await rig.beat("w1", [old]) == {old}
    assert await rig.outcomes("b") == [HIT]


async def test_a_copy_marked_between_heartbeat_and_restore_is_refused(rig: Rig) -> None:
    (key,) = await rig.store("a", size=600)
    record = ReceiptSigner(SECRET).open(rig.receipts["w1", key], "w1", key)
    assert record is not None
    await rig.store("b", size=600)
    rig.clock.now += 6
    await rig.beat("w1", [key])
    assert (await rig.directory.usage()).used_bytes == 0
    assert await rig.directory.restore("w1", [Claim(record, "host")]) == (key,)


async def test_an_invalidation_after_a_lost_memory_beats_older_receipts(rig: Rig, reborn: Rig) -> None:
    (key,) = await rig.store("a")
    rig.clock.now += 1
    assert await reborn.invalidate_document("acme", "doc-a") == 0
    assert await reborn.beat("w1", [key]) == {key}
    assert await reborn.outcomes("a") == [COLD]


async def test_a_worker_without_heartbeat_restores_nothing(rig: Rig, reborn: Rig) -> None:
    (key,) = await rig.store("a")
    record = ReceiptSigner(SECRET).open(rig.receipts["w1", key], "w1", key)
    assert record is not None
    assert await reborn.directory.restore("w1", [Claim(record, "host")]) == (key,)


async def test_a_worker_with_hundreds_of_copies(rig: Rig, reborn: Rig) -> None:
    keys = await rig.store(*(f"many-{number}" for number in range(900)), size=1)
    assert await reborn.beat("w1", keys) == set()
    assert (await reborn.directory.usage()).num_entries == 900
    assert await reborn.invalidate_tenant("acme") == 900
    assert await reborn.beat("w1", keys) == set(keys)


async def test_workers_are_listed_as_they_last_described_themselves(rig: Rig) -> None:
    said = WorkerRecord("w2", "10.0.0.2:7102", bytes(range(256)))
    await rig.cache.heartbeat(WorkerRecord("w2", "elsewhere:1"), [])
    await rig.cache.heartbeat(said, [])
    await rig.beat("w1")
    assert await rig.cache.list_workers() == (WorkerRecord("w1", "w1.test:7201"), said)


async def test_a_silent_worker_is_not_listed(rig: Rig) -> None:
    await rig.beat("w1")
    rig.clock.now += 10
    await rig.beat("w2")
    rig.clock.now += 6
    assert [worker.worker_id for worker in await rig.cache.list_workers()] == ["w2"]
    rig.clock.now += 10
    assert await rig.cache.list_workers() == ()


async def test_a_fetched_copy_has_a_life_of_its_own(rig: Rig) -> None:
    (key,) = await rig.store("a", worker="w1")
    await rig.beat("w2")
    assert (await rig.copy(key, "w1", "w2")).outcome is PublishOutcome.ACCEPTED
    assert (await rig.directory.usage()).used_bytes == 200
    assert [holder.worker_id for holder in (await rig.plan("a")).entries[0].holders] == ["w1", "w2"]
    rig.clock.now += 10
    await rig.beat("w2", [key])
    rig.clock.now += 6
    assert await rig.beat("w2", [key]) == set()
    assert [holder.worker_id for holder in (await rig.plan("a")).entries[0].holders] == ["w2"]
    await rig.invalidate_document("acme", "doc-a")
    assert await rig.beat("w2", [key]) == {key}


async def test_a_copy_that_was_already_listed_stays_one(rig: Rig) -> None:
    (key,) = await rig.store("a", worker="w1")
    assert (await rig.copy(key, "w1", "w1")).outcome is PublishOutcome.ACCEPTED
    assert (await rig.directory.usage()).used_bytes == 100


async def test_a_copy_needs_the_receipt_of_its_holder(rig: Rig) -> None:
    first, second = await rig.store("a", "b", worker="w1")
    await rig.beat("w2")
    receipt = rig.receipts["w1", first]
    for key, holder, shown in (
        (first, "w2", receipt),
        (second, "w1", receipt),
        (first, "w1", b""),
        (first, "w1", receipt[:-1]),
    ):
        assert (await rig.copy(key, holder, "w2", shown)).outcome is PublishOutcome.FENCED
    assert (await rig.directory.usage()).used_bytes == 200


async def test_a_copy_of_what_has_been_replaced_is_refused(rig: Rig) -> None:
    (key,) = await rig.store("a", worker="w1")
    await rig.beat("w2")
    old = rig.receipts["w1", key]
    await rig.invalidate_document("acme", "doc-a")
    assert (await rig.copy(key, "w1", "w2", old)).outcome is PublishOutcome.FENCED
    assert await rig.store("a", worker="w1") == [key]
    assert (await rig.copy(key, "w1", "w2", old)).outcome is PublishOutcome.FENCED
    assert (await rig.copy(key, "w1", "w2")).outcome is PublishOutcome.ACCEPTED
