"""The directory in Redis, shared by every replica of the cache service and kept through its restarts.

Each method is one Lua script, so it is atomic in Redis. All keys start with `{prefix}:`, whose braces put them into
one slot of a cluster. The instance must not evict (`maxmemory-policy noeviction`).
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from typing_extensions import override

from services.cache.adapters import redis_codec as codec
from services.cache.adapters.redis_snapshot import read_snapshot
from services.cache.domain.directory import Directory
from services.cache.domain.errors import (
    DirectoryUnavailableError,
    PinLimitError,
    StaleEpochsError,
    UnknownLeaseError,
    UnknownWorkerError,
)
from services.cache.domain.evictions import Eviction
from services.cache.domain.integrity import require_integrity
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
from services.cache.domain.values import (
    DocumentRecord,
    Limits,
    PublishOutcome,
    RegisterOutcome,
    Removal,
    StoredState,
)
from services.cache.domain.workers import WorkerRecord

__all__ = ["RedisAddress", "RedisDirectory"]

_SCRIPTS = (
    "epochs", "plan", "renew", "release", "publish", "invalidate", "register", "pin", "pinned", "documents", "states",
    "heartbeat", "workers", "restore", "reconcile", "usage", "evictions",
)  # fmt: skip
# What a script stands on besides the prelude.
_FOUNDATIONS = {
    "plan": ("past", "remembering"),
    "publish": ("remembering", "storing", "room"),
    "pin": ("remembering", "storing"),
    "reconcile": ("remembering", "storing", "room"),
    "restore": ("remembering", "storing", "past", "removal"),
    "invalidate": ("past", "removal"),
    "register": ("past", "removal"),
}
_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis is, and who comes. The user needs no key outside `{prefix}:*`.

    `ca_file`: certificates that sign the server's, with a `rediss://` URL; None trusts the system's. `timeout_seconds`: a server
    that answers nothing for so long counts as gone.
    """

    url: str
    prefix: str
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    timeout_seconds: float = 1.0


