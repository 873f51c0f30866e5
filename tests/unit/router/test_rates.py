"""Token buckets against a count of every grain, and the promise that they give."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from services.router.domain.rates import Bucket, refill, seconds_until, spend

ARRIVALS = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=60)
PER_MINUTE = st.integers(1, 120)


def admitted(arrivals: list[tuple[int, int]], per_minute: int) -> list[bool]:
    """Arrivals are pauses in tenths of a second, and amounts."""
    bucket: Bucket | None = None
    now, seen = 0.0, []
    for pause, amount in arrivals:
        now += pause / 10
        bucket = refill(bucket, per_minute, now)
        seen.append(seconds_until(bucket, per_minute, amount) < 1e-6)
        if seen[-1]:
            bucket = spend(bucket, amount)
    return seen


def brute_force(arrivals: list[tuple[int, int]], per_minute: int) -> list[bool]:
    """In steps of a tenth of a second, exactly."""
    level, seen = Fraction(per_minute), []
    for pause, amount in arrivals:
        for _ in range(pause):
            level = min(Fraction(per_minute), level + Fraction(per_minute, 600))
        seen.append(level >= min(amount, per_minute))
        if seen[-1]:
            level -= amount
    return seen


@given(ARRIVALS, PER_MINUTE)
def test_it_lets_in_what_a_count_of_grains_does(arrivals: list[tuple[int, int]], per_minute: int) -> None:
    assert admitted(arrivals, per_minute) == brute_force(arrivals, per_minute)


@given(ARRIVALS, PER_MINUTE)
def test_no_span_holds_more_than_promised(arrivals: list[tuple[int, int]], per_minute: int) -> None:
    """Of amounts that a full bucket holds."""
    arrivals = [(pause, min(amount, per_minute)) for pause, amount in arrivals]
    times = [sum(pause for pause, _ in arrivals[: index + 1]) / 10 for index in range(len(arrivals))]
    taken = [amount * seen for (_, amount), seen in zip(arrivals, admitted(arrivals, per_minute), strict=True)]
    for first in range(len(arrivals)):
        for last in range(first, len(arrivals)):
            seconds = times[last] - times[first]
            assert sum(taken[first : last + 1]) <= per_minute * (1 + seconds / 60) + 1e-6


@given(st.floats(-500, 100), PER_MINUTE, st.integers(1, 40))
def test_the_wait_that_is_told_is_enough_and_no_longer(level: float, per_minute: int, amount: int) -> None:
    bucket = refill(Bucket(min(level, per_minute), 10.0), per_minute, 10.0)
    wait = seconds_until(bucket, per_minute, amount)
    assert seconds_until(refill(bucket, per_minute, 10.0 + wait), per_minute, amount) < 1e-6
    if wait > 1:
        assert seconds_until(refill(bucket, per_minute, 9.0 + wait), per_minute, amount) > 0


def test_a_lowered_bound_counts_at_once_and_no_clock_runs_backwards() -> None:
    full = refill(None, 100, 5.0)
    assert refill(full, 10, 5.0).level == 10
    assert refill(spend(full, 50), 100, 1.0).level == 50
