"""Tiny checkpoints of every family, written by the public implementations."""

import copy
from pathlib import Path
from typing import Any

import torch

from tests.exactness.reference_model import ReferenceFamily
from tests.families import kimi_linear, llama, minimax, qwen3_5, qwen3_next, ring
from tests.families.variant import Variant

__all__ = ["VARIANTS", "CheckpointFactory", "Variant", "reference_logits"]

VARIANTS: tuple[Variant, ...] = (
    *qwen3_5.VARIANTS,
    *qwen3_next.VARIANTS,
    *llama.VARIANTS,
    *kimi_linear.VARIANTS,
    *minimax.VARIANTS,
    *ring.VARIANTS,
)


class CheckpointFactory:
    """Builds a variant's public model and checkpoint directory on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Any] = {}

    def model(self, variant: Variant) -> Any:  # noqa: ANN401 # transformers ships no types
        """The public implementation, in fp32 on the CPU."""
        if variant.name not in self._models:
            model = variant.build(variant.config)
            if hasattr(model, "set_experts_implementation"):
                # The default is torch's grouped product, which takes no fp64.
                model.set_experts_implementation("eager")
            model.save_pretrained(self._root / variant.name)
            self._models[variant.name] = model
        return self._models[variant.name]

    def directory(self, variant: Variant) -> Path:
        """The checkpoint directory as the public implementation wrote it."""
        self.model(variant)
        return self._root / variant.name

    def taken_apart(self, variant: Variant) -> ReferenceFamily:
        """The public implementation in fp64, as its parts."""
        return variant.take_apart(copy.deepcopy(self.model(variant)).double())


@torch.inference_mode()
def reference_logits(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 # transformers ships no types
    """The public implementation's logits `[N, vocabulary]` of a whole prompt."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float()
