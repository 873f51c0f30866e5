"""What a prompt asks the directory for: its prefixes as chains, its segments by their content."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from services.common.content import HASH_BYTES, chain_hash
from services.router.domain.parts import DocumentRef, Part, PartKind, Prompt
from services.router.domain.request import Reuse

__all__ = ["CacheEntry", "EntryKind", "documents_of", "prefix_entries"]

# Each boundary costs a look-up, and a snapshot when it is cold.
_MAX_PREFIX_ENTRIES = 8
# How a part of a chain was served. A part's content hash names the profile.
_EXACT = "exact"
_COMPOSED = "composed"


class EntryKind(StrEnum):
    """What the directory is asked for."""

    SEGMENT = "segment"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One look-up. `after_part` is set for prefixes: the number of parts that the snapshot covers.

    `documents` are all with an id whose text stands in it: it falls with any of them. `is_composed`: a segment stands in it that
    was composed.
    """

    kind: EntryKind
    content_hash: bytes
    num_tokens: int
    documents: tuple[DocumentRef, ...] = ()
    after_part: int = 0
    is_composed: bool = False


def prefix_entries(prompt: Prompt, hashes: list[bytes], min_tokens: int, reuse: Reuse) -> tuple[CacheEntry, ...]:
    """Places where a snapshot may stand. Behind a segment that is composed the chain says so, and is offered to `compose` alone.

    There the newest message's end is left out: its documents and question seldom come again together, and the turn that
    follows marks it, as an end in its history.
    """
    if reuse is Reuse.OFF:
        return ()
    ends = [index for index, part in enumerate(prompt.parts[:-1]) if part.ends_prefix]
    entries: list[CacheEntry] = []
    chain = bytes(HASH_BYTES)
    num_tokens = 0
    is_composed = False
    for index, (part, content) in enumerate(zip(prompt.parts[:-1], hashes, strict=False)):
        is_composed_part = reuse is Reuse.COMPOSE and part.kind is PartKind.SEGMENT
        is_composed = is_composed or is_composed_part
        chain = chain_hash(chain, content, _COMPOSED if is_composed_part else _EXACT)
        num_tokens += part.num_tokens
        is_newest = is_composed and index == ends[-1] if ends else False
        if part.ends_prefix and num_tokens >= min_tokens and not is_newest:
            documents = documents_of(prompt.parts[: index + 1])
            entries.append(CacheEntry(EntryKind.PREFIX, chain, num_tokens, documents, index + 1, is_composed))
    # The first end is the deployment's system prompt, the last ones are the conversation's newest turns.
    kept = entries[:1] + entries[1:][-(_MAX_PREFIX_ENTRIES - 1) :]
    return tuple(reversed(kept))


def documents_of(parts: Iterable[Part]) -> tuple[DocumentRef, ...]:
    """Each document once, in prompt order."""
    named = (part for part in parts if part.document_id)
    return tuple(dict.fromkeys(DocumentRef(part.document_id, part.document_digest) for part in named))
