"""The classical mistakes of composition, and which of them a family can make."""

from dataclasses import replace
from enum import StrEnum

import torch

from tests.exactness.reference import Maps
from tests.exactness.reference_model import (
    AttentionRecord,
    LinearRecord,
    Record,
    ReferenceAttention,
    ReferenceLinear,
    ReferenceModel,
)

__all__ = ["Mistake", "edit_record", "possible_mistakes"]


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


def edit_record(record: Record, mistake: Mistake) -> Record:
    """A record with one mistake in every layer that can have it."""
    return Record(record.seam_window, tuple(_edit_layer(layer, mistake) for layer in record.layers))


def _edit_layer(layer: LinearRecord | AttentionRecord, mistake: Mistake) -> LinearRecord | AttentionRecord:
    if isinstance(layer, AttentionRecord):
        return replace(layer, shift=1) if mistake is Mistake.SHIFTED_KEYS else layer
    transition, end_state = layer.maps.transition, layer.maps.end_state
    match mistake:
        case Mistake.NO_TRANSITION:
            return replace(layer, maps=Maps(torch.zeros_like(transition), end_state))
        case Mistake.TRANSPOSED:
            return replace(layer, maps=Maps(transition.transpose(1, 2), end_state))
        case Mistake.NO_END_STATE:
            return replace(layer, maps=Maps(transition, 0 * end_state))
        case Mistake.MOVED_TAIL:
            return replace(layer, tail=layer.tail.roll(1, 0) if layer.tail.shape[0] > 1 else 0 * layer.tail)
        case Mistake.SHIFTED_STATE:
            return replace(layer, turned_by=1)
    return layer


def _erases(mixer: ReferenceLinear, reference: ReferenceModel) -> bool:
    """Whether the layer follows a delta rule, seen on one token."""
    hidden = reference.family.embed(torch.tensor([0]))
    return mixer.tokens(mixer.rows(hidden), hidden, torch.tensor([0])).beta is not None
