"""Which absent parts are captured when they are asked for."""

from services.cache.domain.values import EntryKind

__all__ = ["MAX_SIGHTINGS", "is_admitted"]

# Keys whose sightings a directory remembers; those seen longest ago are forgotten first.
MAX_SIGHTINGS = 100_000


def is_admitted(kind: EntryKind, sightings: int, min_uses: int) -> bool:
    """Whether an absent part that was planned so often, this time counted, is to be captured.

    Prefix snapshots always are: the pass that computes the prompt leaves them behind.
    """
    return kind is EntryKind.PREFIX or sightings >= min_uses
