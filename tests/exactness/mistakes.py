"""The classical mistakes of composition, and which of them a family can make."""

from enum import StrEnum

import torch

from tests.exactness.reference_model import ReferenceAttention, ReferenceLinear, ReferenceModel

__all__ = ["Mistake", "possible_mistakes"]


class Mistake(StrEnum):
    """What a stored segment can be used wrongly in; each is a negative control."""

    NO_TRANSITION = "no_transition"
    TRANSPOSED = "transposed"
    NO_END_STATE = "no_end_state"
    MOVED_TAIL = "moved_tail"
    SHIFTED_STATE = "shifted_state"
    SHIFTED_KEYS = "shifted_keys"


def possible_mistakes(reference: ReferenceModel) -> list[Mistake]:
    """The mistakes that would change a number: a diagonal has no transpose, a key without position no shift."""
    linear = [mixer for mixer in reference.mixers if isinstance(mixer, ReferenceLinear)]
    attention = [mixer for mixer in reference.mixers if isinstance(mixer, ReferenceAttention)]
    found = [Mistake.NO_TRANSITION, Mistake.NO_END_STATE] if linear else []
    if any(_erases(mixer, reference) for mixer in linear):
        found.append(Mistake.TRANSPOSED)
    if any(mixer.taps is not None for mixer in linear):
        found.append(Mistake.MOVED_TAIL)
    if any(mixer.turns for mixer in linear):
        found.append(Mistake.SHIFTED_STATE)
    if any(mixer.turns for mixer in attention):
        found.append(Mistake.SHIFTED_KEYS)
    return found


def _erases(mixer: ReferenceLinear, reference: ReferenceModel) -> bool:
    """Whether the layer follows a delta rule, seen on one token."""
    hidden = reference.family.embed(torch.tensor([0]))
    return mixer.tokens(mixer.rows(hidden), hidden, torch.tensor([0])).beta is not None
