"""The eviction policy against an oracle that tries every prefix of the order of use."""

from hypothesis import given
from hypothesis import strategies as st

from services.cache.domain.eviction import Candidate, choose_victims

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        key=st.binary(min_size=1, max_size=2),
        held_bytes=st.integers(1, 50),
        used_at=st.sampled_from([1.0, 2.0, 3.0]),
    ),
    max_size=8,
    unique_by=lambda candidate: candidate.key,
)


@given(CANDIDATES, st.integers(-10, 200))
def test_victims_are_the_shortest_oldest_run_that_frees_enough(candidates: list[Candidate], needed: int) -> None:
    ordered = sorted(candidates, key=lambda one: (one.used_at, one.key))
    enough = [
        count for count in range(len(ordered) + 1) if sum(one.held_bytes for one in ordered[:count]) >= max(needed, 0)
    ]
    expected = tuple(one.key for one in ordered[: enough[0]]) if enough else None
    assert choose_victims(candidates, needed) == expected
