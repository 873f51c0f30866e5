"""A shape that fits no single card, held by two: all hits against a full recompute, and what each card keeps of a segment.

Every rank is a process of its own and runs the same program, in which the engine's sums keep it in step with the other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.ranks import rank_variables

__all__ = ["RANKS", "is_possible", "measure"]

RANKS = 2
_NAME = "Qwen3.5-122B-A10B"
_POLL_SECONDS = 0.1
_SHOWN = 2000


def is_possible(device: torch.device) -> bool:
    """There is a device for every rank; CPUs are shared."""
    return device.type == "cpu" or torch.cuda.device_count() >= RANKS


def measure(rig: Rig) -> Iterator[Row]:
    """The shape that stands beside the rig's config, or the rig's own where none does; rows come as they are measured.

    Raises:
        RuntimeError: there are too few GPUs, a rank ended with an error, or the ranks do not say what one rank says.
    """
    if not is_possible(rig.device):
        raise RuntimeError(f"{RANKS} GPUs are needed; torch sees {torch.cuda.device_count()}")
    # The cards are the ranks'.
    rig.release()
    beside = rig.config.parent / _NAME
    config = beside if beside.is_dir() else rig.config
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = [_start(rig, config, index, Path(folder), stack) for index in range(RANKS)]
        yield from _read_rows(processes, Path(folder))


def _start(rig: Rig, config: Path, index: int, folder: Path, stack: ExitStack) -> "subprocess.Popen[bytes]":
    """One rank, which does not outlive the stack."""
    command = [sys.executable, "-m", "bench.gpu.parallel_rank", str(index), str(RANKS), str(folder)]
    command += [str(config), rig.device.type, str(rig.seed), json.dumps(asdict(rig.sizes))]
    log = stack.enter_context((folder / f"log.{index}").open("wb"))
    process = subprocess.Popen(command, env={**rank_variables(), **os.environ}, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _read_rows(processes: Sequence["subprocess.Popen[bytes]"], folder: Path) -> Iterator[Row]:
    """What the first rank writes, until all have ended or one has failed."""
    path, seen = folder / "rows", 0
    while True:
        states = [process.poll() for process in processes]
        lines = path.read_text().splitlines() if path.exists() else []
        yield from (Row(**json.loads(line)) for line in lines[seen:])
        seen = len(lines)
        for index, status in enumerate(states):
            if status:
                words = (folder / f"log.{index}").read_text(errors="replace")[-_SHOWN:]
                raise RuntimeError(f"rank {index} ended with {status}: {words}")
        if all(status == 0 for status in states):
            return
        time.sleep(_POLL_SECONDS)
