"""The op body by body. Any float dtype."""

from collections.abc import Sequence

from services.worker.ops.body_planes.types import BodyPlanes, PassedBody
from services.worker.ops.layout import apply_transition

__all__ = ["keep"]


def keep(bodies: Sequence[PassedBody]) -> list[BodyPlanes]:
    """`S = h_end − T h_w` (design §5), and the product of what bounds every token's transition."""
    return [
        BodyPlanes(
            transition=body.transition.contiguous().clone(),
            end_state=body.state - apply_transition(body.transition, body.seam_state),
            tail=body.tail.contiguous().clone(),
            decay=body.log_bounds.sum(0).exp(),
        )
        for body in bodies
    ]
