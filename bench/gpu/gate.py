"""Whether composed prompts say what a recompute says, on the model that is to be measured: no figure counts without it.

Only the first layers are asked, up to the first of each kind. Random experts leave no choice robust: a difference in the last
bit sends a token to other experts, and behind forty such layers two exact passes have little in common (relative error of
logits 0.1 to 0.5 in fp32 and 0.6 to 0.9 in bf16 on a narrow model of 40 layers).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.engine_runs import capture_together, key
from bench.gpu.rig import Rig
from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.loop import Engine
from services.worker.engine.states import SegmentState

__all__ = ["QUESTIONS", "Agreement", "last_logits", "mean_error", "measure_agreement"]

QUESTIONS = 4
_MOST_ERROR, _LEAST_CONTRAST = 0.2, 3.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Relative errors `‖a − b‖ / ‖b‖` of the last token's logits against a full recompute, the mean over questions.

    composed: behind the segment's own state, which is exact where the prime stands ahead of it, up to rounding; mistaken:
    behind another segment's.
    """

    composed: float
    mistaken: float

    @property
    def is_good(self) -> bool:
        """Rounding explains what is left, and a wrong state is seen."""
        return self.composed <= _MOST_ERROR and self.mistaken >= _LEAST_CONTRAST * self.composed


def measure_agreement(rig: Rig) -> Agreement:
    """One segment behind the prime, several questions."""
    sizes = rig.sizes
    context_tokens = sizes.prime_tokens + sizes.short_tokens + sizes.question_tokens
    engine = rig.engine(4 * sizes.short_tokens + context_tokens, 16, num_layers=rig.first_of_each_kind)
    own, other = rig.ids(1, sizes.short_tokens), rig.ids(2, sizes.short_tokens)
    capture_together(engine, {key(0): own, key(1): other})
    states = [engine.context.store.get_segment(key(index), ids) for index, ids in enumerate((own, other))]
    parts = [CombinePart(own), *(CombinePart(own, _as_of(own, state)) for state in states)]
    exact, composed, mistaken = (
        [last_logits(rig, engine, [part], number) for number in range(QUESTIONS)] for part in parts
    )
    return Agreement(mean_error(composed, exact), mean_error(mistaken, exact))


def _as_of(token_ids: tuple[int, ...], state: SegmentState | None) -> SegmentState:
    """A state as if it were of these tokens."""
    if state is None:
        raise LookupError("no segment state was captured")
    return replace(state, token_ids=token_ids)


def last_logits(rig: Rig, engine: Engine, parts: Sequence[CombinePart], number: int) -> torch.Tensor:
    """Of a prompt of the prime, parts and a question."""
    prime = CombinePart(rig.ids(7, rig.sizes.prime_tokens))
    question = CombinePart(rig.question(number).token_ids)
    combine = CombinePass(engine.context, CombinePlan(None, (prime, *parts, question), max_tokens=1))
    steps = combine.run()
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as finished:
                combine.release()
                logits: torch.Tensor = finished.value
                return logits


def mean_error(logits: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative, `‖a − b‖ / ‖b‖`, the mean over questions."""
    errors = [float((own - true).norm() / true.norm()) for own, true in zip(logits, expected, strict=True)]
    return sum(errors) / len(errors)
