"""Penalties, biases, min-p and held off stop tokens: against transformers' processors, and beside neighbours."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.logprobs import TokenLogprobs
from services.worker.engine.requests import GenerateRequest, TokenEvent
from services.worker.engine.sampling import LogitEdits, Sampler, SamplingOptions, find_likeliest
from tests.unit.worker.engine_rig import EngineRig, Heard, live

VOCABULARY = 12
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=10)
penalties = st.floats(-2.0, 2.0)
EDITING: list[dict[str, Any]] = [
    {"presence_penalty": -90.0},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 0.02},
    {"logit_bias": ((3, 60.0), (9, -100.0))},
    {"min_tokens": 5, "stop_ids": frozenset(range(40))},
    {"min_p": 0.2, "temperature": 0.9, "seed": 4},
]


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def _edited(options: SamplingOptions, logits: torch.Tensor, prompt: list[int], drawn: list[int]) -> torch.Tensor:
    edits = LogitEdits(options, prompt)
    for token in drawn:
        edits.apply(logits.double())
        edits.note(token)
    return edits.apply(logits.double())


@given(seed=st.integers(0, 99), prompt=tokens, drawn=tokens, penalty=st.floats(0.1, 5.0))
def test_the_repetition_penalty_is_transformers(seed: int, prompt: list[int], drawn: list[int], penalty: float) -> None:
    logits = _logits(seed)
    own = _edited(SamplingOptions(99, repetition_penalty=penalty), logits, prompt, drawn)
    ids = torch.tensor([prompt + drawn], dtype=torch.int64)
    oracle = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.double()[None].clone())
    assert torch.allclose(own, oracle[0])


@given(seed=st.integers(0, 99), prompt=tokens, drawn=tokens, presence=penalties, frequency=penalties)
def test_presence_and_frequency_penalties(
    seed: int, prompt: list[int], drawn: list[int], presence: float, frequency: float
) -> None:
    """As OpenAI defines them: the prompt does not count."""
    logits = _logits(seed)
    options = SamplingOptions(99, presence_penalty=presence, frequency_penalty=frequency)
    own = _edited(options, logits, prompt, drawn)
    expected = [
        logit - frequency * drawn.count(token) - presence * (token in drawn)
        for token, logit in enumerate(logits.double().tolist())
    ]
    assert own.tolist() == pytest.approx(expected)


@given(
    seed=st.integers(0, 99), biases=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), min_size=1)
)
def test_biases_are_transformers(seed: int, biases: dict[int, float]) -> None:
    logits = _logits(seed)
    own = _edited(SamplingOptions(99, logit_bias=tuple(biases.items())), logits, [], [])
    oracle = transformers.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    assert torch.allclose(own, oracle(torch.zeros(1, 1, dtype=torch.int64), logits.double()[None])[0])


@pytest.mark.parametrize("num_drawn", [0, 1, 2, 3])
def test_stop_tokens_are_held_off_as_transformers_does(num_drawn: int) -> None:
    logits, drawn = _logits(1), [0] * num_drawn
    own = _edited(SamplingOptions(99, min_tokens=2, stop_ids=frozenset({4, 7})), logits, [1, 2], drawn)
    processor = transformers.MinNewTokensLengthLogitsProcessor(2, 2, [4, 7], device="cpu")
    assert torch.equal(own, processor(torch.tensor([[1, 2, *drawn]]), logits.double()[None].clone())[0])


@settings(max_examples=30)
@given(seed=st.integers(0, 99), min_p=st.floats(0.01, 1.0), temperature=st.floats(0.2, 3.0))
def test_what_min_p_leaves_is_what_transformers_leaves(seed: int, min_p: float, temperature: float) -> None:
    logits = _logits(seed)
    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    scores = transformers.TemperatureLogitsWarper(temperature)(ids, logits.double()[None])
    kept = transformers.MinPLogitsWarper(min_p)(ids, scores)[0].isfinite()
    sampler = Sampler(SamplingOptions(99, temperature, min_p=min_p, seed=seed))
    drawn = {sampler.draw(logits, find_likeliest(logits[None])[0]) for _ in range(80)}
    assert drawn <= set(kept.nonzero().flatten().tolist())
    likely = scores[0].softmax(-1) > 0.2
    assert drawn >= set((kept & likely).nonzero().flatten().tolist())


def test_the_caller_keeps_its_logits() -> None:
    logits = _logits(3).double()
    before = logits.clone()
    sampler = Sampler(SamplingOptions(9, logit_bias=((1, 50.0),), repetition_penalty=2.0))
    assert sampler.draw(logits, find_likeliest(logits[None])[0]) == 1
    assert torch.equal(logits, before)


def test_no_token_left_is_said() -> None:
    logits = _logits(3)
    held = SamplingOptions(9, min_tokens=1, stop_ids=frozenset(range(VOCABULARY)))
    with pytest.raises(ValueError, match="no token is left"):
        Sampler(held).draw(logits, find_likeliest(logits[None])[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": ((1, float("nan")),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"min_tokens": 2},
        {"logprobs": -1},
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingOptions(1, **wrong)


def test_every_row_is_drawn_as_if_it_were_alone(rig: EngineRig) -> None:
    """Requests that edit their logits, one that does not, and one that asks for log probabilities, in one batch."""
    asked = [{"max_tokens": 8}, *EDITING, {"logprobs": 3}]

    def run(chosen: list[int]) -> list[list[int]]:
        heard = [Heard() for _ in chosen]
        for index, sink in zip(chosen, heard, strict=True):
            options = SamplingOptions(**{"max_tokens": 8, **asked[index]})
            rig.engine.submit(GenerateRequest(f"r{index}", (live(9, 1),), options, sink.events.append))
        rig.run()
        rig.assert_nothing_held()
        return [one.tokens for one in heard]

    alone = [run([index])[0] for index in range(len(asked))]
    assert alone[0] == alone[-1]
    assert [index for index, edited in enumerate(alone[1:-1]) if edited == alone[0]] == []
    for first in range(0, len(asked), 4):
        group = [index % len(asked) for index in range(first, first + 6)]
        assert run(group) == [alone[index] for index in group]


def test_log_probabilities_are_the_models_own(rig: EngineRig) -> None:
    """Whatever is added to the logits, the raw ones are told: those of the token drawn, and the largest, best first."""
    heard, plain = Heard(), Heard()
    options = SamplingOptions(6, logprobs=4, logit_bias=((11, 60.0),), repetition_penalty=1.5)
    rig.engine.submit(GenerateRequest("r", (live(9, 1),), options, heard.events.append))
    rig.engine.submit(GenerateRequest("plain", (live(9, 1),), SamplingOptions(1, logprobs=4), plain.events.append))
    rig.run()
    told, (unbiased,) = _told(heard), _told(plain)
    assert heard.tokens == [11] * 6
    assert len(told) == 6
    assert told[0].top == unbiased.top
    assert told[0].own < unbiased.own == unbiased.top[0][1]
    for each in told:
        values = [logprob for _, logprob in each.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == 4
        assert each.own <= values[0]


def _told(heard: Heard) -> list[TokenLogprobs]:
    return [event.logprobs for event in heard.events if isinstance(event, TokenEvent) and event.logprobs is not None]
