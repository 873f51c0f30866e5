"""Pages, slots and the state store: counted in pairs, written once, contiguous where possible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.pages import NoRoomError, PageAllocator, SlotAllocator, pages_for
from services.worker.engine.states import PrefixState, SegmentState, StateStore, StoreEviction
from services.worker.mixers.batch import LinearPlane, LinearSnapshot
from services.worker.ops.paged_attention import PageRow


def _segment(pages: tuple[int, ...], token_ids: tuple[int, ...] = (1, 2, 3)) -> SegmentState:
    plane = LinearPlane(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), torch.zeros(3, 4), torch.ones(1))
    return SegmentState(token_ids, 1, (plane,), pages)


def _prefix(pages: tuple[int, ...]) -> PrefixState:
    snapshot = LinearSnapshot(torch.zeros(1, 2, 3), torch.zeros(3, 4))
    return PrefixState((1, 2), (snapshot,), tuple(PageRow(page, 0, 0, 2) for page in pages))


def test_pages_for() -> None:
    assert [pages_for(tokens, 16) for tokens in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_pages_come_contiguous_when_the_pool_allows() -> None:
    pages = PageAllocator(10, 16)
    held = pages.allocate(3)
    gap = pages.allocate(2)
    pages.allocate(1)
    pages.release(gap)
    assert held == (0, 1, 2)
    assert pages.allocate(3) == (6, 7, 8)
    assert pages.allocate(3) == (3, 4, 9)
    with pytest.raises(NoRoomError):
        pages.allocate(1)
    assert pages.allocate(0) == ()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 6)), max_size=40))
def test_pages_add_up(actions: list[tuple[str, int]]) -> None:
    pages = PageAllocator(12, 16)
    held: list[tuple[int, ...]] = []
    for action, number in actions:
        if action == "allocate":
            try:
                held.append(pages.allocate(number))
            except NoRoomError:
                assert number > pages.num_free
        elif held:
            chosen = held[number % len(held)]
            if action == "retain":
                pages.retain(chosen)
                held.append(chosen)
            else:
                held.remove(chosen)
                pages.release(chosen)
        pages.check_integrity(held)
        assert pages.num_free == 12 - len({page for one in held for page in one})


def test_the_integrity_check_sees_a_lost_reference() -> None:
    pages = PageAllocator(4, 16)
    held = pages.allocate(2)
    with pytest.raises(AssertionError):
        pages.check_integrity([])
    with pytest.raises(AssertionError):
        pages.check_integrity([held, held])


def test_a_page_released_too_often_is_an_error() -> None:
    pages = PageAllocator(4, 16)
    held = pages.allocate(1)
    pages.release(held)
    with pytest.raises(KeyError):
        pages.release(held)
    with pytest.raises(KeyError):
        pages.retain(held)


def test_slots() -> None:
    slots = SlotAllocator(2)
    taken = {slots.allocate(), slots.allocate()}
    assert taken == {0, 1}
    with pytest.raises(NoRoomError):
        slots.allocate()
    slots.release(1)
    with pytest.raises(ValueError, match="free already"):
        slots.release(1)
    assert slots.num_free == 1


def test_an_entry_is_written_once() -> None:
    """The second writer learns it, keeps its pages, and readers keep the first one's bytes."""
    pages = PageAllocator(8, 16)
    store = StateStore(pages, 1 << 20, 64)
    first, second = _segment(pages.allocate(2)), _segment(pages.allocate(2))
    store.put(b"k", first)
    with pytest.raises(ValueError, match="already"):
        store.put(b"k", second)
    assert store.get(b"k") is first
    pages.check_integrity([first.pages, second.pages])
    store.check_integrity()
    assert store.drop(b"k")
    assert not store.drop(b"k")
    pages.check_integrity([second.pages])
    assert store.used_bytes == 0


