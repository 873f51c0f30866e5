"""Parts of client text that has been seen before: documents come again and again, and with them all that their text decides."""

import sys
import threading
from collections import OrderedDict

from services.router.domain.parts import Part
from services.router.domain.request import Content, Document

__all__ = ["KnownParts"]

# What an entry costs besides its texts and ids: content and part, their headers, a node of the table.
_ENTRY_OVERHEAD_BYTES = 512
# An id in a tuple, where the tokenizer makes one object for each id of its vocabulary.
_ID_BYTES = 8
# Shorter texts are tokenized about as fast as they are looked up.
_SHORTEST_KNOWN = 32


class KnownParts:
    """Least recently used parts by the content that they come from, bounded in bytes. Safe to call from several threads.

    Content is compared, not its digest. Where a breakpoint stands is no matter of a document's part.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._parts: OrderedDict[Content, Part] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes held, overhead included."""
        return self._used_bytes

    def __contains__(self, content: Content) -> bool:
        """Whether `get` would find this content's part, which stays as old as it is."""
        with self._lock:
            return content in self._parts

    def get(self, content: Content) -> Part | None:
        """The part of this content, or None."""
        with self._lock:
            part = self._parts.get(content)
            if part is not None:
                self._parts.move_to_end(content)
            return part

    def put(self, content: Content, part: Part) -> None:
        """Remember a part; the oldest make room, and what is short, or exceeds the capacity alone, is not kept."""
        size = _entry_bytes(content, part)
        if len(content.text) < _SHORTEST_KNOWN or size > self._capacity_bytes:
            return
        with self._lock:
            if content in self._parts:
                return
            while self._used_bytes + size > self._capacity_bytes:
                self._used_bytes -= _entry_bytes(*self._parts.popitem(last=False))
            self._parts[content] = part
            self._used_bytes += size


def _entry_bytes(content: Content, part: Part) -> int:
    size = _ENTRY_OVERHEAD_BYTES + sys.getsizeof(content.text) + _ID_BYTES * len(part.token_ids)
    if isinstance(content, Document):
        size += sys.getsizeof(content.title) + sys.getsizeof(content.document_id)
    return size
