"""How far each encoding of stored states moves the answers, and how many bytes it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bench.results import Row
from eval.capture import CapturePlan, capture_segments
from eval.presets import DEFAULT_SETTING
from eval.question_sets import QuestionSet
from eval.rig import Rig
from eval.runner import load_prompts
from eval.scoring import Outcome
from eval.settings import Setting, encoding_name
from eval.statistics import Interval, mean_interval
from services.blob.encodings import EXACT, Precision, StateEncoding, encode, encode_tail
from services.worker.engine.seam import SeamWindow
from services.worker.models.spec import ModelSpec

__all__ = [
    "COMPACT",
    "CONTROLS",
    "ENCODINGS",
    "EncodingResult",
    "compare_encodings",
    "encoding_rows",
    "encoding_settings",
    "measure_decays",
    "segment_decays",
    "stored_linear_bytes",
]

_PROMPTS_OF_DECAYS = 6
_SLOW = 0.5
_NEGLIGIBLE = 1e-3
_BF16, _FP8, _INT8 = Precision.BFLOAT16, Precision.FLOAT8, Precision.INT8
# Every head keeps its transition: no segment takes more under COMPACT.
_EIGHT_BITS = StateEncoding(_INT8, _INT8, _INT8, conv_tail=_INT8)
# What docs/operations.md recommends.
COMPACT = replace(_EIGHT_BITS, negligible_decay=_NEGLIGIBLE)
ENCODINGS = (
    EXACT,
    StateEncoding(_BF16, _BF16, _BF16),
    StateEncoding(_FP8, _FP8, _FP8, conv_tail=_FP8),
    _EIGHT_BITS,
    replace(COMPACT, slow_transition=_BF16, slow_decay=_SLOW),
    COMPACT,
)
# Wrong only in heads that remember, which are few: a mean error over heads hardly sees it, and answers do.
CONTROLS = (
    replace(COMPACT, slow_decay=0.1, negligible_decay=0.1),
    replace(COMPACT, slow_decay=1.0, negligible_decay=1.0),
)


def encoding_settings() -> tuple[Setting, ...]:
    """The default setting of the demo model under every encoding, the exact one first."""
    return tuple(replace(DEFAULT_SETTING, encoding=encoding) for encoding in (*ENCODINGS, *CONTROLS))


@dataclass(frozen=True, slots=True)
class EncodingResult:
    """divergence: nats an answer token; more: percent of the exact encoding's, over the same questions; exact: right answers."""

    encoding: StateEncoding
    questions: int
    divergence: float
    more: Interval
    exact: float


def compare_encodings(outcomes: Sequence[Outcome]) -> list[EncodingResult]:
    """Every encoding against the exact one, question by question."""
    by_setting: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, {})[outcome.question] = outcome
    settings = encoding_settings()
    reference = by_setting[settings[0].name]
    return [_compare(own, by_setting[own.name], reference) for own in settings]


def _compare(setting: Setting, found: Mapping[int, Outcome], reference: Mapping[int, Outcome]) -> EncodingResult:
    numbers = sorted(found)
    divergences, before = (
        np.array([own[number].scores.divergence for number in numbers], dtype=np.float64) for own in (found, reference)
    )
    return EncodingResult(
        encoding=setting.encoding,
        questions=len(numbers),
        divergence=float(divergences.mean()),
        more=mean_interval(100.0 * (divergences - before) / before.mean(), seed=0),
        exact=float(np.mean([found[number].scores.exact for number in numbers])),
    )


@torch.inference_mode()
def measure_decays(checkpoint: Path, sets: Sequence[QuestionSet]) -> torch.Tensor:
    """What every head of every linear layer keeps over bodies of some questions' documents, without a prime: `[n]`."""
    prompts = islice(load_prompts(checkpoint, sets), _PROMPTS_OF_DECAYS)
    documents = [document for own in prompts for document in own.prompt.documents]
    rig = Rig(checkpoint, "cpu", sum(len(document) for document in documents) + 16 * len(documents), 1)
    return segment_decays(rig, documents, DEFAULT_SETTING.seam_window)


@torch.inference_mode()
def segment_decays(rig: Rig, documents: Sequence[tuple[int, ...]], window: SeamWindow) -> torch.Tensor:
    """What every head of every linear layer keeps over the documents' bodies, without a prime: `[n]`; none where none has one.

    Raises:
        MemoryError: the rig's arena is used up.
    """
    captured = capture_segments(rig, documents, [None] * len(documents), CapturePlan((window,)))
    bodies = [own.planes.get((window.tokens(len(own.token_ids)), len(own.token_ids)), ()) for own in captured]
    return torch.cat([torch.empty(0, device=rig.device), *(plane.decay for planes in bodies for plane in planes)]).cpu()


def stored_linear_bytes(encoding: StateEncoding, spec: ModelSpec, decays: torch.Tensor) -> int:
    """Transitions, end states, decays and bf16 tails of a segment, whose heads keep what is drawn from `decays`."""
    generator = torch.Generator().manual_seed(0)
    total = 0
    for state in spec.states:
        drawn = decays[torch.randint(len(decays), (state.num_heads,), generator=generator)]
        end_state = torch.zeros(state.num_heads, state.key_dim, state.value_dim)
        tail = torch.zeros(max(state.conv_taps - 1, 0), state.conv_channels, dtype=torch.bfloat16)
        planes = encode(torch.zeros(state.transition_shape), end_state, drawn, encoding) | encode_tail(tail, encoding)
        total += sum(plane.nbytes for plane in planes.values())
    return total


def encoding_rows(results: Sequence[EncodingResult], decays: torch.Tensor, spec: ModelSpec) -> list[Row]:
    """A line an encoding: bytes of a segment's linear layers in a model of shapes `spec`, divergence, right answers.

    decays: of the heads that were measured, from which those of the model's are drawn.
    """
    rows: list[Row] = []
    for own in results:
        line = encoding_name(own.encoding)
        size = stored_linear_bytes(own.encoding, spec, decays) / 2**20
        interval = f"[{own.more.low:.2f}, {own.more.high:.2f}]"
        rows += [
            Row(f"{line} / MiB a segment, 35B shape", size, "MiB", 31.0, "lower"),
            Row(f"{line} / KL, nats a token", own.divergence, "nats/token", None, "lower"),
            Row(f"{line} / KL more than exact, % ({interval})", own.more.value, "%", 1.0, "lower"),
            Row(f"{line} / right answers, %", 100 * own.exact, "%"),
            Row(f"{line} / questions", own.questions, "questions"),
        ]
    return rows
