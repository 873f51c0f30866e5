"""Routed experts: every token passes through the SwiGLU blocks that it chose, and takes their weighted sum.

`o_n = Σ_j weight[n, j] · down[e] (silu(gate[e] x_n) · up[e] x_n)` with `e = experts[n, j]`, and what a shared block made of
the token behind it. There is no capacity: a token's sum depends on its own row and choice alone. A pair is one token with one
of the `k` experts that it chose.
"""

from services.worker.ops.routed_swiglu.types import Choice, SharedTerm

__all__ = ["Choice", "SharedTerm"]
