"""What is kept of bodies whose capture has come to its end, in the best form that a device has."""

from collections.abc import Sequence

from services.worker.ops.body_planes import naive
from services.worker.ops.body_planes.types import BodyPlanes, PassedBody
from services.worker.ops.device import runs_kernels

__all__ = ["BodyPlanes", "PassedBody", "keep"]


def keep(bodies: Sequence[PassedBody]) -> list[BodyPlanes]:
    """As `naive.keep`; nothing of it is a view of what was given."""
    if not bodies or not runs_kernels(bodies[0].state):
        return naive.keep(bodies)
    from services.worker.ops.body_planes import triton

    return triton.keep(bodies)
