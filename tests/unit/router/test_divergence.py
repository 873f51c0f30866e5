"""The bound never exceeds the true divergence, and is worth something."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.domain.divergence import compare, divergence_bound
from services.router.domain.shown_tokens import ShownToken


def likeliest(distribution: list[float], count: int) -> dict[bytes, float]:
    ranked = sorted(range(len(distribution)), key=lambda token: -distribution[token])[:count]
    return {token.to_bytes(2, "big"): distribution[token] for token in ranked}


def kl(full: list[float], composed: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(full, composed, strict=True) if p)


def draw(source: random.Random, size: int, sharpness: float) -> list[float]:
    weights = [math.exp(source.gauss(0, sharpness)) for _ in range(size)]
    return [weight / sum(weights) for weight in weights]


def token(content: bytes, *top: tuple[bytes, float]) -> ShownToken:
    return ShownToken(content, 0.0, tuple((each, math.log(share)) for each, share in top), 0)


@given(st.integers(0, 10_000), st.integers(2, 60), st.integers(1, 20), st.floats(0.1, 6.0), st.floats(0.0, 1.0))
def test_it_is_no_more_than_the_true_divergence(
    seed: int, size: int, count: int, sharpness: float, alike: float
) -> None:
    source = random.Random(seed)
    full, other = draw(source, size, sharpness), draw(source, size, sharpness)
    composed = [alike * p + (1 - alike) * q for p, q in zip(full, other, strict=True)]
    bound = divergence_bound(likeliest(full, count), likeliest(composed, count))
    assert -1e-9 <= bound <= kl(full, composed) + 1e-6


def test_where_every_token_is_told_it_is_the_divergence() -> None:
    source = random.Random(1)
    full, composed = draw(source, 12, 2.0), draw(source, 12, 2.0)
    assert divergence_bound(likeliest(full, 20), likeliest(composed, 20)) == pytest.approx(kl(full, composed))


def test_sets_that_share_no_token_are_far_apart() -> None:
    full, composed = [0.97 / 20] * 20 + [0.03 / 20] * 20, [0.03 / 20] * 20 + [0.97 / 20] * 20
    found = divergence_bound(likeliest(full, 20), likeliest(composed, 20))
    assert found > 2.0
    assert found <= kl(full, composed) + 1e-9


def test_one_distribution_is_not_far_from_itself() -> None:
    full = draw(random.Random(2), 50, 3.0)
    assert divergence_bound(likeliest(full, 20), likeliest(full, 20)) == pytest.approx(0.0, abs=1e-12)


def test_greedy_tokens_agree_up_to_the_first_that_differs() -> None:
    same = [token(b"a", (b"a", 0.9), (b"b", 0.1)), token(b"b"), token(b"c"), token(b"d")]
    found = compare(same, [*same[:2], token(b"x"), token(b"d")])
    assert found.agreement == 0.5
    assert found.divergence == pytest.approx(0.0, abs=1e-12)
    assert compare(same, same[:3]).agreement == 0.75
    assert compare(same, same).agreement == 1.0


def test_tokens_that_spell_the_same_count_together() -> None:
    one, other = token(b"a", (b"a", 0.5), (b"a", 0.25), (b"b", 0.25)), token(b"a", (b"a", 0.75), (b"b", 0.25))
    assert compare([one], [other]).divergence == pytest.approx(0.0, abs=1e-12)


def test_nothing_is_compared_with_nothing() -> None:
    with pytest.raises(ValueError, match="no token"):
        compare([], [token(b"a")])
