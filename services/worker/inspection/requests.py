"""What a family's loader asks of a checkpoint: the loader itself is the description, run where tensors have no memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from services.worker.mixers.share import WHOLE, Share
from services.worker.mixers.state import DeviceMemory
from services.worker.models.cuts import Cut
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import Family
from services.worker.models.spec import ModelSpec

__all__ = ["RecordingCheckpoint", "TensorRequest", "record_requests"]

# In values: what torch still counts in bytes, with room for several of them side by side.
_LARGEST_TENSOR = 1 << 50


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """The shape that the config implies, and the dtype in which the model holds the tensor; held: what a rank takes of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Its values."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """What the rank's part takes once loaded."""
        return torch.Size(self.held).numel() * self.dtype.itemsize


class RecordingCheckpoint:
    """Answers every read with a tensor without memory, and notes it; see `Checkpoint`.

    names: those of the files, where there are any; loaders choose between layouts by them.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.requests: dict[str, TensorRequest] = {}
        self._names = names

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._names

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """See `Checkpoint`; fails only where no file could hold the tensor."""
        if prod(shape) > _LARGEST_TENSOR:
            raise CheckpointError(
                f"config.json: implies a tensor {name} of shape {shape}, larger than any file; download it again"
            )
        held = shape if cut is None else cut.shape(shape)
        self.requests[name] = TensorRequest(shape, dtype, held)
        return torch.empty(held, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class _Alone:
    """A rank whose others are not there; see `Ranks`."""

    share: Share

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return partial


def record_requests(
    family: Family, spec: ModelSpec, dtype: torch.dtype, names: frozenset[str], share: Share = WHOLE
) -> Mapping[str, TensorRequest]:
    """Every tensor that loading a share of a model in `dtype` reads, by name.

    Raises:
        SplitError: the model has no such share.
    """
    checkpoint = RecordingCheckpoint(names)
    memory = DeviceMemory(torch.device("meta"), dtype, num_pages=1, page_size=1, num_slots=1, ranks=_Alone(share))
    family.load_model(spec, checkpoint, memory)
    return checkpoint.requests
