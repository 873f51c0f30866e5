"""The short convolution over all runs at once: every run is laid out behind its tail, then shifted products are summed."""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.layout import PartWalk
from services.worker.ops.short_conv.types import ConvResult

__all__ = ["step", "walk"]


def walk(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    parts: PartWalk,
    tails: torch.Tensor,
    body_tails: Sequence[torch.Tensor | None],
    keep_after: Collection[int] = (),
) -> ConvResult:
    """As `naive.walk`."""
    history = weight.shape[1] - 1
    padded: list[torch.Tensor] = []
    end_tails: list[torch.Tensor] = []
    kept: dict[int, torch.Tensor] = {}
    for request in range(len(parts.cu_parts) - 1):
        tail = tails[request]
        for part in parts.parts_of(request):
            run = inputs[parts.run(part)]
            padded += [tail, run]
            tail = _last_rows(tail, run, history)
            stored = body_tails[part]
            if stored is not None:
                tail = stored
            if part in keep_after:
                kept[part] = tail.clone()
        end_tails.append(tail)
    laid_out = torch.cat(padded)
    summed = _shifted_sum(laid_out, weight)
    return ConvResult(summed[_token_rows(parts, history, inputs.device)], torch.stack(end_tails), kept)


def _last_rows(tail: torch.Tensor, run: torch.Tensor, history: int) -> torch.Tensor:
    if run.shape[0] >= history:
        return run[run.shape[0] - history :]
    return torch.cat([tail[run.shape[0] :], run])


def _shifted_sum(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[M, C]` to `[M, C]`; the first `K − 1` rows have no full window and are not meaningful."""
    taps = weight.shape[1]
    summed = torch.zeros_like(rows)
    full = summed[taps - 1 :]
    for tap in range(taps):
        full.addcmul_(rows[tap : rows.shape[0] - taps + 1 + tap], weight[:, tap])
    return summed


def _token_rows(parts: PartWalk, history: int, device: torch.device) -> torch.Tensor:
    """The row of every token in the layout of tail and run, part after part."""
    lengths = torch.tensor(parts.cu_runs).diff()
    shifts = torch.arange(1, parts.num_parts + 1) * history
    return (torch.arange(parts.num_tokens) + shifts.repeat_interleave(lengths)).to(device)


def step(inputs: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`, all requests at once."""
    windows = torch.cat([tails[slots], inputs[:, None]], dim=1)
    tails[slots] = windows[:, 1:]
    return (windows * weight.T).sum(1)
