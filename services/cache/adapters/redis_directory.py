"""The directory in Redis, shared by every replica of the cache service and kept through its restarts.

Each method is one Lua script, so it is atomic in Redis. All keys start with `{prefix}:`, whose braces put them into
one slot of a cluster. The instance must not evict (`maxmemory-policy noeviction`).
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from typing_extensions import override

from services.cache.adapters.redis_snapshot import read_snapshot
from services.cache.domain.directory import (
    Claim,
    Copy,
    Directory,
    HeartbeatReply,
    PlannedEntry,
    PlanOrder,
    PlanReply,
    PublishOrder,
    PublishReply,
    Ticket,
    Usage,
)
from services.cache.domain.errors import (
    DirectoryUnavailableError,
    StaleEpochsError,
    UnknownLeaseError,
    UnknownWorkerError,
)
from services.cache.domain.integrity import require_integrity
from services.cache.domain.values import (
    EntryKind,
    EntryRecord,
    Epochs,
    Holder,
    Limits,
    PlanOutcome,
    PublishOutcome,
    Scopes,
)

__all__ = ["RedisDirectory"]

_SCRIPTS = ("epochs", "plan", "renew", "release", "publish", "invalidate", "heartbeat", "restore", "usage")
_TIMEOUT_SECONDS = 1.0


class RedisDirectory(Directory):
    """`clock` replaces the server's own time; every replica must then share it, so only tests set it."""

    def __init__(self, url: str, prefix: str, limits: Limits, clock: Callable[[], float] | None = None) -> None:
        # A pooled connection that died with a restarted server fails once, and every script may be repeated.
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        self._client = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            legacy_responses=False,
            protocol=3,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=retry,
        )
        self._base = f"{{{prefix}}}"
        self._limits = limits
        self._clock = clock
        sources = files("services.cache.adapters") / "lua"
        prelude = (sources / "prelude.lua").read_text()
        self._scripts = {
            name: self._client.register_script(prelude + (sources / f"{name}.lua").read_text()) for name in _SCRIPTS
        }

    @override
    async def epochs(self, tenant: str, model: str) -> Epochs:
        tenant_epoch, model_epoch = await self._run("epochs", tenant=tenant, model=model)
        return Epochs(int(tenant_epoch), int(model_epoch))

    @override
    async def plan(self, order: PlanOrder) -> PlanReply:
        wanted = [
            {"key": one.key.hex(), "kind": one.kind, "tokens": one.num_tokens, "document": one.document}
            for one in order.wanted
        ]
        status, *answers = await self._run(
            "plan",
            lease=order.lease_id,
            extends=order.extends,
            nonce=order.nonce,
            lease_seconds=order.lease_seconds,
            tenant=order.tenant,
            model=order.model,
            epochs=[order.epochs.tenant, order.epochs.model],
            wanted=wanted,
        )
        if status == "stale":
            raise StaleEpochsError(Epochs(int(answers[0]), int(answers[1])))
        if status == "unknown_lease":
            raise UnknownLeaseError(order.lease_id)
        entries = (_planned(one.key, answer) for one, answer in zip(order.wanted, answers, strict=True))
        return PlanReply(order.lease_id, tuple(entries))

    @override
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        if not await self._run("renew", lease=lease_id, lease_seconds=lease_seconds):
            raise UnknownLeaseError(lease_id)

    @override
    async def release(self, lease_id: str) -> None:
        await self._run("release", lease=lease_id)

    @override
    async def publish(self, order: PublishOrder) -> PublishReply:
        outcome, *details = await self._run(
            "publish",
            key=order.key.hex(),
            ticket=order.ticket_id,
            fence=order.fence,
            worker=order.worker_id,
            tier=order.tier,
            size=order.size_bytes,
        )
        if outcome == "unknown_worker":
            raise UnknownWorkerError(order.worker_id)
        if outcome != PublishOutcome.ACCEPTED:
            return PublishReply(PublishOutcome(outcome))
        *description, num_evicted, drop_keys = details
        return PublishReply(PublishOutcome.ACCEPTED, _keys(drop_keys), num_evicted, _record(order.key, *description))

    @override
    async def invalidate(self, scope: str) -> int:
        return int(await self._run("invalidate", scope=scope))

    @override
    async def heartbeat(self, worker_id: str, address: str, copies: Sequence[Copy]) -> HeartbeatReply:
        listed = [[copy.key.hex(), copy.tier] for copy in copies]
        drop_keys, unknown_keys = await self._run("heartbeat", worker=worker_id, address=address, copies=listed)
        return HeartbeatReply(_keys(drop_keys), _keys(unknown_keys))

    @override
    async def restore(self, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
        return _keys(await self._run("restore", worker=worker_id, records=[_described(claim) for claim in claims]))

    @override
    async def usage(self) -> Usage:
        return Usage(*await self._run("usage"))

    @override
    async def check_integrity(self) -> None:
        async with _unavailable():
            require_integrity(await read_snapshot(self._client, f"{self._base}:", self._limits.budget_bytes))

    @override
    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: str, **order: object) -> Any:  # noqa: ANN401 # each script answers in its own shape
        now = self._clock() if self._clock else None
        message = json.dumps({**order, "now": now, "limits": asdict(self._limits)})
        async with _unavailable():
            return await self._scripts[script](keys=[self._base], args=[message])


@asynccontextmanager
async def _unavailable() -> AsyncIterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise DirectoryUnavailableError(f"the directory's Redis does not answer: {error}") from error


def _planned(key: bytes, answer: list[str]) -> PlannedEntry:
    outcome, *details = answer
    if outcome == PlanOutcome.HIT:
        triples = zip(details[::3], details[1::3], details[2::3], strict=True)
        return PlannedEntry(PlanOutcome.HIT, key, tuple(sorted((Holder(*one) for one in triples), key=_worker_id)))
    if outcome == PlanOutcome.COLD:
        ticket_id, fence, seconds = details
        return PlannedEntry(PlanOutcome.COLD, key, ticket=Ticket(ticket_id, int(fence), float(seconds)))
    return PlannedEntry(PlanOutcome.PENDING, key, owner_expires_in_seconds=float(details[0]))


def _worker_id(holder: Holder) -> str:
    return holder.worker_id


def _record(key: bytes, fields: list[str], scopes: list[str], tenant_epoch: str, model_epoch: str) -> EntryRecord:
    kind, num_tokens, size_bytes, fence, ticket_id = fields
    tenant = next(scope for scope in scopes if scope.startswith("tenant:"))
    model = next(scope for scope in scopes if scope.startswith("model:"))
    return EntryRecord(
        key=key,
        kind=EntryKind(kind),
        num_tokens=int(num_tokens),
        size_bytes=int(size_bytes),
        fence=int(fence),
        ticket_id=ticket_id,
        scopes=Scopes(tenant, model, frozenset(scopes) - {tenant, model}),
        epochs=Epochs(int(tenant_epoch), int(model_epoch)),
    )


def _described(claim: Claim) -> dict[str, object]:
    record = claim.record
    return {
        "key": record.key.hex(),
        "kind": record.kind,
        "tokens": record.num_tokens,
        "size": record.size_bytes,
        "fence": record.fence,
        "ticket": record.ticket_id,
        "tenant": record.scopes.tenant,
        "model": record.scopes.model,
        "documents": sorted(record.scopes.documents),
        "epochs": [record.epochs.tenant, record.epochs.model],
        "tier": claim.tier,
    }


def _keys(answers: list[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(answer) for answer in answers)
