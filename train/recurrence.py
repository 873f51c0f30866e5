"""The two sequential pieces of the chunked gated delta rule, each with its own backward.

Inside a chunk of 64 tokens the rule is a unit lower-triangular solve; between chunks the state
follows `h <- T h + S`. Both stay outside the compiled regions.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

CHUNK = 64


class _Context(Protocol):
    """What a forward pass leaves to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    rows: int

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps tensors."""


@torch.library.custom_op("hypic_train::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(lower: Tensor) -> Tensor:
    """`(I + lower)^-1` of strictly lower `lower` `[..., 64, 64]`, fp32."""
    if lower.is_cuda:
        from train.triton_inverse import invert

        return invert(lower)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    identity = eye.expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower + eye, identity, upper=False, unitriangular=True)
    return cast(Tensor, inverse)


@unit_lower_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower)


def _save_inverse(ctx: _Context, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: _Context, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_save_inverse)


class ChunkScan(torch.autograd.Function):
    """States at the chunks' starts from transitions and end states.

    `transition` and `end_state` are `[rows * chunks, heads, 64, 64]` in row order, fp32; so is
    the result. Every row starts from zero.
    """

    @staticmethod
    def forward(ctx: _Context, transition: Tensor, end_state: Tensor, rows: int) -> Tensor:
        """Runs the chunks of all rows and heads side by side."""
        t, s = _by_chunk(transition, rows), _by_chunk(end_state, rows)
        h = torch.empty_like(t)
        h[0].zero_()
        for chunk in range(len(t) - 1):
            torch.baddbmm(s[chunk], t[chunk], h[chunk], out=h[chunk + 1])
        ctx.save_for_backward(t, h)
        ctx.rows = rows
        return _by_row(h, transition)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Runs the adjoint recurrence from the last chunk to the first."""
        t, h = ctx.saved_tensors
        (grad,) = grads
        g = _by_chunk(grad, ctx.rows)
        g_end = torch.zeros_like(g)
        running = g[-1]
        for chunk in range(len(t) - 2, -1, -1):
            g_end[chunk].copy_(running)
            running = torch.baddbmm(g[chunk], t[chunk].transpose(1, 2), running)
        shape = (-1, CHUNK, CHUNK)
        g_transition = torch.bmm(g_end.view(shape), h.view(shape).transpose(1, 2)).view_as(h)
        return _by_row(g_transition, grad), _by_row(g_end, grad), None


def _by_chunk(x: Tensor, rows: int) -> Tensor:
    chunks = x.shape[0] // rows
    x = x.view(rows, chunks, *x.shape[1:]).transpose(0, 1).contiguous()
    return x.view(chunks, -1, CHUNK, CHUNK)


def _by_row(x: Tensor, like: Tensor) -> Tensor:
    chunks, heads = x.shape[0], like.shape[1]
    x = x.view(chunks, -1, heads, CHUNK, CHUNK).transpose(0, 1)
    return x.reshape(like.shape)
