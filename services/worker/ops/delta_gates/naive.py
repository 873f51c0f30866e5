"""The op as torch operations, all fp32."""

import torch
import torch.nn.functional as F

from services.worker.ops.delta_gates.types import DeltaGates, DeltaHeads
from services.worker.ops.norm.naive import l2_norm
from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["open_gates"]


def open_gates(rows: torch.Tensor, gates: DeltaGates, heads: DeltaHeads) -> RecurrenceInputs:
    """See the package."""
    value_channels = heads.num_value_heads * heads.value_dim
    q, k, v = F.silu(rows.float()).split([heads.key_channels, heads.key_channels, value_channels], dim=-1)
    q, k = (l2_norm(each.unflatten(-1, (heads.num_key_heads, heads.key_dim))) for each in (q, k))
    return RecurrenceInputs(
        q=q * heads.key_dim**-0.5,
        k=k,
        v=v.unflatten(-1, (heads.num_value_heads, heads.value_dim)),
        log_decay=-gates.rate * F.softplus(gates.step.float() + gates.bias),
        beta=gates.beta.float().sigmoid(),
    )
