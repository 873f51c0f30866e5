"""Fixtures of the worker's unit tests."""

from collections.abc import Callable

import pytest
import torch

from services.worker.engine.limits import EngineLimits
from services.worker.engine.seam import SeamWindow
from tests.exactness.rig import create_context
from tests.models import VARIANTS, CheckpointFactory
from tests.unit.worker.engine_rig import EngineRig, create_profile

EngineFactory = Callable[..., EngineRig]


@pytest.fixture
def make_engine(checkpoints: CheckpointFactory, device: torch.device) -> EngineFactory:
    """Engines over the standard tiny checkpoint."""

    def make(
        limits: EngineLimits | None = None,
        num_pages: int = 80,
        num_slots: int = 6,
        prime_tokens: int = 5,
        window: SeamWindow | None = None,
    ) -> EngineRig:
        directory = checkpoints.directory(VARIANTS[0])
        context = create_context(directory, device, create_profile(prime_tokens, window), num_pages, num_slots)
        return EngineRig(context, limits)

    return make


@pytest.fixture
def rig(make_engine: EngineFactory) -> EngineRig:
    """An engine with room."""
    return make_engine()
