"""Weights in fp8 (e4m3) with one scale a block, as `quant_method` fp8 releases keep them: they are dequantised when read.

A tensor `name` stands beside its scales `name_scale_inv`; blocks at the edge of a matrix may be smaller. What a release keeps
in bf16 (`modules_to_not_convert`) is told by its dtype. Any other quantisation is refused. Source of the format: the released
DeepSeek-V3 and Qwen fp8 checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.models.fields import ConfigFields

__all__ = ["SCALE_SUFFIX", "BlockScales", "read_block_scales"]

SCALE_SUFFIX = "_scale_inv"
_REMEDY = "use the bf16 release, or an fp8 one with block scales (quant_method fp8)"


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Rows and columns of the blocks that share a scale."""

    rows: int
    columns: int

    def shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a weight `[..., R, C]`: `[..., ⌈R / rows⌉, ⌈C / columns⌉]`."""
        *matrices, rows, columns = weight
        return (*matrices, ceil(rows / self.rows), ceil(columns / self.columns))

    def dequantise(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Weight `[..., R, C]` in fp8 times its scales in fp32; see `shape`."""
        rows, columns = weight.shape[-2:]
        whole = F.pad(weight.float(), (0, -columns % self.columns, 0, -rows % self.rows))
        blocks = whole.unflatten(-1, (-1, self.columns)).unflatten(-3, (-1, self.rows))
        scaled: torch.Tensor = blocks * scales[..., :, None, :, None]
        return scaled.flatten(-2).flatten(-3, -2)[..., :rows, :columns]


def read_block_scales(config: Mapping[str, Any]) -> BlockScales | None:
    """The blocks of a config's quantised weights, None where it quantises nothing.

    Raises:
        CheckpointError: the weights are quantised in another way.
    """
    fields = ConfigFields(config)
    # What other tools write: MLX the first, early compressed-tensors the second.
    for name in ("quantization", "compression_config"):
        if fields.has(name):
            raise fields.error(name, f"names a quantisation that is not supported; {_REMEDY}")
    holder = fields if fields.has("quantization_config") else fields.section("text_config")
    if not holder.has("quantization_config"):
        return None
    quantised = holder.section("quantization_config")
    quantised.choice("quant_method", ["fp8"], None, _REMEDY)
    quantised.choice("fmt", ["e4m3"], "e4m3", _REMEDY)
    quantised.choice("activation_scheme", ["dynamic"], "dynamic", _REMEDY)
    size = quantised.integers("weight_block_size") if quantised.has("weight_block_size") else []
    if len(size) != 2 or min(size) < 1:
        raise quantised.error("weight_block_size", f"must be rows and columns of a block, not {size}; {_REMEDY}")
    return BlockScales(*size)
