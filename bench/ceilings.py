"""What a device reaches at best, and how long a call takes on it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

__all__ = ["Ceilings", "median_seconds"]

_CPU_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reached just now: bytes a second of a large copy, operations a second of a large bf16 product."""

    copied: float
    multiplied: float

    @classmethod
    def measure(cls, device: torch.device) -> "Ceilings":
        """On a copy of 2 GiB and a product of 8,192 x 8,192 matrices; on a CPU far smaller ones."""
        values, rows = (1 << 30, 8192) if device.type == "cuda" else (1 << 20, 256)
        source = torch.empty(values, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        matrix = torch.randn(rows, rows, device=device, dtype=torch.bfloat16)
        return cls(
            copied=2 * source.nbytes / median_seconds(lambda: target.copy_(source), device),
            multiplied=2 * rows**3 / median_seconds(lambda: matrix @ matrix, device),
        )


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of calls; on a GPU each finds a cold L2."""
    if device.type != "cuda":
        return median(_seconds(call) for _ in range(_CPU_ROUNDS))
    from triton.testing import do_bench

    milliseconds: float = do_bench(call, warmup=10, rep=60, return_mode="median")
    return 1e-3 * milliseconds


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
