"""One tensor of one layer as bytes."""

from dataclasses import dataclass

__all__ = ["ITEM_BYTES", "Buffer", "Plane"]

Buffer = bytes | bytearray | memoryview

# By safetensors' names.
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """dtype is safetensors' name; data is row-major, little-endian."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
