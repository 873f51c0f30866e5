"""Whether composed prompts say what a recompute says, on the model that is to be measured: no figure counts without it."""

from dataclasses import dataclass, replace

from bench.engine_runs import capture_together, first_tokens, key
from bench.gpu.rig import Rig
from services.worker.engine.loop import Engine
from services.worker.engine.requests import PromptPart, Serving
from services.worker.engine.states import SegmentState

__all__ = ["Agreement", "measure_agreement"]

_QUESTIONS = 16
_LEAST_SHARE, _LEAST_LEAD = 1 / 3, 0.25


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of questions whose first token is that of a full recompute.

    composed: behind the segment's own state, which is exact where the prime stands ahead of it, up to rounding; mistaken:
    behind another segment's.
    """

    composed: float
    mistaken: float

    @property
    def is_good(self) -> bool:
        """Tokens are right far too often for chance, and are not with wrong states.

        A dtype's rounding tips those that are nearly equal, and experts with them: not all can be right.
        """
        return self.composed >= max(_LEAST_SHARE, self.mistaken + _LEAST_LEAD)


def measure_agreement(rig: Rig) -> Agreement:
    """One segment behind the prime, several questions."""
    sizes = rig.sizes
    context_tokens = sizes.prime_tokens + sizes.short_tokens + sizes.question_tokens
    engine = rig.engine(4 * sizes.short_tokens + _QUESTIONS * context_tokens, 3 * _QUESTIONS + 8, _QUESTIONS)
    own, other = rig.ids(1, sizes.short_tokens), rig.ids(2, sizes.short_tokens)
    capture_together(engine, {key(0): own, key(1): other})
    _exchange(engine, own)
    prime = PromptPart(rig.ids(7, sizes.prime_tokens))
    answers = [
        first_tokens(engine, [(prime, part, rig.question(number)) for number in range(_QUESTIONS)]).ids
        for part in (
            PromptPart(own),
            PromptPart(own, Serving.SEGMENT, key(0)),
            PromptPart(own, Serving.SEGMENT, key(2)),
        )
    ]
    composed, mistaken = (
        sum(token == expected for token, expected in zip(answer, answers[0], strict=True)) / _QUESTIONS
        for answer in answers[1:]
    )
    return Agreement(composed, mistaken)


def _exchange(engine: Engine, token_ids: tuple[int, ...]) -> None:
    """Under `key(2)` the state that stands under `key(1)`, as if it were that of other tokens."""
    store = engine.context.store
    state = store.get(key(1))
    if not isinstance(state, SegmentState):
        raise TypeError("no segment state was captured")
    engine.context.pages.retain(state.pages)
    store.put(key(2), replace(state, token_ids=token_ids))
