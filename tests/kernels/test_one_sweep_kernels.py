"""Captures beside the prompt that composes them, over kernels in the interpreter and as a GPU runs them: in the same products.

What fresh memory holds is NaN here: a body that is read before its layer's capture has left it is seen.
"""

import os

import pytest
import torch

from services.worker.engine import packed_prompts
from services.worker.engine.capture import CapturePass
from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.sweep import Rows, run_layer
from services.worker.ops import device as kernel_devices
from services.worker.ops.paged_attention import dispatch as paged_attention
from tests.exactness.rig import PassRig, assert_close, assert_far, create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory

TOLERANCE = 1e-4
MOE = next(variant for variant in VARIANTS if variant.name == "qwen3_5_moe-standard")
# One that ends in the first chunk, one that shares its second chunk's sweep.
COLD = (draw_ids(21, 2), draw_ids(37, 3))
HIT = draw_ids(18, 8)


@pytest.fixture
def rig(checkpoints: CheckpointFactory) -> PassRig:
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("kernels run in Triton's interpreter on a CPU only; HYPIC_DEVICE names a GPU")
    profile = CaptureProfile(SeamWindow(4), draw_ids(3, 9), chunk_tokens=24)
    return PassRig(create_context(checkpoints.directory(MOE), torch.device("cpu"), profile))


def _plan(states: list[SegmentState], hit: SegmentState) -> CombinePlan:
    short, long = (CombinePart(state.token_ids, state) for state in states)
    return CombinePlan(None, (CombinePart(draw_ids(5, 4)), long, CombinePart(HIT, hit), short, CombinePart((3, 7))), 4)


@torch.inference_mode()
def _run_joined(rig: PassRig, hit: SegmentState) -> tuple[torch.Tensor, list[SegmentState]]:
    capture = CapturePass(rig.context, COLD, rig.prime)
    prompt = CombinePass(rig.context, _plan(capture.states, hit))
    rows = CombineRows(rig.context, [prompt])
    sweeps: list[list[Rows]] = [[*capture.take_chunk()], [*capture.take_chunk(), rows]]
    for joined in sweeps:
        for one in joined:
            one.start()
        for layer in rig.context.model.layers:
            run_layer(layer, joined)
    return rows.finish()[0], capture.finish()


def test_one_sweep_over_kernels(rig: PassRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (hit,) = rig.capture(HIT)
    expected = rig.capture(*COLD)
    plan = _plan(expected, hit)
    logits = rig.logits(*plan.parts)
    swapped = (plan.parts[0], plan.parts[3], plan.parts[2], plan.parts[1], plan.parts[4])
    assert_far(rig.logits(*swapped), logits, TOLERANCE)
    for module in (kernel_devices, paged_attention, packed_prompts):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    joined, states = _run_joined(rig, hit)
    assert_close(joined, logits, TOLERANCE)
    for own, other in zip(states, expected, strict=True):
        for tensor, true in zip(rig.fingerprint(own), rig.fingerprint(other), strict=True):
            assert_close(tensor, true, TOLERANCE)
