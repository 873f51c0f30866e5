"""What is kept of bodies whose capture has come to its end, in the best form that a device has."""

from collections.abc import Sequence

import torch

from services.worker.ops.body_planes import naive
from services.worker.ops.body_planes.types import BodyPlanes, PackedBodies, PassedBody
from services.worker.ops.device import runs_kernels

__all__ = ["BodyPlanes", "PackedBodies", "PassedBody", "keep", "keep_packed"]


def keep(bodies: Sequence[PassedBody]) -> list[BodyPlanes]:
    """As `naive.keep`; nothing of it is a view of what was given."""
    if not bodies or not runs_kernels(bodies[0].state):
        return naive.keep(bodies)
    from services.worker.ops.body_planes import triton

    return triton.keep(bodies)


def keep_packed(bodies: PackedBodies, targets: torch.Tensor, is_aligned: bool) -> None:
    """As `naive.keep`, on a device that runs kernels, into memory that is there.

    targets int64 `[R, 4]`: the addresses of every body's planes, zeros where there is no body; is_aligned: all to 16 bytes.
    """
    from services.worker.ops.body_planes import triton

    triton.keep_packed(bodies, targets, is_aligned)
