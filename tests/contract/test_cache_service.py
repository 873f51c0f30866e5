"""The calls of a running cache service, over real gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypic.v1 import cache_pb2 as pb

from services.cache.settings import CacheSettings
from tests.contract.served_cache import DEADLINE_SECONDS, DOCUMENT, SECRET, SEGMENT, Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with running(CacheSettings.from_environment(listen_address="127.0.0.1:0", secret=SECRET)) as one:
        yield one


async def test_a_part_from_cold_to_hit(service: Service) -> None:
    assert (await service.beat()).time_to_live_seconds == 15.0
    cold = await service.plan()
    assert cold.entries[0].outcome == pb.PLAN_OUTCOME_COLD
    assert cold.entries[0].ticket.expires_in_seconds == pytest.approx(60, abs=1)
    pending = await service.plan()
    assert pending.entries[0].outcome == pb.PLAN_OUTCOME_PENDING
    assert 50 < pending.entries[0].owner_expires_in_seconds <= 60
    published = await service.publish(cold.entries[0])
    assert published.outcome == pb.PUBLISH_OUTCOME_ACCEPTED
    assert published.receipt
    hit = await service.plan(lease_id=pending.lease_id)
    assert hit.lease_id == pending.lease_id
    assert hit.entries[0].outcome == pb.PLAN_OUTCOME_HIT
    assert hit.entries[0].holders[0] == pb.Holder(worker_id="w1", address="10.0.0.1:7201", tier="host")
    for lease_id in (cold.lease_id, pending.lease_id, cold.lease_id):
        await service.stub.Release(pb.ReleaseRequest(lease_ids=[lease_id]), timeout=DEADLINE_SECONDS)


async def test_workers_are_listed_as_their_heartbeats_describe_them(service: Service) -> None:
    load = pb.WorkerLoad(num_requests_running=1, capture_tokens_waiting=4096)
    speeds = pb.WorkerSpeeds(
        capture_pass_tokens=1024,
        combine_token_seconds=0.5,
        transfers=[pb.TransferSpeed(source="same_host", latency_seconds=0.25, bytes_per_second=1e9)],
    )
    about: dict[str, Any] = {
        "worker_id": "w2",
        "address": "10.0.0.2:7102",
        "model": "m",
        "profile_digest": "p",
        "roles": [pb.WORKER_ROLE_PREFILL],
        "load": load,
        "speeds": speeds,
        "draining": True,
    }
    await service.stub.Heartbeat(pb.HeartbeatRequest(**about), timeout=DEADLINE_SECONDS)
    listed = await service.stub.ListWorkers(pb.ListWorkersRequest(), timeout=DEADLINE_SECONDS)
    assert [worker.worker_id for worker in listed.workers][-1] == "w2"
    assert listed.workers[-1] == pb.RegisteredWorker(**about)


async def test_a_restarted_service_is_rebuilt_by_heartbeats(tmp_path: Path) -> None:
    """Over its journal and under its secret; another one takes nothing back."""

    def settings(**more: object) -> CacheSettings:
        return CacheSettings.from_environment(listen_address="127.0.0.1:0", **more)

    kept = settings(secret=SECRET, journal_file=tmp_path / "journal")
    async with running(kept) as service:
        await service.beat()
        await service.register(tags=["hr"])
        planned = (await service.plan()).entries[0]
        receipt = (await service.publish(planned)).receipt
        resident = pb.ResidentEntry(key=planned.key, tier="gpu", receipt=receipt)
    async with running(kept) as restarted:
        assert list((await restarted.beat(resident)).drop_keys) == []
        hit = (await restarted.plan()).entries[0]
        assert (hit.outcome, hit.holders[0].tier) == (pb.PLAN_OUTCOME_HIT, "gpu")
        assert (await restarted.register(tags=["hr"])).outcome == pb.REGISTER_OUTCOME_UNCHANGED
    for strange in (settings(), settings(secret=SECRET), settings(secret=SECRET, journal_file=tmp_path / "other")):
        async with running(strange) as stranger:
            assert list((await stranger.beat(resident)).drop_keys) == [planned.key]


@pytest.mark.parametrize(
    "scope",
    [{"document_id": "d"}, {"tag": "hr"}, {"whole_tenant": True}, {"model": "m"}],
    ids=["document", "tag", "tenant", "model"],
)
async def test_invalidation(service: Service, scope: dict[str, Any]) -> None:
    await service.beat()
    await service.register(tags=["hr"])
    planned = (await service.plan()).entries[0]
    receipt = (await service.publish(planned)).receipt
    message = pb.InvalidateRequest(namespace=pb.Namespace(tenant="acme"), **scope)
    removed = await service.stub.Invalidate(message, timeout=DEADLINE_SECONDS)
    assert (removed.num_entries, removed.num_documents) == (1, 0 if "model" in scope else 1)
    (copies,) = removed.copies
    assert (copies.worker_id, copies.tier, copies.num_entries, copies.size_bytes) == ("w1", "host", 1, 1000)
    assert list(copies.keys) == [planned.key]
    assert (await service.plan()).entries[0].outcome == pb.PLAN_OUTCOME_COLD
    resident = pb.ResidentEntry(key=planned.key, tier="host", receipt=receipt)
    assert list((await service.beat(resident)).drop_keys) == [planned.key]


@pytest.mark.parametrize("scope", [{"document_id": "d"}, {"whole_tenant": True}], ids=["document", "tenant"])
async def test_what_is_pinned_makes_no_room(scope: dict[str, Any]) -> None:
    settings = CacheSettings.from_environment(
        listen_address="127.0.0.1:0", secret=SECRET, budget_bytes=1500, pinned_share=1.0
    )
    pin = pb.PinRequest(namespace=pb.Namespace(tenant="acme"), **scope)
    entry = pb.PlanEntry(kind=pb.ENTRY_KIND_SEGMENT, content_hash=b"o" * 32, num_tokens=400)
    other = pb.PlanRequest(
        namespace=pb.Namespace(tenant="acme"), model="m", profile_digest="p", entries=[entry], lease_seconds=30
    )
    async with running(settings) as service:
        await service.beat()
        plan = await service.plan()
        await service.publish(plan.entries[0])
        await service.stub.Release(pb.ReleaseRequest(lease_ids=[plan.lease_id]), timeout=DEADLINE_SECONDS)
        outcomes = []
        for settle in (service.stub.Pin, service.stub.Unpin):
            reply = await settle(pin, timeout=DEADLINE_SECONDS)
            assert (reply.num_entries, reply.limit_bytes) == (1, 1500)
            promised = 1500 if "whole_tenant" in scope else 1000
            assert reply.promised_bytes == (promised if settle is service.stub.Pin else 0)
            planned = await service.ask(other)
            outcomes.append((await service.publish(planned.entries[0])).outcome)
            await service.stub.Release(pb.ReleaseRequest(lease_ids=[planned.lease_id]), timeout=DEADLINE_SECONDS)
    assert outcomes == [pb.PUBLISH_OUTCOME_OVER_BUDGET, pb.PUBLISH_OUTCOME_ACCEPTED]


async def test_a_document_is_registered_described_listed_and_replaced(service: Service) -> None:
    await service.beat()
    created = await service.register(tags=["law", "hr", "law"])
    assert created.outcome == pb.REGISTER_OUTCOME_CREATED
    assert (await service.register(tags=["hr", "law"])).outcome == pb.REGISTER_OUTCOME_UNCHANGED
    planned = (await service.plan()).entries[0]
    await service.publish(planned)
    namespace = pb.Namespace(tenant="acme")
    describe = pb.DescribeDocumentRequest(namespace=namespace, document_id="d")
    described = (await service.stub.DescribeDocument(describe, timeout=DEADLINE_SECONDS)).document
    assert described.registered.document == DOCUMENT
    assert (described.registered.title, list(described.registered.tags)) == ("Title", ["hr", "law"])
    assert described.registered.version == created.version
    (state,) = described.states
    assert (state.num_tokens, state.size_bytes, state.holders[0].worker_id) == (400, 1000, "w1")
    assert len(state.key_digest) == 16
    assert state.key_digest not in planned.key
    page = pb.ListDocumentsRequest(namespace=namespace, limit=1)
    listed = await service.stub.ListDocuments(page, timeout=DEADLINE_SECONDS)
    assert (list(listed.documents), listed.has_more) == ([described], False)
    replaced = await service.register(digest=b"e" * 32)
    assert replaced.outcome == pb.REGISTER_OUTCOME_REPLACED
    assert replaced.version > created.version
    assert list(replaced.removed.copies[0].keys) == [planned.key]
    assert (await service.plan()).entries[0].outcome == pb.PLAN_OUTCOME_SUPERSEDED
    stranger = pb.DescribeDocumentRequest(namespace=pb.Namespace(tenant="other"), document_id="d")
    assert not (await service.stub.DescribeDocument(stranger, timeout=DEADLINE_SECONDS)).HasField("document")


HALF_NAMED = pb.PlanEntry(
    kind=pb.ENTRY_KIND_SEGMENT, content_hash=b"c" * 32, num_tokens=1, documents=[DOCUMENT, pb.DocumentRef(id="e")]
)
BAD_PLANS: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "kind": ({"entries": [pb.PlanEntry(content_hash=b"c" * 32)]}, grpc.StatusCode.INVALID_ARGUMENT, "entries[0].kind"),
    "hash": (
        {"entries": [SEGMENT, pb.PlanEntry(kind=pb.ENTRY_KIND_PREFIX, content_hash=b"c")]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "entries[1].content_hash",
    ),
    "model": ({"model": ""}, grpc.StatusCode.INVALID_ARGUMENT, "model"),
    "duration": ({"lease_seconds": -1}, grpc.StatusCode.INVALID_ARGUMENT, "lease_seconds"),
    "lease": ({"lease_id": "none"}, grpc.StatusCode.NOT_FOUND, "none"),
    "document's digest": (
        {"entries": [HALF_NAMED]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "entries[0].documents[1].digest",
    ),
}


@pytest.mark.parametrize("case", list(BAD_PLANS))
async def test_a_bad_plan_names_the_field_and_leaves_its_stream_to_others(service: Service, case: str) -> None:
    fields, code, name = BAD_PLANS[case]
    good: dict[str, Any] = {"model": "m", "profile_digest": "p", "entries": [SEGMENT]}
    plans = [pb.PlanRequest(**good, call=7), pb.PlanRequest(**(good | fields), call=8), pb.PlanRequest(**good, call=9)]
    answers = {one.call: one async for one in service.stub.Plan(iter(plans), timeout=DEADLINE_SECONDS)}
    assert set(answers) == {7, 8, 9}
    assert answers[8].failure.status == code.value[0]
    assert name in answers[8].failure.message
    assert not answers[8].lease_id
    outcomes = {answers[call].entries[0].outcome for call in (7, 9)}
    assert outcomes == {pb.PLAN_OUTCOME_COLD, pb.PLAN_OUTCOME_PENDING}
    assert not answers[7].HasField("failure")


BAD: dict[str, tuple[str, Any, grpc.StatusCode, str]] = {
    "lease": ("Renew", pb.RenewRequest(lease_id="none"), grpc.StatusCode.NOT_FOUND, "none"),
    "size": (
        "Publish",
        pb.PublishRequest(key=b"k" * 32, ticket_id="t", worker_id="w1"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "size_bytes",
    ),
    "scope": ("Invalidate", pb.InvalidateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "scope"),
    "pin's scope": ("Pin", pb.PinRequest(), grpc.StatusCode.INVALID_ARGUMENT, "scope"),
    "not the tenant's pin": (
        "Unpin",
        pb.PinRequest(whole_tenant=False),
        grpc.StatusCode.INVALID_ARGUMENT,
        "scope",
    ),
    "not the tenant": (
        "Invalidate",
        pb.InvalidateRequest(whole_tenant=False),
        grpc.StatusCode.INVALID_ARGUMENT,
        "scope",
    ),
    "registration": (
        "RegisterDocument",
        pb.RegisterDocumentRequest(document=pb.DocumentRef(digest=b"d" * 32)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "document.id",
    ),
    "page": ("ListDocuments", pb.ListDocumentsRequest(limit=101), grpc.StatusCode.INVALID_ARGUMENT, "limit"),
    "worker": ("Heartbeat", pb.HeartbeatRequest(address="a:1"), grpc.StatusCode.INVALID_ARGUMENT, "worker_id"),
    "resident": (
        "Heartbeat",
        pb.HeartbeatRequest(worker_id="w", address="a:1", resident=[pb.ResidentEntry(key=b"short")]),
        grpc.StatusCode.INVALID_ARGUMENT,
        "resident.key",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
async def test_bad_requests_name_the_field(service: Service, case: str) -> None:
    method, message, code, name = BAD[case]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(service.stub, method)(message, timeout=DEADLINE_SECONDS)
    assert caught.value.code() is code
    assert name in (caught.value.details() or "")


async def test_a_publish_of_an_unknown_worker_is_a_conflict(service: Service) -> None:
    planned = (await service.plan()).entries[0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.publish(planned)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_metrics_count_what_happened(service: Service) -> None:
    await service.beat()
    await service.publish((await service.plan()).entries[0])
    await service.plan()
    sample = service.registry.get_sample_value
    labels = {"kind": "segment", "outcome": "cold"}
    assert sample("hypic_cache_plan_entries_total", labels) == 1
    assert sample("hypic_cache_plan_entries_total", {**labels, "outcome": "hit"}) == 1
    assert sample("hypic_cache_publishes_total", {"outcome": "accepted"}) == 1
    assert sample("hypic_cache_plan_seconds_count") == 2


async def test_evictions_and_misses_are_told_by_tenant_and_by_budget() -> None:
    settings = CacheSettings.from_environment(
        listen_address="127.0.0.1:0", secret=SECRET, budget_bytes=250, share_seconds=1e-9
    )
    async with running(settings) as service:
        await service.beat()
        # Of equally long segments the larger leaves first.
        for tenant, content, size in (
            ("acme", b"a", 110),
            ("beta", b"b", 105),
            ("beta", b"c", 100),
            ("acme", b"a", 110),
        ):
            entry = pb.PlanEntry(kind=pb.ENTRY_KIND_SEGMENT, content_hash=content * 32, num_tokens=70)
            message = pb.PlanRequest(
                namespace=pb.Namespace(tenant=tenant), model="m", profile_digest="p", entries=[entry]
            )
            plan = await service.ask(message)
            await service.publish(plan.entries[0], size)
            await service.stub.Release(pb.ReleaseRequest(lease_ids=[plan.lease_id]), timeout=DEADLINE_SECONDS)
        rows = (await service.stub.ListEvictions(pb.ListEvictionsRequest(), timeout=DEADLINE_SECONDS)).evictions
        assert sorted((row.evictor, row.victim, row.num_entries, row.size_bytes, row.num_tokens) for row in rows) == [
            ("acme", "beta", 1, 105, 70),
            ("beta", "acme", 1, 110, 70),
        ]
        assert service.registry.get_sample_value("hypic_cache_evictions_total", {"reason": "room"}) == 2
        missed = {
            budget: service.registry.get_sample_value("hypic_cache_missed_tokens_total", {"budget": budget})
            for budget in ("new", "1.25", "1.5", "2", "more", "tenant_budget")
        }
        # 110 bytes more than 250 would have kept it.
        assert missed == {"new": 210, "1.25": 0, "1.5": 70, "2": 0, "more": 0, "tenant_budget": 0}
        assert service.registry.get_sample_value("hypic_cache_budget_bytes") == 250
