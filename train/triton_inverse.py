"""Inverse of many unit lower-triangular 64 x 64 matrices by forward substitution."""

import torch
import triton
import triton.language as tl

_COLUMNS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _invert_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    lower,  # noqa: ANN001
    inverse,  # noqa: ANN001
    N: tl.constexpr,  # noqa: N803
    BN: tl.constexpr,  # noqa: N803
):
    base = tl.program_id(0).to(tl.int64) * N * N
    i_n = tl.arange(0, N)
    rows = i_n[:, None]
    cols = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    b_x = tl.where(rows == cols, 1.0, 0.0)
    for i in range(1, N):
        b_a = tl.load(lower + base + i * N + i_n)
        b_a = tl.where(i_n < i, b_a, 0.0)
        b_r = tl.sum(b_a[:, None] * b_x, axis=0)
        b_x = tl.where(rows == i, b_x - b_r[None, :], b_x)
    tl.store(inverse + base + rows * N + cols, b_x)


def invert(lower: torch.Tensor) -> torch.Tensor:
    """`(I + lower)^-1` of fp32 `lower` `[..., N, N]`, N a power of two and at least 16.

    One warp owns 16 columns, so that the sums over rows need no barrier.
    """
    lower = lower.contiguous()
    inverse = torch.empty_like(lower)
    n = lower.shape[-1]
    grid = (lower.numel() // (n * n), n // _COLUMNS)
    _invert_kernel[grid](lower, inverse, N=n, BN=_COLUMNS, num_warps=1)
    return inverse
