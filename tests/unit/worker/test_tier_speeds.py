"""Fetch or compute: what is measured decides, and a slow spell is not remembered for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.tiers.speeds import FetchPolicy, TierSpeed, TokenSpeed


def _policy(bytes_per_second: float = 1e6, tokens_per_second: float = 1000.0) -> FetchPolicy:
    policy = FetchPolicy()
    policy.engine.observe(1.0, round(tokens_per_second))
    policy.speed("disk").observe(0.001, 1.0, round(bytes_per_second))
    return policy


def test_what_is_unknown_is_fetched() -> None:
    assert FetchPolicy().choose({"disk": 1 << 40}, 1) == "disk"
    policy = FetchPolicy()
    policy.engine.observe(1.0, 10**6)
    assert policy.choose({"disk": 1 << 40}, 1) == "disk"


def test_the_quicker_wins() -> None:
    policy = _policy()
    assert policy.choose({"disk": 90_000}, 100) == "disk"
    assert policy.choose({"disk": 110_000}, 100) is None


def test_the_quickest_tier() -> None:
    policy = _policy()
    policy.speed("host").observe(0.0001, 1.0, 10**9)
    assert policy.choose({"disk": 50_000, "host": 50_000}, 100) == "host"
    assert policy.choose({"disk": 50_000}, 100) == "disk"


def test_a_refused_tier_is_tried_again() -> None:
    policy = _policy()
    choices = [policy.choose({"disk": 10**9}, 100) for _ in range(32)]
    assert choices.count("disk") == 2
    assert choices[0] is None


def test_the_price_of_a_pass_is_not_that_of_its_tokens() -> None:
    """Ten seconds a pass and a hundredth a token: tokens more add their own alone."""
    speed = TokenSpeed()
    for tokens in (100, 2000, 300, 150, 4000):
        speed.observe(10.0 + 0.01 * tokens, tokens)
    assert speed.estimate(1000) == pytest.approx(10.0)


def test_passes_of_one_length_are_taken_whole() -> None:
    speed = TokenSpeed()
    for tokens in (100, 101, 99, 100):
        speed.observe(1.0, tokens)
    assert speed.estimate(1000) == pytest.approx(10.0, rel=0.01)


def test_an_engine_that_gets_slower_is_noticed() -> None:
    speed = TokenSpeed()
    for factor in (1.0, 3.0):
        for number in range(100):
            tokens = 100 + 900 * (number % 2)
            speed.observe(factor * 0.001 * tokens, tokens)
    assert speed.estimate(1000) == pytest.approx(3.0, rel=0.05)


def test_noise_is_no_price() -> None:
    """Longer passes that happened to be quicker do not make tokens free."""
    speed = TokenSpeed()
    speed.observe(5.0, 10)
    speed.observe(1.0, 1000)
    assert speed.estimate(100) == pytest.approx(100 * 6 / 1010, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-6, 1), st.integers(1, 10**9)), min_size=1, max_size=20))
def test_averages_lie_between_what_was_seen(observed: list[tuple[float, float, int]]) -> None:
    speed = TierSpeed()
    for latency, seconds, num_bytes in observed:
        speed.observe(latency, seconds, num_bytes)
    rates = [num_bytes / seconds for _, seconds, num_bytes in observed]
    assert speed.latency_seconds is not None
    assert speed.bytes_per_second is not None
    assert min(one[0] for one in observed) - 1e-9 <= speed.latency_seconds <= max(one[0] for one in observed) + 1e-9
    assert 0.999 * min(rates) <= speed.bytes_per_second <= 1.001 * max(rates)


def test_what_ran_before_is_learnt() -> None:
    policy = FetchPolicy()
    policy.learn([(0.2, 100), (0.6, 500)], [(0.3, 1000)])
    assert policy.engine.estimate(100) == pytest.approx(0.1, rel=0.01)
    assert policy.captures.estimate(1000) == pytest.approx(0.3)
