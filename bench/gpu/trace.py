"""A mixed trace of requests over documents, and which of them a cache holds: no device, no clock."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["LruCache", "Trace", "chain_hits", "document_hits", "draw_trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """lengths: tokens of every document; requests: their documents, in the order of the prompt."""

    lengths: tuple[int, ...]
    requests: tuple[tuple[int, ...], ...]


def draw_trace(documents: int, lengths: tuple[int, int], distinct: int, requests: int, seed: int) -> Trace:
    """Lengths spread evenly over a range, both ends in it; documents by Zipf's law with exponent 1, none twice a request."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(lengths[0], lengths[1], documents, endpoint=True)
    popularity = 1.0 / np.arange(1, documents + 1)
    popularity /= popularity.sum()
    chosen = [generator.choice(documents, distinct, replace=False, p=popularity) for _ in range(requests)]
    return Trace(tuple(drawn.tolist()), tuple(tuple(request.tolist()) for request in chosen))


class LruCache:
    """Keys with sizes, the least recently used evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()
        self._used = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Hashable]:
        """From the least recently used on."""
        return iter(self._sizes)

    @property
    def used(self) -> int:
        """Sizes of all keys together."""
        return self._used

    def use(self, key: Hashable, size: int) -> None:
        """Make a key the most recent; one that is new and larger than the cache is not kept."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
        elif size <= self._capacity:
            self._sizes[key] = size
            self._used += size
            while self._used > self._capacity:
                self._used -= self._sizes.popitem(last=False)[1]


def document_hits(trace: Trace, sizes: Sequence[int], capacity: int) -> list[frozenset[int]]:
    """For every request the documents that are held when it comes, of a cache of documents wherever they stand."""
    cache, hits = LruCache(capacity), []
    for request in trace.requests:
        hits.append(frozenset(document for document in request if document in cache))
        # Hits first: what is new must not push out what this request is about to use.
        for document in sorted(request, key=lambda document: document not in hits[-1]):
            cache.use(document, sizes[document])
    return hits


def chain_hits(trace: Trace, sizes: Sequence[int], capacity: int) -> list[int]:
    """For every request how many leading documents are held, of a cache of prompt beginnings; a document's size is its link's."""
    cache, hits = LruCache(capacity), []
    for request in trace.requests:
        chains = [request[: end + 1] for end in range(len(request))]
        hits.append(max((len(chain) for chain in chains if chain in cache), default=0))
        # The whole before its beginnings, so that an end is evicted before what it stands on.
        for chain in reversed(chains):
            cache.use(chain, sizes[chain[-1]])
    return hits
