"""How much the pins of the in-memory directory may keep; `lua/pin.lua` counts the same in Redis."""

from collections.abc import Set

from services.cache.adapters.memory_state import Tables
from services.cache.domain.values import EntryKind

__all__ = ["promised_bytes"]


def promised_bytes(tables: Tables, scopes: Set[str]) -> int:
    """What pins of these scopes may keep: the budgets of tenants, and what is stored now of other documents."""
    tenants = {scope for scope in scopes if scope.startswith("tenant:")}
    keys = {key for scope in scopes - tenants for key in tables.keys_of_scope.get(scope, ())}
    entries = [tables.entries[key] for key in keys & tables.entries.keys()]
    return sum(map(tables.room.budget_of, tenants)) + sum(
        entry.size_bytes * len(entry.tiers)
        for entry in entries
        if entry.kind is EntryKind.SEGMENT and entry.tenant not in tenants
    )
