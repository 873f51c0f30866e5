"""What all tests share: one thread a tensor operation, hypothesis without deadlines, and the device under test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("HYPIC_DEVICE", "cpu") == "cpu":
    # Triton reads it when it is first imported, which other libraries may do.
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.models import VARIANTS, CheckpointFactory, Variant

torch.set_num_threads(1)
# Timing never decides a test; in CI a failure must repeat.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A worker's engine counts them as zero; in a process that does, hypothesis refuses to draw floats for the next test."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where engine tests run: `HYPIC_DEVICE`, the CPU by default."""
    return torch.device(os.environ.get("HYPIC_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """Tiny checkpoints of every family, written once by transformers."""
    return CheckpointFactory(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Every family in every tiny shape."""
    chosen: Variant = request.param
    return chosen
