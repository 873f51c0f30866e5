"""Parts: what a prompt is made of."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["DocumentRef", "Part", "PartKind", "Prompt", "Reason"]


class PartKind(StrEnum):
    """`prefix`: ahead of every segment and kept whole as a snapshot; `segment`: reusable anywhere; `live`: neither."""

    PREFIX = "prefix"
    SEGMENT = "segment"
    LIVE = "live"


class Reason(StrEnum):
    """Why tokens of a part were computed for this request."""

    REUSE_OFF = "reuse_off"
    REUSE_EXACT = "reuse_exact"
    FIRST_USE = "first_use"
    TOO_SHORT = "too_short"
    LAST_PART = "last_part"
    NOT_MARKED = "not_marked"
    CACHE_UNAVAILABLE = "cache_unavailable"
    CAPTURE_FAILED = "capture_failed"
    COMPUTED_ELSEWHERE = "computed_elsewhere"
    STATE_DROPPED = "state_dropped"
    NO_ROOM = "no_room"
    SUPERSEDED = "superseded"
    FETCH_SLOWER = "fetch_slower"
    HELD_ELSEWHERE = "held_elsewhere"
    NO_PREFILL_WORKER = "no_prefill_worker"
    STATE_NOT_LOADED = "state_not_loaded"
    REFRESHED = "refreshed"
    QUALITY_GUARD = "quality_guard"


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """A document with an id, and the digest of its title and text."""

    document_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A run of prompt tokens of one kind.

    `live_reason` says why a part that is no segment is computed. `ends_prefix` marks a place where a prefix
    snapshot may stand. `document_digest` is set with `document_id`; `content_hash` where it was computed ahead, else empty.
    """

    kind: PartKind
    token_ids: tuple[int, ...]
    live_reason: Reason | None = None
    document_id: str = ""
    document_digest: bytes = b""
    title: str = ""
    ends_prefix: bool = False
    content_hash: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Parts in prompt order; the last one is live and holds at least one token."""

    parts: tuple[Part, ...]

    @property
    def num_tokens(self) -> int:
        """Length in tokens."""
        return sum(part.num_tokens for part in self.parts)
