"""Sampling: greedy, filters against a brute-force distribution, seeds, and temperatures at the edge."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.requests import GenerateRequest
from services.worker.engine.sampling import Sampler, SamplingOptions, find_likeliest
from tests.unit.worker.engine_rig import EngineRig, Heard, live

LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 0.5, 2.0])


def _draws(options: SamplingOptions, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = Sampler(options)
    return [sampler.draw(logits, find_likeliest(logits[None])[0]) for _ in range(count)]


def _expected(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The distribution by definition: the k likeliest, of these the smallest set that reaches top_p, renormalised."""
    weights = torch.tensor(logits, dtype=torch.float64).div(temperature).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[: top_k or len(weights)]
    total = sum(weights[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if sum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / total
    mass = sum(kept.values())
    return {token: weight / mass for token, weight in kept.items()}


def test_greedy_takes_the_likeliest() -> None:
    assert _draws(SamplingOptions(1), 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 0, 0.7),
        (1.5, 4, 0.8),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
        (1.0, 99, 1.0),
    ],
)
def test_frequencies_follow_the_definition(temperature: float, top_k: int, top_p: float) -> None:
    expected = _expected(LOGITS.tolist(), temperature, top_k, top_p)
    count = 3000
    drawn = Counter(_draws(SamplingOptions(1, temperature, top_p, top_k, seed=1), count))
    assert set(drawn) <= set(expected)
    for token, weight in expected.items():
        assert abs(drawn[token] / count - weight) < 4 * (weight * (1 - weight) / count) ** 0.5 + 1e-9


@given(
    logits=st.lists(st.integers(-800, 800), min_size=2, max_size=12, unique=True),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**62),
)
def test_nothing_outside_the_filters_is_drawn(
    logits: list[int], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    values = [value / 100 for value in logits]
    allowed = _expected(values, temperature, top_k, min(1.0, top_p + 1e-5))
    options = SamplingOptions(1, temperature, top_p, top_k, seed)
    assert set(_draws(options, 20, torch.tensor(values))) <= set(allowed)


def test_a_seed_repeats_and_another_differs() -> None:
    options = SamplingOptions(1, 1.0, seed=5)
    assert _draws(options, 50) == _draws(options, 50)
    assert _draws(options, 50) != _draws(SamplingOptions(1, 1.0, seed=6), 50)
    assert _draws(SamplingOptions(1, 1.0), 50) != _draws(SamplingOptions(1, 1.0), 50)


def test_a_point_at_the_end_is_the_last_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounding makes the random point the whole sum, and tokens without weight stand behind."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.ones(1, dtype=torch.float64))
    logits = torch.tensor([0.0, 1.0, 0.5, -50.0, -50.0])
    sampler = Sampler(SamplingOptions(1, 1.0, min_p=0.01, seed=1))
    assert sampler.draw(logits, find_likeliest(logits[None])[0]) == 2


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8, 1e30, float("inf")])
def test_any_temperature_draws_a_token(temperature: float) -> None:
    """Cold ones are greedy, hot ones uniform; none may stop the engine."""
    drawn = _draws(SamplingOptions(1, temperature, seed=1), 60)
    assert set(drawn) == ({1} if temperature < 1 else set(range(6)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingOptions(**{"max_tokens": 1, **wrong})  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(wrong: float, temperature: float) -> None:
    logits = torch.tensor([0.0, wrong, 1.0])
    with pytest.raises(ValueError, match="not finite"):
        Sampler(SamplingOptions(1, temperature)).draw(logits, find_likeliest(logits[None])[0])


def test_a_seed_means_the_same_in_any_batch(rig: EngineRig) -> None:
    def run(neighbours: int) -> list[int]:
        heard = Heard()
        for index in range(neighbours):
            options = SamplingOptions(3 + index, 1.3, seed=index)
            rig.engine.submit(GenerateRequest(f"n{index}", (live(9 + index, index),), options, lambda event: None))
        options = SamplingOptions(16, 0.8, 0.95, 40, seed=11)
        rig.engine.submit(GenerateRequest("watched", (live(12, 3),), options, heard.events.append))
        rig.run()
        return heard.tokens

    alone = run(0)
    assert len(set(alone)) > 3
    assert run(3) == alone
