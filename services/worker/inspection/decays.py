"""How long linear layers remember: the product of a head's decays over a body, which bounds the body's transition.

Where it is negligible the body forgets what came before it, and the transition does not matter (design §3).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F

from services.worker.mixers.shapes import StateShape, TransitionKind
from services.worker.models.checkpoint import CheckpointDirectory
from services.worker.models.spec import ModelSpec

__all__ = ["BODY_TOKENS", "DecayReport", "DecaySource", "DecaySpectrum", "fixed_rates", "resting_rates", "spectrum"]

BODY_TOKENS = (64, 256, 1024)
NEGLIGIBLE = 0.01
_RATE, _STEP = ".A_log", ".dt_bias"
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class DecaySource(StrEnum):
    """Where decays come from: the config alone; gates at rest, `A_log` and `dt_bias` alone; a text that was captured."""

    FIXED = "fixed"
    RESTING = "resting"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class DecaySpectrum:
    """Over bodies of so many tokens: heads whose product of decays exceeds 0.01, and its quantiles 0, ¼, ½, ¾, 1.

    A head with a decay for every channel counts with its slowest one.
    """

    body_tokens: int
    num_remembering: int
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DecayReport:
    """Heads of all linear layers together."""

    source: DecaySource
    num_heads: int
    spectra: tuple[DecaySpectrum, ...]

    @classmethod
    def from_rates(cls, source: DecaySource, rates: Sequence[float]) -> "DecayReport":
        """From `−ln a` of one token, a head: every token decays alike."""
        decays = {body: [float(torch.tensor(-rate * body).exp()) for rate in rates] for body in BODY_TOKENS}
        return cls(source, len(rates), tuple(spectrum(body, values) for body, values in decays.items()))


def spectrum(body_tokens: int, decays: Sequence[float]) -> DecaySpectrum:
    """Of every head's product of decays over a body."""
    values = torch.tensor(decays, dtype=torch.float64)
    quantiles = values.quantile(torch.tensor(_QUANTILES, dtype=torch.float64)).tolist()
    return DecaySpectrum(body_tokens, int((values > NEGLIGIBLE).sum()), tuple(quantiles))


def fixed_rates(spec: ModelSpec) -> list[float]:
    """`−ln a` of every head of the layers whose decays follow from the config; empty where they depend on the input."""
    rates: list[float] = []
    for layer in spec.layers:
        kept = layer.mixer.kept
        if isinstance(kept, StateShape) and kept.transition is TransitionKind.SCALAR:
            rates += getattr(layer.mixer, "slopes", ())
    return rates


def resting_rates(checkpoint: CheckpointDirectory, names: Iterable[str]) -> list[float]:
    """`−ln a = e^(A_log) · softplus(dt_bias)` of every head, its slowest channel: the gate of an input that adds nothing.

    names: the tensors that the model reads; only these two small ones of a layer are read here. Sources: Gated DeltaNet
    (arXiv 2412.06464), Kimi delta attention (arXiv 2510.26692).
    """
    rates: list[float] = []
    for name in names:
        if name.endswith(_RATE):
            rate = _read(checkpoint, name).exp()
            steps = F.softplus(_read(checkpoint, name.removesuffix(_RATE) + _STEP))
            rates += (rate[:, None] * steps.reshape(rate.numel(), -1)).amin(dim=1).tolist()
    return rates


def _read(checkpoint: CheckpointDirectory, name: str) -> torch.Tensor:
    return checkpoint.read(name, checkpoint.header(name).shape, torch.float32).flatten()
