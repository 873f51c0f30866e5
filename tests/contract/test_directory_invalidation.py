"""What every directory does about invalidation: at once, for every later plan, whatever is leased or underway."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from services.cache.domain.errors import StaleEpochsError
from services.cache.domain.orders import PlanOrder, Wanted
from services.cache.domain.values import EntryKind, PlanOutcome, PublishOutcome
from tests.contract.directory_rig import Rig

HIT, COLD = PlanOutcome.HIT, PlanOutcome.COLD

Invalidate = Callable[[Rig], Awaitable[int]]
SCOPES: dict[str, Invalidate] = {
    "document": lambda rig: rig.invalidate_document("acme", "doc-a"),
    "tenant": lambda rig: rig.invalidate_tenant("acme"),
    "model": lambda rig: rig.invalidate_model("model-1"),
}


@pytest.fixture(params=list(SCOPES))
def invalidate(request: pytest.FixtureRequest) -> Invalidate:
    return SCOPES[request.param]


async def test_an_entry_is_unreachable_at_once_even_when_leased(rig: Rig, invalidate: Invalidate) -> None:
    (key,) = await rig.store("a")
    leased = await rig.plan("a")
    assert await invalidate(rig) == 1
    assert await rig.outcomes("a") == [COLD]
    assert (await rig.directory.usage()).used_bytes == 0
    assert await rig.beat("w1", [key]) == {key}
    await rig.cache.renew(leased.lease_id, 30)


async def test_what_is_being_computed_is_refused(rig: Rig, invalidate: Invalidate) -> None:
    planned = (await rig.plan("a")).entries[0]
    assert await invalidate(rig) == 0
    fresh = (await rig.plan("a")).entries[0]
    assert fresh.outcome is COLD
    for _ in range(2):
        assert (await rig.publish(planned)).outcome is PublishOutcome.INVALIDATED
    assert (await rig.publish(fresh)).outcome is PublishOutcome.ACCEPTED
    assert await rig.outcomes("a") == [HIT]


async def test_repeating_is_harmless(rig: Rig, invalidate: Invalidate) -> None:
    await rig.store("a")
    assert [await invalidate(rig), await invalidate(rig)] == [1, 0]


async def test_a_document_falls_under_every_salt_but_alone(rig: Rig) -> None:
    for salt in ("", "s", "t"):
        reply = await rig.plan("a", "b", salt=salt)
        for planned in reply.entries:
            await rig.publish(planned)
    assert await rig.invalidate_document("acme", "doc-a") == 3
    for salt in ("", "s", "t"):
        assert await rig.outcomes("a", "b", salt=salt) == [COLD, HIT]


async def test_other_tenants_keep_their_documents(rig: Rig) -> None:
    await rig.store("a", tenant="acme")
    await rig.store("a", tenant="other")
    await rig.invalidate_document("acme", "doc-a")
    await rig.invalidate_tenant("acme")
    assert await rig.outcomes("a", tenant="other") == [HIT]
    assert await rig.outcomes("a", tenant="acme") == [COLD]


async def test_a_model_falls_for_every_tenant_but_alone(rig: Rig) -> None:
    await rig.store("a", tenant="acme")
    await rig.store("a", tenant="other")
    kept = await rig.plan("a", model="model-2")
    await rig.publish(kept.entries[0])
    assert await rig.invalidate_model("model-1") == 2
    assert (await rig.plan("a", model="model-2")).entries[0].outcome is HIT
    assert await rig.outcomes("a", tenant="other") == [COLD]


async def test_an_entry_falls_with_every_document_that_named_it(rig: Rig) -> None:
    await rig.plan("a", document="one")
    owner = await rig.plan("b", document="one")
    await rig.plan("b", document="two")
    await rig.publish(owner.entries[0])
    await rig.plan("b", document="three")
    assert await rig.invalidate_document("acme", "three") == 1
    assert (await rig.plan("b", document="four")).entries[0].outcome is COLD


async def test_keys_derived_before_an_invalidation_cannot_be_planned(rig: Rig) -> None:
    scopes = ("tenant:x", "model:y")
    wanted = Wanted(b"k" * 32, EntryKind.SEGMENT, 100)
    stale = PlanOrder("lease", False, "nonce", 30.0, *scopes, dict.fromkeys(scopes, 0), (wanted,))
    await rig.directory.plan(stale)
    for scope in scopes:
        await rig.directory.invalidate(scope)
        current = await rig.directory.epochs(scopes)
        with pytest.raises(StaleEpochsError) as caught:
            await rig.directory.plan(stale)
        assert caught.value.current == current
        stale = replace(stale, epochs=current)
        assert (await rig.directory.plan(stale)).entries[0].outcome is COLD


async def test_plans_race_with_invalidations(rig: Rig) -> None:
    async def plan_and_publish(number: int) -> None:
        try:
            reply = await rig.plan("a", f"b{number}")
        except StaleEpochsError:
            return
        for planned in reply.entries:
            if planned.ticket:
                await rig.publish(planned)

    async def invalidate_all() -> None:
        for _ in range(5):
            await rig.invalidate_tenant("acme")

    await asyncio.gather(*(plan_and_publish(number) for number in range(8)), invalidate_all())
    await rig.directory.check_integrity()
    await rig.invalidate_tenant("acme")
    usage = await rig.directory.usage()
    assert (usage.num_entries, usage.used_bytes, usage.num_tickets) == (0, 0, 0)
