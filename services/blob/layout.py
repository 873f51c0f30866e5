"""The layout of a segment state: a safetensors file with a header of its own inside, planes layer by layer.

```
8 bytes            length of the JSON, little-endian
JSON               safetensors' header; `__metadata__.hypic` holds this package's (see `StateHeader`), again as JSON
32 bytes           plane `header_checksum`: BLAKE3 of everything before it
planes             layer after layer, each with a BLAKE3 in the header
```

Every byte is under one checksum, and the header's checksum is read before anything of the header is believed. Any reader
of safetensors opens the file; its tensors are named `layers.<layer>.<plane>`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from blake3 import blake3

from services.blob.errors import DamagedBlobError, ForeignBlobError
from services.blob.planes import ITEM_BYTES, Buffer, Plane

__all__ = ["CHECKSUM_BYTES", "LAYOUT_VERSION", "PlaneHeader", "StateHeader", "parse_header", "write_state"]

# Grows whenever the same tokens would leave other bytes on some device: planes, their encoding, the order of rounding and
# so the chunks of capture. Devices round differently under one version: each state is written once, by one of them.
LAYOUT_VERSION = 5
CHECKSUM_BYTES = 32

_CHECKSUM = "header_checksum"
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PlaneHeader:
    """Where a plane lies: `size` bytes at `offset` of the blob. checksum: BLAKE3 of them. dtype: safetensors' name."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class StateHeader:
    """What a blob says of itself.

    layers: what every layer of the model keeps, `linear` or `attention`, in order; encoding: how transitions and end states
    are written (`StateEncoding`), by field; receipt: the directory's signed description of this copy, empty where there is
    none; planes: layer by layer.
    """

    model_revision: str
    profile_digest: str
    token_ids: tuple[int, ...]
    seam_window: int
    layers: tuple[str, ...]
    encoding: Mapping[str, str | float]
    planes: tuple[PlaneHeader, ...] = ()
    receipt: bytes = b""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    def of_layer(self, layer: int) -> tuple[PlaneHeader, ...]:
        """The planes of one layer, in the order of their bytes."""
        return tuple(plane for plane in self.planes if plane.layer == layer)

    def check_origin(self, model_revision: str, profile_digest: str) -> None:
        """Refuse a state of another model or profile.

        Raises:
            ForeignBlobError: it is one.
        """
        for field, found, wanted in (
            ("model_revision", self.model_revision, model_revision),
            ("profile_digest", self.profile_digest, profile_digest),
        ):
            if found != wanted:
                raise ForeignBlobError(f"{field} is {found}, not {wanted}; the state is computed anew")

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse a state of other tokens.

        Raises:
            ForeignBlobError: it is one.
        """
        if self.token_ids != tuple(token_ids):
            raise ForeignBlobError(
                f"token_ids are {len(self.token_ids)} others than the segment's {len(token_ids)}; computed anew"
            )


def write_state(header: StateHeader, planes: Sequence[Plane]) -> list[Buffer]:
    """The blob in pieces: its header, then every plane. `header.planes` is filled in here.

    Raises:
        ValueError: planes do not go from layer to layer in order, or a plane has not the bytes that its shape says.
    """
    if any(before.layer > after.layer for before, after in pairwise(planes)):
        raise ValueError("planes must come layer by layer")
    described: list[PlaneHeader] = []
    offset = CHECKSUM_BYTES
    for plane in planes:
        if plane.layer >= header.num_layers or len(plane.data) != math.prod(plane.shape) * ITEM_BYTES[plane.dtype]:
            raise ValueError(f"plane {plane.name} of layer {plane.layer} does not fit its header")
        size, checksum = len(plane.data), blake3(plane.data).digest()
        described.append(PlaneHeader(plane.layer, plane.name, plane.dtype, plane.shape, offset, size, checksum))
        offset += size
    prefix = _prefix(replace(header, planes=tuple(described)))
    return [prefix, blake3(prefix).digest(), *(plane.data for plane in planes)]


def _prefix(header: StateHeader) -> bytes:
    """Length and JSON; offsets of `header` count from the end of it, as safetensors' do."""
    own = {
        "version": LAYOUT_VERSION,
        "model_revision": header.model_revision,
        "profile_digest": header.profile_digest,
        "token_ids": header.token_ids,
        "seam_window": header.seam_window,
        "layers": header.layers,
        "encoding": dict(header.encoding),
        "receipt": header.receipt.hex(),
        "checksums": [plane.checksum.hex() for plane in header.planes],
    }
    content: dict[str, Any] = {"__metadata__": {"hypic": json.dumps(own, separators=(",", ":"))}}
    content[_CHECKSUM] = {"dtype": "U8", "shape": [CHECKSUM_BYTES], "data_offsets": [0, CHECKSUM_BYTES]}
    for plane in header.planes:
        offsets = [plane.offset, plane.offset + plane.size]
        content[f"layers.{plane.layer}.{plane.name}"] = {
            "dtype": plane.dtype,
            "shape": plane.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse_header(prefix: bytes, checksum: bytes, blob_size: int) -> StateHeader:
    """The header of a blob of `blob_size` bytes; prefix: everything before its checksum. Offsets count from the blob's start.

    Raises:
        DamagedBlobError: the checksum does not fit, or the blob is shorter or longer than the header says.
        ForeignBlobError: another layout version.
    """
    if blake3(prefix).digest() != checksum:
        raise DamagedBlobError("the header does not fit its checksum")
    try:
        return _parse(prefix, blob_size)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedBlobError(f"the header is not of this layout: {error}") from error


def _parse(prefix: bytes, blob_size: int) -> StateHeader:
    content = json.loads(prefix[8:])
    own = json.loads(content.pop("__metadata__")["hypic"])
    if own["version"] != LAYOUT_VERSION:
        raise ForeignBlobError(f"version is {own['version']}, not {LAYOUT_VERSION}; the state is computed anew")
    del content[_CHECKSUM]
    planes = tuple(
        _plane(name, fields, len(prefix), bytes.fromhex(own_checksum))
        for (name, fields), own_checksum in zip(content.items(), own["checksums"], strict=True)
    )
    end = planes[-1].offset + planes[-1].size if planes else len(prefix) + CHECKSUM_BYTES
    if end != blob_size:
        raise DamagedBlobError(f"{blob_size} bytes are there of {end}")
    return StateHeader(
        model_revision=own["model_revision"],
        profile_digest=own["profile_digest"],
        token_ids=tuple(own["token_ids"]),
        seam_window=own["seam_window"],
        layers=tuple(own["layers"]),
        encoding=own["encoding"],
        planes=planes,
        receipt=bytes.fromhex(own["receipt"]),
    )


def _plane(name: str, fields: Mapping[str, Any], start: int, checksum: bytes) -> PlaneHeader:
    _, layer, plane = name.split(".", 2)
    first, end = fields["data_offsets"]
    return PlaneHeader(int(layer), plane, fields["dtype"], tuple(fields["shape"]), start + first, end - first, checksum)
