"""Reads the whole directory out of Redis, for integrity checks. The layout is described in `lua/prelude.lua`."""

import json
from collections.abc import Iterable
from typing import Any

from redis.asyncio import Redis

from services.cache.domain.integrity import EntryState, LeaseState, RecordState, Snapshot, TicketState
from services.cache.domain.values import EntryKind, Limits

__all__ = ["read_snapshot"]


async def read_snapshot(client: Redis, base: str, limits: Limits) -> Snapshot:
    """Everything under `base`. Not atomic."""
    raw = await _read_all(client, base)
    hashes = {name: value for name, value in raw.items() if isinstance(value, dict)}
    tenant_bytes = {tenant: int(size) for tenant, size in hashes.get("bytes_of", {}).items()}
    own_budgets = {tenant: int(size) for tenant, size in hashes.get("budgets", {}).items()}
    return Snapshot(
        budget_bytes=limits.budget_bytes,
        used_bytes=int(raw.get("bytes", 0)),
        sequence=int(raw.get("sequence", 0)),
        entries={
            bytes.fromhex(key): EntryState(
                size_bytes=int(hashes[f"entry:{key}"]["size"]),
                tenant=hashes[f"entry:{key}"]["tenant"],
                fence=int(hashes[f"entry:{key}"]["fence"]),
                holders=frozenset(hashes.get(f"tiers:{key}", {})),
                leases=frozenset(raw.get(f"pins:{key}", ())),
                kind=EntryKind(hashes[f"entry:{key}"]["kind"]),
            )
            for key, _ in _under(raw, "entry:")
        },
        tickets={
            ticket_id: TicketState(
                key=bytes.fromhex(hashes[f"ticket:{ticket_id}"]["key"]),
                fence=int(hashes[f"ticket:{ticket_id}"]["fence"]),
                lease_id=hashes[f"ticket:{ticket_id}"]["lease"],
                dead=hashes[f"ticket:{ticket_id}"]["dead"] == "1",
            )
            for ticket_id in raw.get("tickets", ())
        },
        ticket_of={bytes.fromhex(key): ticket_id for key, ticket_id in hashes.get("ticket_of", {}).items()},
        leases={
            name: LeaseState(_keys(raw.get(f"lease_keys:{name}", ())), frozenset(raw.get(f"lease_tickets:{name}", ())))
            for name in raw.get("leases", ())
        },
        idle={tenant: _keys(order) for tenant, order in _under(raw, "idle:")},
        pinned=frozenset(raw.get("pinned", ())),
        ages={bytes.fromhex(key): int(fence) for key, fence in raw.get("born", {}).items()},
        held={name: _keys(raw.get(f"held:{name}", ())) for name in raw.get("workers", ())},
        marked={name: _keys(raw.get(f"marked:{name}", ())) for name in raw.get("workers", ())},
        scopes_of={bytes.fromhex(key): frozenset(scopes) for key, scopes in _under(raw, "scopes:")},
        keys_of_scope={scope: _keys(keys) for scope, keys in _under(raw, "scope:")},
        tenant_bytes=tenant_bytes,
        tenant_budgets={
            tenant: min(
                own_budgets.get(tenant) or limits.namespace_budget_bytes or limits.budget_bytes, limits.budget_bytes
            )
            for tenant in tenant_bytes
        },
        epochs={scope: int(epoch) for scope, epoch in hashes.get("epochs", {}).items()},
        links={bytes.fromhex(key): frozenset(scopes) for key, scopes in _under(raw, "links:")},
        past=frozenset(_past(member) for member in raw.get("past", ())),
        records={
            scope: RecordState(fields["tenant"], frozenset(json.loads(fields["tag_scopes"])), int(fields["version"]))
            for scope, fields in _under(raw, "record:")
        },
        records_of={scope: frozenset(found) for scope, found in _under(raw, "records:")},
    )


async def _read_all(client: Redis, base: str) -> dict[str, Any]:
    names = [name async for name in client.scan_iter(match=f"{base}*", count=1000)]
    async with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.type(name)
        kinds = await pipeline.execute()
        for name, kind in zip(names, kinds, strict=True):
            match kind:
                case "hash":
                    pipeline.hgetall(name)
                case "set":
                    pipeline.smembers(name)
                case "zset":
                    pipeline.zrange(name, 0, -1, withscores=True)
                case _:
                    pipeline.get(name)
        values = await pipeline.execute()
    return {
        name.removeprefix(base): dict(value) if kind == "zset" else value
        for name, kind, value in zip(names, kinds, values, strict=True)
    }


def _past(member: str) -> tuple[bytes, str]:
    key, is_link, scope = member.rpartition("|")
    return (bytes.fromhex(key), scope) if is_link else (b"", scope)


def _under(raw: dict[str, Any], start: str) -> list[tuple[str, Any]]:
    return [(name.removeprefix(start), value) for name, value in raw.items() if name.startswith(start)]


def _keys(names: Iterable[str]) -> frozenset[bytes]:
    return frozenset(bytes.fromhex(name) for name in names)
