"""Metrics as a decorator around the directory's port, so that the adapters hold only storage."""

import collections
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typing_extensions import override

from services.cache.domain.directory import Directory
from services.cache.domain.evictions import Eviction, EvictionReason, Miss, MissCause
from services.cache.domain.orders import (
    Claim,
    Copy,
    HeartbeatReply,
    PinReply,
    PlanOrder,
    PlanReply,
    PublishOrder,
    PublishReply,
    RegisterOrder,
    RegisterReply,
    Usage,
)
from services.cache.domain.values import DocumentRecord, Removal, StoredState
from services.cache.domain.workers import WorkerRecord

__all__ = ["MeteredDirectory"]

_PLAN_SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


_BUDGETS = (1.25, 1.5, 2.0, 4.0, 8.0)
_BEYOND = "more"


def _multiple(budget: float) -> str:
    return f"{budget:g}"


class MeteredDirectory(Directory):
    """Counts what passes through; `usage` sets the gauges."""

    def __init__(self, directory: Directory, registry: CollectorRegistry, budget_bytes: int) -> None:
        self._directory = directory
        self._plan_entries = Counter(
            "hypic_cache_plan_entries_total", "Planned entries.", ("kind", "outcome"), registry=registry
        )
        self._plan_seconds = Histogram(
            "hypic_cache_plan_seconds", "Seconds of one plan.", buckets=_PLAN_SECONDS_BUCKETS, registry=registry
        )
        self._publishes = Counter("hypic_cache_publishes_total", "Publishes.", ("outcome",), registry=registry)
        self._evictions = Counter(
            "hypic_cache_evictions_total",
            "Entries evicted: for room in the whole budget, for its tenant's own, or after a budget was lowered.",
            ("reason",),
            registry=registry,
        )
        for reason in EvictionReason:
            self._evictions.labels(reason.value)
        self._missed_tokens = Counter(
            "hypic_cache_missed_tokens_total",
            "Tokens of segments that a plan found absent, by the least multiple of the present budget that would have kept"
            f" them ({', '.join(map(_multiple, _BUDGETS))}); {_BEYOND}: more than that; tenant_budget: evicted for their"
            " tenant's own; new: never stored, or longer ago than is remembered. An estimate, exact under LRU.",
            ("budget",),
            registry=registry,
        )
        for multiple in (*map(_multiple, _BUDGETS), _BEYOND, MissCause.TENANT_BUDGET, MissCause.NEW):
            self._missed_tokens.labels(multiple)
        self._budget_bytes = budget_bytes
        budget = Gauge("hypic_cache_budget_bytes", "Bytes that all copies together may hold.", registry=registry)
        budget.set(budget_bytes)
        self._invalidated = Counter(
            "hypic_cache_invalidated_entries_total", "Entries removed by invalidations.", registry=registry
        )
        self._registrations = Counter(
            "hypic_cache_registrations_total", "Registrations of documents.", ("outcome",), registry=registry
        )
        self._restored = Counter(
            "hypic_cache_restores_total", "Receipts presented after a loss.", ("outcome",), registry=registry
        )
        self._entries = Gauge("hypic_cache_entries", "Published entries.", registry=registry)
        self._bytes = Gauge("hypic_cache_bytes", "Bytes of all published copies.", registry=registry)
        self._leases = Gauge("hypic_cache_leases", "Live leases.", registry=registry)
        self._tickets = Gauge("hypic_cache_tickets", "Live tickets.", registry=registry)
        self._workers = Gauge("hypic_cache_workers", "Workers with a live heartbeat.", registry=registry)

    @override
    async def epochs(self, scopes: Sequence[str]) -> Mapping[str, int]:
        return await self._directory.epochs(scopes)

    @override
    async def plan(self, order: PlanOrder) -> PlanReply:
        with self._plan_seconds.time():
            reply = await self._directory.plan(order)
        kinds, outcomes = [one.kind for one in order.wanted], [one.outcome for one in reply.entries]
        for labels, count in collections.Counter(zip(kinds, outcomes, strict=True)).items():
            self._plan_entries.labels(*labels).inc(count)
        for wanted, planned in zip(order.wanted, reply.entries, strict=True):
            if planned.miss is not None:
                self._missed_tokens.labels(self._kept_by(planned.miss)).inc(wanted.num_tokens)
        return reply

    def _kept_by(self, miss: Miss) -> str:
        if miss.cause is not MissCause.ROOM:
            return miss.cause.value
        needed = 1 + miss.missing_bytes / self._budget_bytes
        return next((_multiple(budget) for budget in _BUDGETS if needed <= budget), _BEYOND)

    @override
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        await self._directory.renew(lease_id, lease_seconds)

    @override
    async def release(self, *lease_ids: str) -> None:
        await self._directory.release(*lease_ids)

    @override
    async def publish(self, order: PublishOrder) -> PublishReply:
        reply = await self._directory.publish(order)
        self._publishes.labels(reply.outcome.value).inc()
        self._evictions.labels(EvictionReason.TENANT_BUDGET).inc(reply.num_evicted_own)
        self._evictions.labels(EvictionReason.ROOM).inc(reply.num_evicted - reply.num_evicted_own)
        return reply

    @override
    async def invalidate(self, scope: str) -> Removal:
        removal = await self._directory.invalidate(scope)
        self._invalidated.inc(removal.num_entries)
        return removal

    @override
    async def register(self, order: RegisterOrder) -> RegisterReply:
        reply = await self._directory.register(order)
        self._registrations.labels(reply.outcome.value).inc()
        self._invalidated.inc(reply.removal.num_entries)
        return reply

    @override
    async def find_document(self, scope: str) -> DocumentRecord | None:
        return await self._directory.find_document(scope)

    @override
    async def list_documents(self, tenant: str, after: str, limit: int) -> tuple[DocumentRecord, ...]:
        return await self._directory.list_documents(tenant, after, limit)

    @override
    async def states(self, scope: str) -> tuple[StoredState, ...]:
        return await self._directory.states(scope)

    @override
    async def reconcile(self) -> int:
        evicted = await self._directory.reconcile()
        self._evictions.labels(EvictionReason.LOWERED_BUDGET).inc(evicted)
        return evicted

    @override
    async def pin(self, scope: str, budget_bytes: int = 0) -> PinReply:
        return await self._directory.pin(scope, budget_bytes)

    @override
    async def unpin(self, scope: str) -> PinReply:
        return await self._directory.unpin(scope)

    @override
    async def pinned(self, scopes: Sequence[str]) -> frozenset[str]:
        return await self._directory.pinned(scopes)

    @override
    async def heartbeat(self, worker: WorkerRecord, copies: Sequence[Copy]) -> HeartbeatReply:
        return await self._directory.heartbeat(worker, copies)

    @override
    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        return await self._directory.list_workers()

    @override
    async def restore(self, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
        refused = await self._directory.restore(worker_id, claims)
        self._restored.labels("refused").inc(len(refused))
        self._restored.labels("restored").inc(len(claims) - len(refused))
        return refused

    @override
    async def evictions(self) -> tuple[Eviction, ...]:
        return await self._directory.evictions()

    @override
    async def usage(self) -> Usage:
        usage = await self._directory.usage()
        self._entries.set(usage.num_entries)
        self._bytes.set(usage.used_bytes)
        self._leases.set(usage.num_leases)
        self._tickets.set(usage.num_tickets)
        self._workers.set(usage.num_workers)
        return usage

    @override
    async def check_integrity(self) -> None:
        await self._directory.check_integrity()

    @override
    async def close(self) -> None:
        await self._directory.close()
