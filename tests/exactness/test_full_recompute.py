"""One part, or every token live: the engine equals the public implementation, position by position."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.batch import LinearSnapshot
from tests.exactness.conftest import RigFactory
from tests.exactness.reference_model import Part, ReferenceModel
from tests.exactness.rig import PassRig, assert_close, assert_far, draw_ids
from tests.models import CheckpointFactory, Variant, reference_logits

PROFILE = CaptureProfile(SeamWindow(4), ())
IDS = draw_ids(258, 1)


@pytest.fixture
def rig(make_rig: RigFactory) -> PassRig:
    return make_rig(PROFILE)


@pytest.fixture
def expected(checkpoints: CheckpointFactory, variant: Variant) -> torch.Tensor:
    """The public implementation's logits at all positions."""
    return reference_logits(checkpoints.model(variant), IDS)


def test_the_reference_model_is_the_public_one(reference: ReferenceModel, expected: torch.Tensor) -> None:
    assert_close(reference.logits([Part(IDS[:80])]), expected[:80])


def test_every_length(rig: PassRig, expected: torch.Tensor) -> None:
    """Lengths 1 to 130, and longer ones that leave 1 modulo the chunk size."""
    for length in (*range(1, 131), 192, 193, 194, 257, 258):
        logits = rig.logits(CombinePart(IDS[:length]))
        assert_close(logits, expected[length - 1], where=f"after token {length}")
    assert_far(rig.logits(CombinePart(IDS[:64])), expected[64])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    cuts=st.lists(st.integers(0, 200), max_size=5),
    keeps=st.lists(st.booleans(), min_size=6, max_size=6),
    length=st.integers(1, 200),
)
def test_any_cut_into_live_parts(
    rig: PassRig, expected: torch.Tensor, cuts: list[int], keeps: list[bool], length: int
) -> None:
    """Parts, empty ones among them, with and without a snapshot behind them; snapshots continue exactly."""
    edges = [0, *sorted(min(cut, length - 1) for cut in cuts), length]
    pieces = [IDS[start:end] for start, end in pairwise(edges)]
    parts = [CombinePart(ids, keep=keep) for ids, keep in zip(pieces, keeps, strict=False)]
    combined = rig.combine(*parts, max_tokens=1)
    combined.prompt.release(rig.context)
    assert_close(combined.logits, expected[length - 1])
    for part, snapshot in combined.snapshots.items():
        end = edges[part + 1]
        assert snapshot.token_ids == IDS[:end]
        if end < length:
            assert_close(rig.logits(CombinePart(IDS[end:length]), prefix=snapshot), expected[length - 1])
        rig.context.pages.release(snapshot.pages)
    rig.context.pages.check_integrity([])


def test_decode(rig: PassRig, expected: torch.Tensor) -> None:
    """Forced tokens through 70 decode steps, over several pages, from a prompt of one token and of many."""
    for length in (1, 63, 64, 150):
        reply = IDS[length : length + 70]
        combined = rig.combine(CombinePart(IDS[:length]), max_tokens=len(reply))
        decoded = rig.decode(combined, reply)
        assert_close(decoded, expected[length - 1 : length - 1 + len(reply)])
        assert_far(decoded, expected[length : length + len(reply)])


def test_decode_from_a_prefix(rig: PassRig, expected: torch.Tensor) -> None:
    """A snapshot serves two prompts in turn, its partial page untouched by the first one's own tokens."""
    first = rig.combine(CombinePart(IDS[:37], keep=True), CombinePart(IDS[37:41]), max_tokens=1)
    first.prompt.release(rig.context)
    snapshot = first.snapshots[0]
    other = rig.combine(CombinePart(draw_ids(9, 2)), prefix=snapshot, max_tokens=20)
    rig.decode(other, draw_ids(20, 3))
    combined = rig.combine(CombinePart(IDS[37:50]), prefix=snapshot, max_tokens=20)
    assert_close(rig.decode(combined, IDS[50:70]), expected[49:69])


def test_a_prefix_needs_both_halves(rig: PassRig, expected: torch.Tensor) -> None:
    """Controls: keys and values without the recurrent state, and the recurrent state without its tail."""
    first = rig.combine(CombinePart(IDS[:60], keep=True), CombinePart(IDS[60:61]), max_tokens=1)
    first.prompt.release(rig.context)
    snapshot = first.snapshots[0]
    assert_close(rig.logits(CombinePart(IDS[60:64]), prefix=snapshot), expected[63])
    if not snapshot.snapshots:
        pytest.skip("the family has no recurrent state")
    halves = ["state", "tail"] if snapshot.snapshots[0].tail.numel() else ["state"]
    for half in halves:
        broken = tuple(_without(half, each) for each in snapshot.snapshots)
        logits = rig.logits(CombinePart(IDS[60:64]), prefix=replace(snapshot, snapshots=broken))
        assert_far(logits, expected[63])


def _without(half: str, snapshot: LinearSnapshot) -> LinearSnapshot:
    if half == "state":
        return replace(snapshot, state=0 * snapshot.state)
    return replace(snapshot, tail=0 * snapshot.tail)


def test_greedy_tokens_equal_generate(rig: PassRig, checkpoints: CheckpointFactory, variant: Variant) -> None:
    public = checkpoints.model(variant)
    prompt = IDS[:45]
    with torch.inference_mode():
        generated = public.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 45), max_new_tokens=24, do_sample=False
        )[0, 45:].tolist()
    combined = rig.combine(CombinePart(prompt), max_tokens=24)
    logits = rig.decode(combined, generated)
    assert logits.argmax(-1).tolist() == generated
