"""What every directory does about registered documents, the public namespace and budgets of tenants."""

from dataclasses import replace

import pytest

from services.cache.domain.cache import NamedDocument, PartEntry, PlanRequest
from services.cache.domain.documents import key_digest
from services.cache.domain.errors import InvalidOrderError
from services.cache.domain.values import (
    DocumentRecord,
    EntryKind,
    Namespace,
    PlanOutcome,
    PublishOutcome,
    RegisterOutcome,
)
from tests.contract.directory_rig import LIMITS, Rig, create_rig, digest

HIT, COLD, SUPERSEDED = PlanOutcome.HIT, PlanOutcome.COLD, PlanOutcome.SUPERSEDED


async def outcome(rig: Rig, content: str, document: str = "x", **more: str) -> PlanOutcome:
    """How a content under a document id stands for a newcomer."""
    reply = await rig.plan(content, document=document, **more)  # type: ignore[arg-type] # names of strings only
    await rig.cache.release(reply.lease_id)
    return reply.entries[0].outcome


async def store(rig: Rig, content: str, document: str = "x", tenant: str = "acme", size: int = 100) -> bytes:
    reply = await rig.plan(content, document=document, tenant=tenant)
    assert (await rig.publish(reply.entries[0], size=size)).outcome is PublishOutcome.ACCEPTED
    await rig.cache.release(reply.lease_id)
    return reply.entries[0].key


async def test_a_registered_document_is_described_as_it_is_stored(rig: Rig) -> None:
    created = await rig.register("x", "v1", "hr", "law", title="Title")
    assert (created.outcome, created.removal.num_entries) == (RegisterOutcome.CREATED, 0)
    empty = await rig.documents.describe("acme", "x")
    assert empty is not None
    assert empty.record == DocumentRecord("x", "Title", ("hr", "law"), digest("v1"), 100, created.version)
    assert empty.states == ()
    key = await store(rig, "v1")
    described = await rig.documents.describe("acme", "x")
    assert described is not None
    (state,) = described.states
    assert (state.key, state.kind, state.num_tokens, state.size_bytes) == (key, EntryKind.SEGMENT, 100, 100)
    assert [(holder.worker_id, holder.tier) for holder in state.holders] == [("w1", "host")]
    assert key_digest(key) not in key


async def test_registering_again_changes_nothing(rig: Rig) -> None:
    first = await rig.register("x", "v1", "hr")
    await store(rig, "v1")
    again = await rig.register("x", "v1", "hr")
    assert (again.outcome, again.version) == (RegisterOutcome.UNCHANGED, first.version)
    assert await outcome(rig, "v1") is HIT


@pytest.mark.parametrize("change", [{"content": "v2"}, {"tags": ("other",)}, {"title": "Other"}])
async def test_any_change_replaces_what_is_stored(rig: Rig, change: dict[str, object]) -> None:
    first = await rig.register("x", "v1", "hr", title="Title")
    key = await store(rig, "v1")
    record = DocumentRecord("x", "Title", ("hr",), digest("v1"), 100)
    if "content" in change:
        change = {"digest": digest(str(change["content"]))}
    second = await rig.documents.register("acme", replace(record, **change))  # type: ignore[arg-type] # values fit
    assert second.outcome is RegisterOutcome.REPLACED
    assert second.version > first.version
    assert [copy.key for copy in second.removal.copies] == [key]
    assert (await rig.directory.usage()).used_bytes == 0
    assert await rig.beat("w1", [key]) == {key}


async def test_an_older_text_is_neither_reused_nor_stored(rig: Rig) -> None:
    await rig.register("x", "v1")
    leased = await rig.plan("v1", document="x")
    waiting = (await rig.plan("v2", document="y")).entries[0]
    await rig.publish(leased.entries[0])
    await rig.register("x", "v2")
    assert await outcome(rig, "v1") is SUPERSEDED
    assert await outcome(rig, "v1", salt="s") is SUPERSEDED
    assert (await rig.plan("v1", document="x", lease_id=leased.lease_id)).entries[0].outcome is SUPERSEDED
    assert await outcome(rig, "v1", document="elsewhere") is COLD
    assert (await rig.directory.usage()).num_entries == 0
    await rig.publish(waiting)
    assert await outcome(rig, "v2") is HIT


async def test_what_was_being_computed_for_the_older_text_is_refused(rig: Rig) -> None:
    underway = (await rig.plan("v1", document="x")).entries[0]
    await rig.register("x", "v2")
    assert (await rig.publish(underway)).outcome is PublishOutcome.INVALIDATED
    assert (await rig.directory.usage()).num_entries == 0


