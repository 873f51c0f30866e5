"""Fixtures of the exactness suite."""

from collections.abc import Callable

import pytest
import torch

from services.worker.engine.context import CaptureProfile
from tests.exactness.reference_model import ReferenceModel
from tests.exactness.rig import PassRig, create_context, draw_ids
from tests.models import CheckpointFactory, Variant

RigFactory = Callable[[CaptureProfile], PassRig]


@pytest.fixture
def make_rig(checkpoints: CheckpointFactory, variant: Variant, device: torch.device) -> RigFactory:
    """Rigs of the variant under any profile; each proves first that its gates remember."""

    def make(profile: CaptureProfile) -> PassRig:
        rig = PassRig(create_context(checkpoints.directory(variant), device, profile))
        for body in (16, 100):
            state = rig.capture(draw_ids(profile.seam_window.least_segment(body), 99))[0]
            rig.assert_remembers(state)
            rig.context.pages.release(state.pages)
        return rig

    return make


@pytest.fixture
def reference(checkpoints: CheckpointFactory, variant: Variant) -> ReferenceModel:
    """The variant's model in fp64."""
    return ReferenceModel(checkpoints.taken_apart(variant))
