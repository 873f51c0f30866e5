"""Random weights of a true shape: the same from one seed, and gates that remember."""

import shutil
from pathlib import Path

import pytest
import torch

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.gated_delta import GatedDelta
from services.worker.mixers.state import DeviceMemory
from services.worker.models.registry import draw_model
from tests.exactness.rig import PassRig, draw_ids
from tests.models import VARIANTS, CheckpointFactory


@pytest.fixture
def config_alone(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    shutil.copy(checkpoints.directory(VARIANTS[0]) / "config.json", tmp_path)
    return tmp_path


def _rig(directory: Path, seed: int) -> PassRig:
    memory = DeviceMemory(torch.device("cpu"), torch.float32, num_pages=64, page_size=16, num_slots=4)
    model = draw_model(directory, memory, seed)
    profile = CaptureProfile(SeamWindow(4), draw_ids(5, 1))
    return PassRig(EngineContext.create(model, memory, profile, state_bytes=1 << 24))


def test_one_seed_one_model(config_alone: Path) -> None:
    prompt = CombinePart(draw_ids(50, 2))
    logits = [_rig(config_alone, seed).logits(prompt) for seed in (1, 1, 2)]
    assert bool(logits[0].isfinite().all())
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])


def test_gates_remember_a_long_segment(config_alone: Path) -> None:
    """Over 2,048 tokens every head keeps between 3 and 97 % of its state."""
    for mixer in _rig(config_alone, 1).context.model.linear_mixers:
        assert isinstance(mixer.projection, GatedDelta)
        hidden = torch.randn(2048, 48, generator=torch.Generator().manual_seed(3))
        projected = mixer.projection.project(hidden)
        kept = mixer.projection.inputs(projected.rows, projected).log_decay.sum(0).exp()
        assert bool(((kept > 0.03) & (kept < 0.97)).all()), kept
