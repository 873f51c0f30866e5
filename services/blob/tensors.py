"""Planes to tensors and back, bit by bit."""

import torch

from services.blob.planes import Plane

__all__ = ["plane_of", "tensor_of"]

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def plane_of(layer: int, name: str, tensor: torch.Tensor) -> Plane:
    """A tensor of any device as a plane."""
    data = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return Plane(layer, name, _NAMES[tensor.dtype], tuple(tensor.shape), data)


def tensor_of(plane: Plane) -> torch.Tensor:
    """A plane as a tensor of host memory: the plane's own where that may be written, else a copy."""
    if not plane.data:
        return torch.empty(plane.shape, dtype=_DTYPES[plane.dtype])
    data = bytearray(plane.data) if memoryview(plane.data).readonly else plane.data
    return torch.frombuffer(data, dtype=torch.uint8).view(_DTYPES[plane.dtype]).view(plane.shape)
