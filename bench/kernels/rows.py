"""What is bound by reading and writing rows once: the short convolution and the norms."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from bench.kernels.case import Case, Timed, draw
from services.worker.ops.layout import PartWalk
from services.worker.ops.norm import naive as norms
from services.worker.ops.norm import triton as norm_kernels
from services.worker.ops.short_conv import ConvResult, chunked, naive
from services.worker.ops.short_conv import triton as conv_kernels

__all__ = ["small_cases", "true_cases"]

_TAPS = 4
_EPS = 1e-6


def _walk(
    form: ModuleType, rows: torch.Tensor, weight: torch.Tensor, parts: PartWalk, tails: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    result: ConvResult = form.walk(rows, weight, parts, tails[0][None], [*tails[1:], None], (0,))
    return [result.outputs, result.tails, result.kept[0]]


def _walk_case(
    bodies: int, live: int, channels: int, form: ModuleType, dtype: torch.dtype, device: torch.device
) -> Case:
    """One request; the last part is ten runs long and has no body. Rows are part of wider ones."""
    tokens = (bodies + 10) * live
    parts = PartWalk((*range(0, (bodies + 1) * live, live), tokens), (0, bodies + 1))
    rows = draw(tokens, channels + 64, device=device, dtype=dtype)[:, :channels]
    weight = draw(channels, _TAPS, device=device, dtype=dtype)
    tails = list(draw(bodies + 1, _TAPS - 1, channels, device=device, dtype=dtype))
    return Case(
        f"convolution, {tokens} tokens, {bodies} bodies",
        lambda: _walk(conv_kernels, rows, weight, parts, tails),
        lambda: _walk(form, rows.float(), weight.float(), parts, [tail.float() for tail in tails]),
        1e-2 if dtype == torch.bfloat16 else 1e-5,
        Timed(lambda: _walk(conv_kernels, rows, weight, parts, tails), 2 * tokens * channels * dtype.itemsize),
    )


def _step_case(requests: int, channels: int, form: ModuleType, dtype: torch.dtype, device: torch.device) -> Case:
    rows, weight = (
        draw(requests, channels, device=device, dtype=dtype),
        draw(channels, _TAPS, device=device, dtype=dtype),
    )
    tails, slots = draw(requests + 1, _TAPS - 1, channels, device=device, dtype=dtype), torch.arange(requests, 0, -1)
    placed = slots.to(device)

    def run(own: ModuleType, kind: torch.dtype) -> list[torch.Tensor]:
        advanced = tails.to(kind, copy=True)
        return [own.step(rows.to(kind), weight.to(kind), advanced, placed), advanced]

    return Case(
        f"convolution, step, {requests} requests",
        lambda: run(conv_kernels, dtype),
        lambda: run(form, torch.float32),
        1e-2 if dtype == torch.bfloat16 else 1e-5,
        Timed(
            lambda: conv_kernels.step(rows, weight, tails, placed),
            2 * requests * _TAPS * channels * dtype.itemsize,
        ),
    )


def _norm_cases(
    tokens: int, hidden: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Iterator[Case]:
    rows, weight = draw(tokens, hidden, device=device, dtype=dtype), draw(hidden, device=device, dtype=dtype)
    mixed, gate = (draw(tokens, *heads, device=device, dtype=dtype).roll(shift, 0) for shift in (0, 1))
    head_weight = draw(heads[1], device=device, dtype=dtype)
    keys = draw(tokens, 2 * heads[0], heads[1], device=device)[:, : heads[0]]
    calls: dict[str, tuple[Callable[[ModuleType, torch.dtype], torch.Tensor], int]] = {
        f"norm, {tokens} x {hidden}": (
            lambda form, kind: form.rms_norm(rows.to(kind), weight.to(kind), _EPS), 2 * rows.numel() * dtype.itemsize,
        ),
        f"gated norm, {tokens} x {heads[0]} x {heads[1]}": (
            lambda form, kind: form.gated_rms_norm(mixed.to(kind), gate.to(kind), head_weight.to(kind), _EPS),
            3 * mixed.numel() * dtype.itemsize,
        ),
        f"unit norm of keys in fp32, {tokens} x {heads[0]} x {heads[1]}": (
            lambda form, kind: form.l2_norm(keys), 2 * keys.numel() * keys.itemsize
        ),
    }  # fmt: skip
    for name, (call, size) in calls.items():
        yield _norm_case(name, call, size, dtype)


def _norm_case(
    name: str, call: Callable[[ModuleType, torch.dtype], torch.Tensor], num_bytes: int, dtype: torch.dtype
) -> Case:
    return Case(
        name,
        lambda: [call(norm_kernels, dtype)],
        lambda: [call(norms, torch.float32)],
        1e-2 if dtype == torch.bfloat16 else 1e-5,
        Timed(lambda: call(norm_kernels, dtype), num_bytes),
    )


def small_cases(device: torch.device) -> Iterator[Case]:
    """Against the naive forms."""
    yield _walk_case(2, 2, 40, naive, torch.float32, device)
    yield _step_case(3, 40, naive, torch.float32, device)
    yield from _norm_cases(3, 72, (3, 20), torch.float32, device)


def true_cases(device: torch.device) -> Iterator[Case]:
    """In bf16 against the chunked and torch forms in fp32."""
    for bodies, live in ((16, 32), (16, 1260)):
        yield _walk_case(bodies, live, 8192, chunked, torch.bfloat16, device)
    for requests in (1, 64):
        yield _step_case(requests, 8192, chunked, torch.bfloat16, device)
    for tokens in (64, 32768):
        yield from _norm_cases(tokens, 2048, (32, 128), torch.bfloat16, device)
