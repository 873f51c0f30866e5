"""Muon for the matrices, Adam for everything else; both can run inside a CUDA graph."""

import torch
from torch import Tensor

from train.shape import Weights

_SMALL = ("embed", "a", "b", "conv")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices of `[n, r, c]`, r <= c.

    The coefficients are Keller Jordan's (Muon, 2024).
    """
    a, b, c = _COEFFICIENTS
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Momentum, orthogonalised; matrices of one shape (up to transposition) go together."""

    def __init__(self, matrices: list[Tensor], learning_rate: Tensor, momentum: float) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            groups.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
        self._groups = list(groups.values())
        self._momentum = momentum
        self._learning_rate = learning_rate
        self._buffers = [torch.zeros(len(g), *sorted(g[0].shape), device=g[0].device) for g in self._groups]

    @torch.no_grad()
    def step(self) -> None:
        """One update from the matrices' gradients."""
        for matrices, buffer in zip(self._groups, self._buffers, strict=True):
            grads = torch.stack([_wide(m.grad) for m in matrices if m.grad is not None])
            buffer.lerp_(grads, 1 - self._momentum)
            update = orthogonalised(grads.lerp(buffer, self._momentum)).float()
            for matrix, change in zip(matrices, update.unbind(), strict=True):
                rows, columns = matrix.shape
                scale = max(1.0, rows / columns) ** 0.5
                change = change.t() if rows > columns else change
                matrix.sub_(change * (self._learning_rate * scale))


def _wide(x: Tensor) -> Tensor:
    return x.t() if x.shape[0] > x.shape[1] else x


class Optimiser:
    """Both optimisers; `rate` scales their learning rates and is a tensor on the device."""

    def __init__(self, weights: Weights, muon_rate: float, adam_rate: float) -> None:
        matrices = [w for n, w in weights.items() if w.ndim == 2 and _leaf(n) not in _SMALL]
        others = [w for n, w in weights.items() if w.ndim != 2 or _leaf(n) in _SMALL]
        device = weights["embed"].device
        self._rates = (muon_rate, adam_rate)
        self._muon_rate = torch.tensor(muon_rate, device=device)
        self._adam_rate = torch.tensor(adam_rate, device=device)
        self._weights = list(weights.values())
        self._muon = Muon(matrices, self._muon_rate, momentum=0.95)
        self._adam = torch.optim.Adam(
            others,
            lr=self._adam_rate,
            betas=(0.9, 0.98),
            eps=1e-10,
            fused=True,
            capturable=device.type == "cuda",
        )

    def set_rate(self, factor: float) -> None:
        """Scales both learning rates, from 0 to 1."""
        self._muon_rate.fill_(self._rates[0] * factor)
        self._adam_rate.fill_(self._rates[1] * factor)

    def step(self) -> None:
        """One update of every weight from its gradient."""
        self._muon.step()
        self._adam.step()

    def forget_gradients(self) -> None:
        """Drops all gradients."""
        for weight in self._weights:
            weight.grad = None


def _leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]