def test_a_full_store_evicts_what_was_used_longest_ago() -> None:
    pages = PageAllocator(8, 16)
    states = [_segment(pages.allocate(2)) for _ in range(3)]
    store = StateStore(pages, 2 * states[0].plane_bytes, 64)
    store.put(b"a", states[0])
    store.put(b"b", states[1])
    assert store.get_segment(b"a", states[0].token_ids) is states[0]
    store.put(b"c", states[2])
    assert (b"a" in store, b"b" in store, b"c" in store) == (True, False, True)
    assert store.evictions == {StoreEviction.PAGES: 0, StoreEviction.PLANES: 1}
    assert store.used_bytes == 2 * (states[0].plane_bytes + 2 * 64)
    store.check_integrity()


def test_a_state_larger_than_the_store_changes_nothing() -> None:
    pages = PageAllocator(8, 16)
    state = _segment(pages.allocate(2))
    store = StateStore(pages, state.plane_bytes - 1, 64)
    with pytest.raises(NoRoomError):
        store.put(b"a", state)
    assert store.used_bytes == 0


def test_room_is_made_only_where_it_helps() -> None:
    """States that are protected, or whose pages a prompt shares, stay; and so does everything when it is not enough."""
    pages = PageAllocator(8, 16)
    store = StateStore(pages, 1 << 20, 64)
    for name in (b"a", b"b", b"c", b"d"):
        store.put(name, _segment(pages.allocate(2)))
    shared = store.get(b"a")
    assert shared is not None
    pages.retain(shared.pages)
    assert not store.make_room(5, protected={b"b"})
    assert all(name in store for name in (b"a", b"b", b"c", b"d"))
    assert store.make_room(3, protected={b"b"})
    assert [name in store for name in (b"a", b"b", b"c", b"d")] == [True, True, False, False]
    assert pages.num_free == 4
    assert store.evictions == {StoreEviction.PAGES: 2, StoreEviction.PLANES: 0}
    assert store.make_room(4)


def test_states_that_share_pages_make_room_together() -> None:
    """Snapshots of one conversation share its first pages: these are free once the last of them has gone."""
    pages = PageAllocator(6, 16)
    store = StateStore(pages, 1 << 20, 64)
    first, second = pages.allocate(2), pages.allocate(1)
    pages.retain(first)
    store.put(b"turn 1", _prefix(first))
    store.put(b"turn 2", _prefix(first + second))
    store.put(b"other", _segment(pages.allocate(1)))
    assert not store.make_room(6, protected={b"turn 2"})
    assert store.make_room(5)
    assert [name in store for name in (b"turn 1", b"turn 2", b"other")] == [False, False, True]
    assert pages.num_free == 5
    store.check_integrity()


def test_a_state_whose_eviction_frees_nothing_stays() -> None:
    pages = PageAllocator(6, 16)
    store = StateStore(pages, 1 << 20, 64)
    first, second = pages.allocate(2), pages.allocate(1)
    pages.retain(first)
    store.put(b"turn 1", _prefix(first))
    store.put(b"turn 2", _prefix(first + second))
    store.put(b"other", _segment(pages.allocate(1)))
    assert store.make_room(3, protected={b"turn 2"})
    assert [name in store for name in (b"turn 1", b"turn 2", b"other")] == [True, True, False]


def test_states_are_found_by_key_kind_and_tokens() -> None:
    pages = PageAllocator(8, 16)
    store = StateStore(pages, 1 << 20, 64)
    store.put(b"s", _segment(pages.allocate(1)))
    store.put(b"p", _prefix(pages.allocate(1)))
    assert store.get_segment(b"s", [1, 2, 3]) is store.get(b"s")
    assert store.get_prefix(b"p", [1, 2]) is store.get(b"p")
    for found in (
        store.get_segment(b"s", [1, 2, 4]),
        store.get_segment(b"s", [1, 2]),
        store.get_segment(b"p", [1, 2]),
        store.get_prefix(b"s", [1, 2, 3]),
        store.get_prefix(b"p", [1]),
        store.get_segment(b"x", [1, 2, 3]),
    ):
        assert found is None
