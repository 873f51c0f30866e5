"""The eviction policies: scores by hand, victims against an oracle that looks at everything again for each of them."""

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.cache.domain.eviction import (
    POLICIES,
    Candidate,
    Need,
    TenantRoom,
    Use,
    choose_victims,
    share_of_each,
)

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        key=st.binary(min_size=2, max_size=2),
        held_bytes=st.integers(1, 50),
        score=st.sampled_from([1.0, 2.0, 3.0]),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.key,
)
ROOMS = st.dictionaries(
    st.sampled_from(["t1", "t2", "t3"]),
    st.tuples(CANDIDATES, st.integers(0, 60), st.booleans()).map(
        lambda drawn: TenantRoom(
            used_bytes=sum(one.held_bytes for one in drawn[0]) + drawn[1],
            has_share=drawn[2],
            candidates=tuple(sorted(drawn[0], key=lambda one: (one.score, one.key))),
        )
    ),
)
NEEDS = st.builds(
    Need, tenant=st.sampled_from(["t1", "t2"]), own_bytes=st.integers(-20, 80), any_bytes=st.integers(-20, 150)
)


def slow_victims(need: Need, tenants: Mapping[str, TenantRoom], share: float) -> tuple[Candidate, ...] | None:
    """One victim after the other, each from a look at all that is left."""
    gone: list[Candidate] = []

    def lowest(name: str) -> Candidate | None:
        left = [one for one in tenants[name].candidates if one not in gone]
        return min(left, key=lambda one: (one.score, one.key), default=None)

    def left_bytes(name: str) -> int:
        return tenants[name].used_bytes - sum(one.held_bytes for one in tenants[name].candidates if one in gone)

    def allowed(name: str) -> Candidate | None:
        candidate = lowest(name)
        if candidate is None or name == need.tenant or not tenants[name].has_share:
            return candidate
        return candidate if left_bytes(name) - candidate.held_bytes >= share else None

    while sum(one.held_bytes for one in gone) < need.own_bytes:
        own = lowest(need.tenant) if need.tenant in tenants else None
        if own is None:
            return None
        gone.append(own)
    while sum(one.held_bytes for one in gone) < need.any_bytes:
        found = [one for one in map(allowed, tenants) if one is not None]
        if not found:
            return None
        gone.append(min(found, key=lambda one: (one.score, one.key)))
    return tuple(gone)


def distinct_keys(rooms: Mapping[str, TenantRoom]) -> dict[str, TenantRoom]:
    """Keys are unique in a directory: those of each tenant begin with its name."""
    return {
        name: TenantRoom(
            room.used_bytes,
            room.has_share,
            tuple(Candidate(name.encode() + one.key, one.held_bytes, one.score) for one in room.candidates),
        )
        for name, room in rooms.items()
    }


@given(NEEDS, ROOMS, st.floats(0, 200))
def test_victims_are_those_of_the_oracle(need: Need, rooms: Mapping[str, TenantRoom], share: float) -> None:
    rooms = distinct_keys(rooms)
    assert choose_victims(need, rooms, share) == slow_victims(need, rooms, share)


@given(NEEDS, ROOMS, st.floats(0, 200))
def test_nobody_is_brought_below_its_share_by_another(
    need: Need, rooms: Mapping[str, TenantRoom], share: float
) -> None:
    rooms = distinct_keys(rooms)
    victims = choose_victims(need, rooms, share) or ()
    for name, room in rooms.items():
        taken = sum(one.held_bytes for one in victims if one in room.candidates)
        if name != need.tenant and room.has_share and taken:
            assert room.used_bytes - taken >= share
    assert len(set(victims)) == len(victims)


@given(NEEDS, ROOMS)
def test_without_shares_and_bounds_the_lowest_scores_of_all_leave(need: Need, rooms: Mapping[str, TenantRoom]) -> None:
    rooms = {name: TenantRoom(room.used_bytes, False, room.candidates) for name, room in distinct_keys(rooms).items()}
    need = Need(need.tenant, 0, need.any_bytes)
    ordered = sorted((one for room in rooms.values() for one in room.candidates), key=lambda one: (one.score, one.key))
    enough = [
        count
        for count in range(len(ordered) + 1)
        if sum(one.held_bytes for one in ordered[:count]) >= max(need.any_bytes, 0)
    ]
    assert choose_victims(need, rooms, 0.0) == (tuple(ordered[: enough[0]]) if enough else None)


@pytest.mark.parametrize("policy", list(POLICIES))
@given(uses=st.integers(1, 1000), tokens=st.integers(1, 10**6), size=st.integers(1, 10**12), clock=st.floats(0, 1e6))
@example(uses=1, tokens=1, size=1, clock=0.0)
def test_a_further_use_never_lowers_a_score(policy: str, uses: int, tokens: int, size: int, clock: float) -> None:
    score = POLICIES[policy]
    before = score(Use(uses, tokens, size, 10.0, clock))
    assert score(Use(uses + 1, tokens, size, 11.0, clock)) >= before
    assert score(Use(uses + 1, tokens, size, 11.0, clock + 1)) >= before


def test_scores_by_hand() -> None:
    use = Use(uses=3, num_tokens=500, size_bytes=1000, now=77.0, clock=2.0)
    assert POLICIES["lru"](use) == 77.0
    assert POLICIES["lfu"](use) == 5.0
    assert POLICIES["gdsf"](use) == 3.5


@pytest.mark.parametrize(("tenants", "share"), [(0, 900.0), (1, 900.0), (3, 300.0)])
def test_shares_are_equal_parts_of_the_budget(tenants: int, share: float) -> None:
    assert share_of_each(900, tenants) == share