class RedisDirectory(Directory):
    """`clock` replaces the server's own time; every replica must then share it, so only tests set it."""

    def __init__(self, address: RedisAddress, limits: Limits, clock: Callable[[], float] | None = None) -> None:
        # A pooled connection that died with a restarted server fails once, and every script may be repeated.
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        self._client = redis.asyncio.Redis.from_url(
            address.url,
            decode_responses=True,
            legacy_responses=False,
            protocol=3,
            socket_timeout=address.timeout_seconds,
            socket_connect_timeout=address.timeout_seconds,
            retry=retry,
            **_security(address),
        )
        self._timeout_seconds = address.timeout_seconds
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._base = f"{{{address.prefix}}}:"
        self._limits = limits
        self._limit_fields = asdict(limits)
        self._clock = clock
        self._scripts = {name: self._client.register_script(_source(name)) for name in _SCRIPTS}

    @override
    async def epochs(self, scopes: Sequence[str]) -> Mapping[str, int]:
        return dict(zip(scopes, map(int, await self._run("epochs", scopes=list(scopes))), strict=True))

    @override
    async def plan(self, order: PlanOrder) -> PlanReply:
        answer = await self._run_with("plan", codec.plan_fields(order), *codec.plan_keys(order))
        status, *answers = json.loads(answer)
        if status == "stale":
            raise StaleEpochsError({scope: int(epoch) for scope, epoch in codec.pairs(answers).items()})
        if status == "unknown_lease":
            raise UnknownLeaseError(order.lease_id)
        return PlanReply(order.lease_id, codec.planned(order, *answers))

    @override
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        if not await self._run("renew", lease=lease_id, lease_seconds=lease_seconds):
            raise UnknownLeaseError(lease_id)

    @override
    async def release(self, *lease_ids: str) -> None:
        await self._run("release", leases=lease_ids)

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
            life=secrets.token_hex(8),
        )
        if outcome == "unknown_worker":
            raise UnknownWorkerError(order.worker_id)
        if outcome != PublishOutcome.ACCEPTED:
            return PublishReply(PublishOutcome(outcome))
        description, num_evicted, num_evicted_own, drop_keys = details
        record = codec.record(description)
        return PublishReply(PublishOutcome.ACCEPTED, codec.keys(drop_keys), num_evicted, num_evicted_own, record)

    @override
    async def invalidate(self, scope: str) -> Removal:
        num_entries, num_documents, copies = await self._run("invalidate", scope=scope)
        return Removal(num_entries, num_documents, codec.removed_copies(copies))

    @override
    async def pin(self, scope: str, budget_bytes: int = 0) -> PinReply:
        return await self._pin(scope, is_pinned=True, budget_bytes=budget_bytes)

    @override
    async def unpin(self, scope: str) -> PinReply:
        return await self._pin(scope, is_pinned=False, budget_bytes=0)

    async def _pin(self, scope: str, **fields: object) -> PinReply:
        limit_bytes = self._limits.pin_limit_bytes
        outcome, *counts = await self._run("pin", scope=scope, pin_limit_bytes=limit_bytes, **fields)
        if outcome == "over_limit":
            raise PinLimitError(int(counts[0]), limit_bytes)
        num_entries, promised_bytes = counts
        return PinReply(num_entries, int(promised_bytes), limit_bytes)

    @override
    async def pinned(self, scopes: Sequence[str]) -> frozenset[str]:
        found = await self._run("pinned", scopes=list(scopes)) if scopes else ()
        return frozenset(scope for scope, is_pinned in zip(scopes, found, strict=True) if is_pinned)

    @override
    async def register(self, order: RegisterOrder) -> RegisterReply:
        outcome, version, num_entries, copies = await self._run("register", **codec.register_fields(order))
        removal = Removal(num_entries, 1 if outcome == RegisterOutcome.REPLACED else 0, codec.removed_copies(copies))
        return RegisterReply(RegisterOutcome(outcome), int(version), removal)

    @override
    async def find_document(self, scope: str) -> DocumentRecord | None:
        answers = await self._run("documents", tenant=None, scopes=[scope])
        return codec.document(answers[0]) if answers else None

    @override
    async def list_documents(self, tenant: str, after: str, limit: int) -> tuple[DocumentRecord, ...]:
        return tuple(map(codec.document, await self._run("documents", tenant=tenant, after=after, limit=limit)))

    @override
    async def states(self, scope: str) -> tuple[StoredState, ...]:
        return tuple(sorted(map(codec.state, await self._run("states", scope=scope)), key=lambda state: state.key))

    @override
    async def reconcile(self) -> int:
        return int(await self._run("reconcile"))

    @override
    async def heartbeat(self, worker: WorkerRecord, copies: Sequence[Copy]) -> HeartbeatReply:
        listed = [[copy.key.hex(), copy.tier] for copy in copies]
        drop_keys, unknown_keys = await self._run("heartbeat", **codec.worker_fields(worker), copies=listed)
        return HeartbeatReply(codec.keys(drop_keys), codec.keys(unknown_keys))

    @override
    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        found = [codec.worker(*fields) for fields in await self._run("workers")]
        return tuple(sorted(found, key=lambda worker: worker.worker_id))

    @override
    async def restore(self, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
        return codec.keys(
            await self._run("restore", worker=worker_id, records=[codec.claimed(claim) for claim in claims])
        )

    @override
    async def evictions(self) -> tuple[Eviction, ...]:
        return codec.evictions(await self._run("evictions"))

    @override
    async def usage(self) -> Usage:
        return Usage(*await self._run("usage"))

    @override
    async def check_integrity(self) -> None:
        async with _unavailable():
            require_integrity(await read_snapshot(self._client, self._base, self._limits))

    @override
    async def close(self) -> None:
        await self._client.aclose()

    async def _run(self, script: str, **order: object) -> Any:  # noqa: ANN401 # each script answers in its own shape
        return await self._run_with(script, order)

    async def _run_with(self, script: str, order: Mapping[str, object], *more: str) -> Any:  # noqa: ANN401
        now = self._clock() if self._clock else None
        message = json.dumps({**order, "now": now, "limits": self._limit_fields})
        async with _unavailable(), self._turn():
            return await self._scripts[script](keys=[self._base], args=[message, *more])

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Scripts run one after the other: beyond a few connections calls wait here, where the pool would refuse them."""
        if self._turns.locked():
            async with asyncio.timeout(self._timeout_seconds):
                await self._turns.acquire()
        else:
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()


def _source(script: str) -> str:
    """A script behind the parts that it stands on."""
    folder = files("services.cache.adapters") / "lua"
    names = ("prelude", *_FOUNDATIONS.get(script, ()), script)
    return "".join((folder / f"{name}.lua").read_text() for name in names)


def _security(address: RedisAddress) -> dict[str, Any]:
    """Options of the client; those of the URL come first."""
    options = {
        "username": address.username or None,
        "password": address.password or None,
        "ssl_ca_certs": str(address.ca_file) if address.ca_file else None,
    }
    return {name: value for name, value in options.items() if value is not None}


@asynccontextmanager
async def _unavailable() -> AsyncIterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise DirectoryUnavailableError(f"the directory's Redis does not answer: {error}") from error
