"""Tiny public models whose gates remember.

With default random weights the gates forget everything within a few tokens, and a wrong transition passes every test.
Here each head keeps between 5 and 95 % over bodies of 16 to 200 tokens; `tests.exactness.rig` asserts it.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.exactness.reference_model import ReferenceFamily

__all__ = ["FASTEST", "SLOWEST", "VOCAB_SIZE", "Variant", "randomise", "transformers_library"]

# Decay a token of the slowest and the fastest head: e^(−0.0035·16) = 0.95, e^(−0.0145·200) = 0.055.
SLOWEST, FASTEST = 0.0035, 0.0145
VOCAB_SIZE = 211


@dataclass(frozen=True, slots=True)
class Variant:
    """One tiny shape of one family.

    build: the public model in fp32 from `config`, with `save_pretrained`; take_apart: a public model in fp64 as its parts.
    """

    name: str
    build: Callable[[Mapping[str, Any]], Any]
    take_apart: Callable[[Any], ReferenceFamily]
    config: Mapping[str, Any] = field(hash=False)


def transformers_library() -> Any:  # noqa: ANN401 # transformers ships no types
    """Imported on first use: it takes seconds, and most tests need no model."""
    with warnings.catch_warnings():
        # transformers probes optional packages whose imports warn; none of them is used here.
        warnings.simplefilter("ignore")
        import transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def randomise(model: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """Weights large enough that every layer matters, and norm weights that differ from their default."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.2 * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * (0.25 if "embed" in name else parameter.shape[-1] ** -0.5))
