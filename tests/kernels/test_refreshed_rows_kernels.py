"""Both passes of a refreshing prompt over kernels in the interpreter: the logits and the attention of the CPU's forms."""

import os
from dataclasses import replace

import pytest
import torch

from services.worker.engine import packed_prompts
from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.refresh import Side
from services.worker.engine.refreshed_rows import AttendingRows, RefreshedRows
from services.worker.engine.seam import SeamWindow
from services.worker.engine.sweep import Sweep
from services.worker.ops import device as kernel_devices
from services.worker.ops.paged_attention import dispatch as paged_attention
from tests.exactness.rig import PassRig, assert_close, assert_far, create_context, draw_ids, finish
from tests.models import VARIANTS, CheckpointFactory

DENSE = next(variant for variant in VARIANTS if variant.name == "qwen3_5-standard")
OPENING, SEGMENT, QUESTION = draw_ids(5, 4), draw_ids(45, 2), draw_ids(9, 5)
SIDES = (Side(4, 4, 12), Side(20, 24, 37))


@torch.inference_mode()
def both_passes(rig: PassRig, plain: CombinePlan, refreshed: CombinePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """The question's attention in the first pass, and the logits behind the second."""
    one = CombinePass(rig.context, replace(plain, refresh_tokens=80))
    attending = AttendingRows(rig.context, one, len(QUESTION))
    finish(Sweep(rig.context, [attending]).run())
    one.refresh(refreshed)
    rows = RefreshedRows(rig.context, one)
    finish(Sweep(rig.context, [rows]).run())
    logits = rows.finish()[0]
    one.release()
    return attending.attention, logits


def test_refreshed_rows_over_kernels(checkpoints: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("kernels run in Triton's interpreter on a CPU only; HYPIC_DEVICE names a GPU")
    profile = CaptureProfile(SeamWindow(4), draw_ids(3, 9))
    rig = PassRig(create_context(checkpoints.directory(DENSE), torch.device("cpu"), profile))
    (state,) = rig.capture(SEGMENT)
    parts = [CombinePart(SEGMENT, state, sides=sides) for sides in ((), SIDES)]
    plans = [CombinePlan(None, (CombinePart(OPENING), own, CombinePart(QUESTION)), 4) for own in parts]
    attention, logits = both_passes(rig, *plans)
    assert_far(rig.logits(*plans[0].parts), logits)
    for module in (kernel_devices, paged_attention, packed_prompts):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    for found, expected in zip(both_passes(rig, *plans), (attention, logits), strict=True):
        assert_close(found, expected)