async def test_a_snapshot_over_an_older_text_is_superseded_as_a_whole(rig: Rig) -> None:
    async def plan() -> PlanOutcome:
        documents = (NamedDocument("x", digest("v1")), NamedDocument("y", digest("w1")))
        entry = PartEntry(EntryKind.PREFIX, digest("a chain"), 100, documents)
        request = PlanRequest(Namespace("acme", ""), "model-1", "profile-1", (entry,), 30.0, "")
        reply = await rig.cache.plan(request)
        planned = reply.entries[0]
        if planned.ticket:
            await rig.publish(planned)
        await rig.cache.release(reply.lease_id)
        return planned.outcome

    for document, content in (("x", "v1"), ("y", "w1")):
        await rig.register(document, content, "hr")
    assert [await plan(), await plan()] == [COLD, HIT]
    described = await rig.documents.describe("acme", "y")
    assert described is not None
    assert [state.kind for state in described.states] == [EntryKind.PREFIX]
    await rig.register("y", "w2", "hr")
    assert await plan() is SUPERSEDED
    assert (await rig.directory.usage()).num_entries == 0


async def test_a_deleted_document_is_forgotten_under_every_salt(rig: Rig) -> None:
    await rig.register("x", "v1")
    for salt in ("", "s"):
        reply = await rig.plan("v1", document="x", salt=salt)
        await rig.publish(reply.entries[0])
    removal = await rig.cache.invalidate_document("acme", "x")
    assert (removal.num_entries, removal.num_documents) == (2, 1)
    assert sum(copy.size_bytes for copy in removal.copies) == 200
    assert {(copy.worker_id, copy.tier) for copy in removal.copies} == {("w1", "host")}
    assert await rig.documents.describe("acme", "x") is None
    assert await outcome(rig, "v1") is COLD
    assert await outcome(rig, "another text") is COLD


async def test_a_tag_takes_its_documents_and_no_others(rig: Rig) -> None:
    for document, tags in (("x", ("hr",)), ("y", ("hr", "law")), ("z", ("law",))):
        await rig.register(document, document, *tags)
        await store(rig, document, document)
    await rig.register("x", "x", "hr", tenant="other")
    removal = await rig.cache.invalidate_tag("acme", "hr")
    assert (removal.num_entries, removal.num_documents) == (2, 2)
    page = await rig.documents.page("acme", "", 10)
    assert [each.record.document_id for each in page.documents if each.record] == ["z"]
    assert [await outcome(rig, name, name) for name in "xyz"] == [COLD, COLD, HIT]
    assert await rig.documents.describe("other", "x") is not None
    assert await rig.invalidate_tag("acme", "hr") == 0


async def test_a_tag_holds_without_its_registration(rig: Rig) -> None:
    """What is stored still falls with the tags that it was stored under: its receipt names them."""
    await rig.register("x", "v1", "hr")
    key = await store(rig, "v1")
    reborn = create_rig(rig.kind, rig.redis_url, clock=rig.clock)
    reborn.receipts = rig.receipts
    assert await reborn.beat("w1", [key]) == set()
    assert await outcome(reborn, "v1") is HIT
    assert await reborn.invalidate_tag("acme", "hr") == 1
    assert await outcome(reborn, "v1") is COLD
    await reborn.directory.check_integrity()
    await reborn.directory.close()


async def test_a_tenants_documents_go_with_it_and_a_models_stay(rig: Rig) -> None:
    await rig.register("x", "v1")
    await store(rig, "v1")
    removal = await rig.cache.invalidate_model("model-1")
    assert (removal.num_entries, removal.num_documents) == (1, 0)
    assert await outcome(rig, "v0") is SUPERSEDED
    assert await outcome(rig, "v1") is COLD
    assert (await rig.cache.invalidate_tenant("acme")).num_documents == 1
    assert await rig.documents.describe("acme", "x") is None


async def test_documents_are_listed_in_pages_by_id(rig: Rig) -> None:
    names = ["b", "a", "é", "a/b", "Z", "\0", "日本", "a b"]
    for name in names:
        await rig.register(name, "v1")
    await rig.register("foreign", "v1", tenant="other")
    seen: list[str] = []
    more = True
    while more:
        page = await rig.documents.page("acme", seen[-1] if seen else "", 3)
        seen += [each.record.document_id for each in page.documents if each.record]
        more = page.has_more
    assert seen == sorted(names, key=str.encode)
    for limit in (0, 101):
        with pytest.raises(InvalidOrderError, match="limit"):
            await rig.documents.page("acme", "", limit)


