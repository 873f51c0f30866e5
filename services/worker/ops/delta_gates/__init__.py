"""From what a gated delta layer projects and convolves to what its recurrence takes, in the best form that a device has.

`q, k, v = split(silu(rows))`, `q = l2_norm(q) · K^−½`, `k = l2_norm(k)`, `log_decay = −rate · softplus(step + bias)`,
`beta = sigmoid(beta)` (arXiv 2412.06464, §3.3). Key heads stay as few as they are.
"""

import torch

from services.worker.ops.delta_gates import naive
from services.worker.ops.delta_gates.types import DeltaGates, DeltaHeads
from services.worker.ops.device import runs_kernels
from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["DeltaGates", "DeltaHeads", "open_gates"]


def open_gates(rows: torch.Tensor, gates: DeltaGates, heads: DeltaHeads) -> RecurrenceInputs:
    """Rows `[N, 2 Hk K + H V]` behind the convolution to inputs: fp32, or of the rows' dtype where kernels run."""
    if not runs_kernels(rows):
        return naive.open_gates(rows, gates, heads)
    from services.worker.ops.delta_gates import triton

    return triton.open_gates(rows, gates, heads)
