"""What every directory remembers when entries and workers come and go: invalidations, and what copies fall with."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.cache.domain.values import EntryKind, PlanOutcome
from tests.contract.directory_rig import LIMITS, Rig, create_rig

HIT, COLD = PlanOutcome.HIT, PlanOutcome.COLD


@pytest.fixture
async def strange(rig: Rig) -> AsyncIterator[Rig]:
    """The same service over a directory that has lost all memory, with the workers' receipts."""
    fresh = create_rig(rig.kind, rig.redis_url, clock=rig.clock, life="another life")
    fresh.receipts = rig.receipts
    yield fresh
    await fresh.directory.check_integrity()
    await fresh.directory.close()


async def _return_after_a_while(rig: Rig, keys: list[bytes]) -> set[bytes]:
    """The worker was taken for lost, and lists what it holds again; what it is to drop."""
    rig.clock.now += 16
    assert (await rig.directory.usage()).num_entries == 0
    return await rig.beat("w1", keys)


async def test_nothing_comes_back_to_a_directory_that_lost_its_memory(rig: Rig, strange: Rig) -> None:
    """What was revoked in between is not known any more, so that nothing can be told from it."""
    revoked, other = await rig.store("a", "b")
    await rig.invalidate_document("acme", "doc-a")
    rig.clock.now += 1
    assert await strange.beat("w1", [revoked, other]) == {revoked, other}
    assert await strange.outcomes("a", "b") == [COLD, COLD]


async def test_what_was_published_since_does(rig: Rig, strange: Rig) -> None:
    (old,) = await rig.store("a")
    await strange.beat("w1", [old])
    keys = await strange.store("a", "b")
    assert await _return_after_a_while(strange, keys) == set()
    assert await strange.outcomes("a", "b") == [HIT, HIT]


@pytest.mark.parametrize("is_away", [True, False], ids=["away", "back"])
async def test_a_copy_falls_with_documents_that_were_named_after_its_receipt(rig: Rig, is_away: bool) -> None:
    """Stored for a request without ids, then brought under an id: deleting the id reaches it, also through a restart."""
    reply = await rig.plan("a", document="")
    key = reply.entries[0].key
    await rig.publish(reply.entries[0])
    await rig.cache.release(reply.lease_id)
    assert (await rig.plan("a", document="late")).entries[0].outcome is HIT
    if is_away:
        rig.clock.now += 16
        assert await rig.invalidate_document("acme", "late") == 0
    else:
        assert await _return_after_a_while(rig, [key]) == set()
        assert await rig.invalidate_document("acme", "late") == 1
    assert await rig.beat("w1", [key]) == {key}
    assert await rig.outcomes("a") == [COLD]


async def test_and_with_their_tags(rig: Rig) -> None:
    await rig.register("late", "a", "hr")
    reply = await rig.plan("a", document="")
    key = reply.entries[0].key
    await rig.publish(reply.entries[0])
    await rig.plan("a", document="late")
    rig.clock.now += 16
    await rig.invalidate_tag("acme", "hr")
    assert await rig.beat("w1", [key]) == {key}


async def test_an_invalidation_outlives_the_registration_that_followed_it(rig: Rig) -> None:
    """A receipt from before is refused whether its document was registered again or not."""
    (first,) = await rig.store("a")
    await rig.register("doc-a", "a")
    (second,) = await rig.store("a")
    assert first == second
    old = rig.receipts["w1", first]
    assert await _return_after_a_while(rig, [second]) == set()
    await rig.invalidate_document("acme", "doc-a")
    await rig.register("doc-a", "a")
    rig.clock.now += 16
    assert await rig.beat("w1", [first]) == {first}
    rig.receipts["w1", first] = old
    rig.clock.now += 16
    assert await rig.beat("w1", [first]) == {first}


async def test_what_is_forgotten_takes_the_receipts_of_its_time_along(rig: Rig) -> None:
    """Memory is bounded: with an invalidation that is forgotten goes the right to come back of all that is older."""
    small = create_rig(rig.kind, rig.redis_url, replace(LIMITS, max_remembered=3), rig.clock)
    await small.beat("w1")
    revoked, kept = await small.store("revoked", "kept")
    await small.invalidate_document("acme", "doc-revoked")
    for number in range(2):
        await small.invalidate_document("acme", f"doc-{number}")
    (late,) = await small.store("late")
    await small.directory.check_integrity()
    assert await _return_after_a_while(small, [revoked, kept, late]) == {revoked}
    for number in range(2, 4):
        await small.invalidate_document("acme", f"doc-{number}")
    await small.directory.check_integrity()
    assert await _return_after_a_while(small, [revoked, kept, late]) == {revoked, kept}
    assert await small.outcomes("late", "kept") == [HIT, COLD]
    await small.directory.close()


async def test_a_forgotten_link_does_the_same(rig: Rig) -> None:
    small = create_rig(rig.kind, rig.redis_url, replace(LIMITS, max_remembered=2), rig.clock)
    await small.beat("w1")
    (key,) = await small.store("a")
    for name in ("first", "second", "third"):
        await small.plan("a", document=name)
    await small.directory.check_integrity()
    assert await _return_after_a_while(small, [key]) == {key}
    await small.directory.close()


async def test_epochs_of_tenants_and_models_are_never_forgotten(rig: Rig) -> None:
    small = create_rig(rig.kind, rig.redis_url, replace(LIMITS, max_remembered=1), rig.clock)
    await small.beat("w1")
    (key,) = await small.store("a")
    await small.invalidate_tenant("acme")
    await small.invalidate_model("model-1")
    for number in range(3):
        await small.invalidate_document("acme", f"doc-{number}")
    reply = await small.plan("a")
    assert (reply.entries[0].outcome, reply.entries[0].key != key) == (COLD, True)
    await small.directory.check_integrity()
    await small.directory.close()


async def test_registered_documents_count_for_nothing_that_is_forgotten(rig: Rig) -> None:
    """Their versions tell what their scopes' last invalidations were."""
    small = create_rig(rig.kind, rig.redis_url, replace(LIMITS, max_remembered=1), rig.clock)
    await small.beat("w1")
    keys = []
    for name in ("a", "b", "c"):
        await small.register(f"doc-{name}", name)
        keys += await small.store(name)
    assert await _return_after_a_while(small, keys) == set()
    await small.register("doc-b", "b", "tag")
    assert await _return_after_a_while(small, keys) == {keys[1]}
    await small.directory.close()


async def test_snapshots_fall_with_late_documents_too(rig: Rig) -> None:
    reply = await rig.plan("a", document="x", kind=EntryKind.PREFIX)
    await rig.publish(reply.entries[0])
    await rig.plan("a", document="late", kind=EntryKind.PREFIX)
    key = reply.entries[0].key
    assert await _return_after_a_while(rig, [key]) == set()
    assert await rig.invalidate_document("acme", "late") == 1
