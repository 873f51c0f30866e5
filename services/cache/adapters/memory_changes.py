"""Changes of the in-memory directory that outlive it: how each is made, and what all of them amount to."""

from collections.abc import Sequence

from services.cache.adapters.memory_state import Tables
from services.cache.domain.changes import Change, Floor, Invalidated, Linked, Pinned, Registered, Unpinned
from services.cache.domain.values import Removal

__all__ = ["apply", "everything"]


def apply(tables: Tables, change: Change) -> Removal:
    """Make a change; what it took away. Made anew in their order on empty tables, changes lead to the same."""
    removal = _apply(tables, change)
    tables.past.trim()
    return removal


def _apply(tables: Tables, change: Change) -> Removal:
    match change:
        case Invalidated(scope, epoch):
            tables.raise_sequence(epoch)
            tables.pinned.discard(scope)
            return tables.remove_scope(scope, epoch)
        case Registered(order):
            version = order.record.version
            tables.raise_sequence(version)
            removal = tables.remove_scope(order.scope, version)
            tables.documents.put(order)
            # The registration tells the epoch now.
            tables.past.drop(order.scope)
            return removal
        case Linked(key, scope, sequence):
            tables.raise_sequence(sequence)
            tables.past.link(key, scope, sequence)
        case Pinned(scope):
            tables.pinned.add(scope)
        case Unpinned(scope):
            tables.pinned.discard(scope)
        case Floor(sequence):
            tables.raise_sequence(sequence)
            tables.past.raise_floor(sequence)
    return Removal()


def everything(tables: Tables) -> Sequence[Change]:
    """Few changes that lead to what these tables remember beyond entries."""
    return [
        *tables.past.changes(),
        *(Registered(order) for order in tables.documents.orders.values()),
        *map(Pinned, sorted(tables.pinned)),
    ]
