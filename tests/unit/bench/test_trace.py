"""The caches of the mixed trace, against caches that are searched from end to end."""

from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.mixed import spread
from bench.gpu.trace import LruCache, Trace, chain_hits, document_hits, draw_trace

_SIZES = st.lists(st.integers(1, 9), min_size=6, max_size=6)
_REQUESTS = st.lists(st.permutations(range(6)).map(lambda order: tuple(order[:3])), max_size=30)


class SlowCache:
    """Keeps every use there ever was, and finds what is held by going back through them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[tuple[Hashable, int]] = []

    def use(self, key: Hashable, size: int) -> None:
        is_held = any(key == other for other, _ in self.held)
        if not is_held and size > self.capacity:
            return
        self.held = [(other, own) for other, own in self.held if other != key] + [(key, size)]
        while sum(own for _, own in self.held) > self.capacity:
            del self.held[0]

    def held_keys(self) -> list[Hashable]:
        return [key for key, _ in self.held]


@given(st.lists(st.integers(0, 5), max_size=40), _SIZES, st.integers(0, 30))
def test_a_cache_holds_what_a_slow_one_holds(uses: Sequence[int], sizes: Sequence[int], capacity: int) -> None:
    cache, slow = LruCache(capacity), SlowCache(capacity)
    for key in uses:
        cache.use(key, sizes[key])
        slow.use(key, sizes[key])
        assert list(cache) == slow.held_keys()
        assert cache.used == sum(sizes[held] for held in range(6) if held in cache) <= capacity


@given(_REQUESTS, _SIZES, st.integers(0, 60))
def test_documents_are_held_wherever_they_stand(
    requests: Sequence[tuple[int, ...]], sizes: Sequence[int], capacity: int
) -> None:
    slow, expected = SlowCache(capacity), []
    for request in requests:
        held = frozenset(set(request) & set(slow.held_keys()))
        expected.append(held)
        for document in [*(one for one in request if one in held), *(one for one in request if one not in held)]:
            slow.use(document, sizes[document])
    assert document_hits(Trace(tuple(sizes), tuple(requests)), sizes, capacity) == expected


@given(_REQUESTS, _SIZES, st.integers(0, 60))
def test_beginnings_are_held_from_the_first_document_on(
    requests: Sequence[tuple[int, ...]], sizes: Sequence[int], capacity: int
) -> None:
    slow, expected = SlowCache(capacity), []
    for request in requests:
        expected.append(max((end for end in (1, 2, 3) if request[:end] in slow.held_keys()), default=0))
        for end in (3, 2, 1):
            slow.use(request[:end], sizes[request[end - 1]])
    assert chain_hits(Trace(tuple(sizes), tuple(requests)), sizes, capacity) == expected


@given(_REQUESTS, _SIZES, st.integers(0, 60), st.integers(0, 60))
def test_a_larger_cache_holds_what_a_smaller_one_holds(
    requests: Sequence[tuple[int, ...]], sizes: Sequence[int], capacity: int, more: int
) -> None:
    equal = [1] * len(sizes)
    trace = Trace(tuple(sizes), tuple(requests))
    small, large = document_hits(trace, equal, capacity), document_hits(trace, equal, capacity + more)
    assert all(near <= held for near, held in zip(small, large, strict=True))


def test_a_trace_has_distinct_documents_and_favours_the_first() -> None:
    trace = draw_trace(50, (10, 20), 4, 500, seed=3)
    assert trace == draw_trace(50, (10, 20), 4, 500, seed=3)
    assert len(trace.lengths) == 50
    assert set(trace.lengths) <= set(range(10, 21))
    assert all(len(set(request)) == 4 for request in trace.requests)
    uses = [sum(document in request for request in trace.requests) for document in range(50)]
    assert uses[0] == max(uses) > 5 * uses[-1]


def test_a_sample_is_spread_over_the_amounts() -> None:
    amounts = [7, 0, 3, 9, 1, 5, 2, 8, 4, 6]
    assert [amounts[index] for index in spread(amounts, 5)] == [1, 3, 5, 7, 9]
    assert len(spread(amounts, 3)) == 3
