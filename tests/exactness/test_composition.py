"""Composition of a whole model: against an fp64 composition, and against full recompute where it must be exact."""

import pytest
import torch

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from tests.exactness.conftest import RigFactory
from tests.exactness.mistakes import edit_record, possible_mistakes
from tests.exactness.reference_model import (
    LinearRecord,
    Part,
    Record,
    ReferenceLinear,
    ReferenceModel,
)
from tests.exactness.rig import assert_close, assert_far, dense_transition, draw_ids
from tests.models import CheckpointFactory, Variant, reference_logits

PRIME = draw_ids(5, 1)
SYSTEM = draw_ids(7, 2)
SEGMENTS = (draw_ids(40, 3), draw_ids(23, 4), draw_ids(75, 5))
QUESTION = draw_ids(9, 6)
WINDOW = 4


def _parts(records: list[Record]) -> list[Part]:
    stored = [Part(ids, record) for ids, record in zip(SEGMENTS, records, strict=True)]
    return [Part(SYSTEM), *stored, Part(QUESTION)]


def test_engine_composes_like_the_fp64_reference(make_rig: RigFactory, reference: ReferenceModel) -> None:
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    states = rig.capture(*SEGMENTS)
    stored = [CombinePart(ids, state) for ids, state in zip(SEGMENTS, states, strict=True)]
    actual = rig.logits(CombinePart(SYSTEM), *stored, CombinePart(QUESTION))
    records = [reference.capture(PRIME, ids, WINDOW) for ids in SEGMENTS]
    assert_close(actual, reference.logits(_parts(records))[-1])
    mistakes = possible_mistakes(reference)
    assert mistakes
    for mistake in mistakes:
        assert_far(actual, reference.logits(_parts([edit_record(record, mistake) for record in records]))[-1])
    assert_far(actual, reference.logits(_parts([reference.capture((), ids, WINDOW) for ids in SEGMENTS]))[-1])


def test_seam_tokens_enter_the_state_once(make_rig: RigFactory, reference: ReferenceModel) -> None:
    """A transition over the whole segment behind a recomputed window counts the window twice; short segments show it."""
    if not any(isinstance(mixer, ReferenceLinear) for mixer in reference.mixers):
        pytest.skip("the family has no recurrent state")
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    ids = draw_ids(WINDOW + 8, 7)
    state = rig.capture(ids)[0]
    actual = rig.logits(CombinePart(SYSTEM), CombinePart(ids, state), CombinePart(QUESTION))
    record = reference.capture(PRIME, ids, WINDOW)
    assert_close(actual, reference.logits([Part(SYSTEM), Part(ids, record), Part(QUESTION)])[-1])
    whole = reference.capture(PRIME, ids, 0)
    layers = tuple(
        twice if isinstance(twice, LinearRecord) else once
        for once, twice in zip(record.layers, whole.layers, strict=True)
    )
    twice = Part(ids, Record(WINDOW, layers))
    assert_far(actual, reference.logits([Part(SYSTEM), twice, Part(QUESTION)])[-1])


def test_separated_windows_do_not_see_the_future(make_rig: RigFactory, reference: ReferenceModel) -> None:
    """The windows of all segments as one causal run over all stored keys would show a window its own body."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    states = rig.capture(*SEGMENTS)
    stored = [CombinePart(ids, state) for ids, state in zip(SEGMENTS, states, strict=True)]
    actual = rig.logits(CombinePart(SYSTEM), *stored, CombinePart(QUESTION))
    parts = _parts([reference.capture(PRIME, ids, WINDOW) for ids in SEGMENTS])

    def one_causal_run(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        live = torch.arange(len(queries))
        packed = torch.cat([live[None] <= live[:, None], torch.ones(len(queries), len(keys) - len(live)).bool()], 1)
        return packed

    assert_far(actual, reference.logits(parts, one_causal_run)[-1])


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0), (0, 0, 2)], ids=str)
def test_any_order_and_repetition(order: tuple[int, ...], make_rig: RigFactory, reference: ReferenceModel) -> None:
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    states = rig.capture(*SEGMENTS)
    actual = rig.logits(*[CombinePart(SEGMENTS[index], states[index]) for index in order], CombinePart(QUESTION))
    records = [reference.capture(PRIME, ids, WINDOW) for ids in SEGMENTS]
    parts = [Part(SEGMENTS[index], records[index]) for index in order]
    assert_close(actual, reference.logits([*parts, Part(QUESTION)])[-1])
    swapped = [parts[1], parts[0], parts[2]] if order[0] != order[1] else [parts[0], parts[2], parts[1]]
    assert_far(actual, reference.logits([*swapped, Part(QUESTION)])[-1])


def test_first_segment_behind_an_empty_prime_is_exact(
    make_rig: RigFactory, checkpoints: CheckpointFactory, variant: Variant
) -> None:
    """Nothing precedes it at capture or at use, so composing it is a full recompute; decoding stays exact too."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), ()))
    segment = SEGMENTS[2]
    state = rig.capture(segment)[0]
    reply = draw_ids(18, 8)
    expected = reference_logits(checkpoints.model(variant), segment + QUESTION + reply)
    combined = rig.combine(CombinePart(segment, state), CombinePart(QUESTION))
    decoded = rig.decode(combined, reply)
    assert_close(decoded, expected[len(segment + QUESTION) - 1 : -1])


def test_segment_behind_its_own_prime_is_exact(
    make_rig: RigFactory, checkpoints: CheckpointFactory, variant: Variant
) -> None:
    """Where a prompt begins with the prime, the first segment stands at use where it stood at capture."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    state = rig.capture(SEGMENTS[0])[0]
    actual = rig.logits(CombinePart(PRIME), CombinePart(SEGMENTS[0], state), CombinePart(QUESTION))
    assert_close(actual, reference_logits(checkpoints.model(variant), PRIME + SEGMENTS[0] + QUESTION)[-1])
    moved = rig.logits(CombinePart(SYSTEM), CombinePart(SEGMENTS[0], state), CombinePart(QUESTION))
    assert_far(moved, reference_logits(checkpoints.model(variant), SYSTEM + SEGMENTS[0] + QUESTION)[-1])


def test_chunked_capture_keeps_the_same_state(make_rig: RigFactory, reference: ReferenceModel) -> None:
    """Chunks of 16 against one chunk, with the seam ending inside a chunk and at its edge."""
    ids = draw_ids(90, 9)
    for window in (6, 16, 21):
        record = reference.capture(PRIME, ids, window)
        for chunk_tokens in (16, 512):
            rig = make_rig(CaptureProfile(SeamWindow(window), PRIME, chunk_tokens))
            state = rig.capture(ids)[0]
            linear = [layer for layer in record.layers if isinstance(layer, LinearRecord)]
            for plane, expected in zip(state.planes, linear, strict=True):
                transition = dense_transition(plane)
                assert_close(transition, expected.maps.transition)
                assert_close(plane.end_state, expected.maps.end_state)
                if plane.tail.numel():
                    assert_close(plane.tail, expected.tail)
                if plane.transition.shape[-1] > 1:
                    assert_far(transition, expected.maps.transition.transpose(1, 2))
            composed = rig.logits(CombinePart(SYSTEM), CombinePart(ids, state), CombinePart(QUESTION))
            assert_close(composed, reference.logits([Part(SYSTEM), Part(ids, record), Part(QUESTION)])[-1])
