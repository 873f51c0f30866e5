"""Reads the whole directory out of Redis, for integrity checks. The layout is described in `lua/prelude.lua`."""

import json
from collections.abc import Iterable, Mapping
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
        entries={bytes.fromhex(key): _entry(hashes, key) for key in hashes.get("entries", {})},
        tickets={ticket_id: _ticket(hashes["owned"][ticket_id]) for ticket_id in raw.get("tickets", ())},
        ticket_of={bytes.fromhex(key): ticket_id for key, ticket_id in hashes.get("ticket_of", {}).items()},
        leases={
            name: LeaseState(
                _keys(
                    key for key, birth in hashes.get(f"lease_keys:{name}", {}).items() if birth == _birth(hashes, key)
                ),
                frozenset(raw.get(f"lease_tickets:{name}", ())),
            )
            for name in raw.get("leases", ())
        },
        idle={tenant: _keys(order) for tenant, order in _under(raw, "idle:")},
        pinned=frozenset(raw.get("pinned", ())),
        ages={bytes.fromhex(key): int(fence) for key, fence in raw.get("born", {}).items()},
        held={name: _keys(raw.get(f"held:{name}", ())) for name in raw.get("workers", ())},
        marked={name: _keys(raw.get(f"marked:{name}", ())) for name in raw.get("workers", ())},
        scopes_of={bytes.fromhex(key): frozenset(scopes.split()) for key, scopes in hashes.get("scopes", {}).items()},
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
            scope: RecordState(
                fields["tenant"], frozenset(hashes["current"][scope].split()[1:]), int(fields["version"])
            )
            for scope, fields in _under(raw, "record:")
        },
        records_of={scope: frozenset(found) for scope, found in _under(raw, "records:")},
    )


def _birth(hashes: Mapping[str, Mapping[str, str]], key: str) -> str:
    return hashes.get("entries", {}).get(key, "").partition(" ")[0]


def _entry(hashes: Mapping[str, Mapping[str, str]], key: str) -> EntryState:
    birth, _, size_bytes, tenant, kind, fence, _, _, _, num_leases, holders = hashes["entries"][key].split(" ", 10)
    leases = {name.removeprefix("lease_keys:"): keys for name, keys in hashes.items() if name.startswith("lease_keys:")}
    return EntryState(
        size_bytes=int(size_bytes),
        tenant=tenant,
        fence=int(fence),
        holders=frozenset(json.loads(holders)),
        leases=frozenset(name for name, keys in leases.items() if keys.get(key) == birth),
        num_leases=int(num_leases),
        kind=EntryKind(kind),
    )


def _ticket(owned: str) -> TicketState:
    key, _, _, fence, lease_id, *dead = owned.split()
    return TicketState(bytes.fromhex(key), int(fence), lease_id, dead=bool(dead))


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