async def test_documents_of_another_tenant_are_not_seen(rig: Rig) -> None:
    await rig.register("x", "v1")
    await store(rig, "v1")
    assert await rig.documents.describe("other", "x") is None
    assert await rig.invalidate_document("other", "x") == 0
    assert await outcome(rig, "v2", tenant="other") is COLD
    assert await outcome(rig, "v1") is HIT


async def test_malformed_registrations_are_refused(rig: Rig) -> None:
    record = DocumentRecord("x", "", ("hr",), digest("v1"), 1)
    for change in ({"document_id": ""}, {"digest": b"short"}, {"tags": ("",)}):
        with pytest.raises(InvalidOrderError, match=next(iter(change)).split("_")[-1]):
            await rig.documents.register("acme", replace(record, **change))


async def test_the_public_namespace_serves_every_tenant_after_its_own(rig: Rig) -> None:
    public = await store(rig, "v1", tenant="public")
    own = (await rig.plan("v1", salt="s")).entries[0]
    assert (own.outcome, own.key) == (HIT, public)
    assert await outcome(rig, "v2") is COLD
    # A tenant's invalidations do not reach what is public.
    await rig.invalidate_document("acme", "doc-v1")
    await rig.invalidate_tenant("acme")
    assert await outcome(rig, "v1") is HIT
    await rig.register("x", "v2")
    assert await outcome(rig, "v1") is SUPERSEDED
    await rig.invalidate_tenant("public")
    assert await outcome(rig, "v1", document="other") is COLD


async def test_an_own_entry_comes_before_the_public_one(rig: Rig) -> None:
    own = await store(rig, "v1")
    public = await store(rig, "v1", tenant="public")
    assert own != public
    assert (await rig.plan("v1")).entries[0].key == own


async def test_nothing_of_a_tenant_is_public(rig: Rig) -> None:
    await store(rig, "v1")
    assert await outcome(rig, "v1", tenant="public") is COLD


async def test_a_tenants_budget_evicts_only_its_own(rig: Rig) -> None:
    small = create_rig(rig.kind, rig.redis_url, replace(LIMITS, namespace_budget_bytes=300))
    await small.beat("w1")
    await store(small, "old", "other", tenant="other", size=200)
    for content in ("a", "b", "c"):
        small.clock.now += 1
        await store(small, content, content, size=150)
    left = {content for content in ("a", "b", "c") if await outcome(small, content, content) is HIT}
    assert len(left) == 2
    assert "c" in left
    assert await outcome(small, "old", "other", tenant="other") is HIT
    reply = await small.plan("big")
    assert (await small.publish(reply.entries[0], size=301)).outcome is PublishOutcome.OVER_BUDGET
    assert {content for content in ("a", "b", "c") if await outcome(small, content, content) is HIT} == left
    await small.directory.check_integrity()
    await small.directory.close()


async def test_a_budget_that_comes_with_the_request_replaces_the_common_one(rig: Rig) -> None:
    async def publish(content: str, budget_bytes: int) -> PublishOutcome:
        namespace = Namespace("acme", "", budget_bytes)
        entry = PartEntry(EntryKind.SEGMENT, digest(content), 100)
        reply = await rig.cache.plan(PlanRequest(namespace, "model-1", "profile-1", (entry,), 30.0, ""))
        result = await rig.publish(reply.entries[0], size=300)
        await rig.cache.release(reply.lease_id)
        return result.outcome

    assert await publish("a", 250) is PublishOutcome.OVER_BUDGET
    assert await publish("a", 350) is PublishOutcome.ACCEPTED
    assert await publish("b", 350) is PublishOutcome.ACCEPTED
    assert (await rig.directory.usage()).used_bytes == 300
    assert await publish("c", 10_000) is PublishOutcome.ACCEPTED
    assert (await rig.directory.usage()).used_bytes == 600


async def test_lowered_budgets_are_reconciled(rig: Rig) -> None:
    leased = await rig.plan("kept", document="kept")
    await rig.publish(leased.entries[0], size=100)
    for content in ("a", "b", "c"):
        rig.clock.now += 1
        await store(rig, content, content, size=200)
    await outcome(rig, "c", "c")
    assert await rig.directory.reconcile() == 0
    entry = PartEntry(EntryKind.SEGMENT, digest("kept"), 100)
    namespace = Namespace("acme", "", 350)
    await rig.cache.plan(PlanRequest(namespace, "model-1", "profile-1", (entry,), 30.0, leased.lease_id))
    assert await rig.directory.reconcile() == 2
    assert [await outcome(rig, name, name) for name in ("kept", "a", "b", "c")] == [HIT, COLD, COLD, HIT]
