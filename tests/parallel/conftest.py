"""Every tiny checkpoint that two ranks can hold, seen by both: they are started once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine.ranks import rank_variables
from services.worker.mixers.share import Share, SplitError
from services.worker.models.registry import read_checkpoint_spec
from tests.models import VARIANTS, CheckpointFactory, Variant

RANKS = 2
_SECONDS = 300


def is_splittable(directory: Path) -> bool:
    try:
        read_checkpoint_spec(directory).split(Share(0, RANKS))
    except SplitError:
        return False
    return True


@pytest.fixture(scope="session")
def splittable(checkpoints: CheckpointFactory) -> list[Variant]:
    """The tiny shapes that can be split over two ranks."""
    return [variant for variant in VARIANTS if is_splittable(checkpoints.directory(variant))]


@pytest.fixture(scope="session")
def seen(checkpoints: CheckpointFactory, splittable: list[Variant], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two ranks saw; see `observing`."""
    out = tmp_path_factory.mktemp("ranks")
    directories = [str(checkpoints.directory(variant)) for variant in splittable]
    program, meeting = [sys.executable, "-m", "tests.parallel.observing"], str(out / "meeting")
    processes = [
        subprocess.Popen(
            [*program, str(index), str(RANKS), meeting, str(out), *directories],
            env={**rank_variables(), **os.environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(RANKS)
    ]
    try:
        # Both at once: a rank whose pipe is full would keep the other waiting.
        errors = [process.communicate(timeout=_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    return out
