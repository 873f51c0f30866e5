"""The layout of a segment state: what is written is read, and no byte can differ without being seen."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from services.blob import layout
from services.blob.errors import BlobError, DamagedBlobError, ForeignBlobError
from services.blob.layout import StateHeader, write_state
from services.blob.planes import Plane
from services.blob.reader import BytesSource, StateReader
from services.blob.tensors import plane_of, tensor_of

HEADER = StateHeader(
    model_revision="m1",
    profile_digest="p1",
    token_ids=(5, 3, 2**31 - 1),
    seam_window=1,
    layers=("linear", "attention", "linear"),
    encoding={"end_state": "float8", "slow_decay": 0.1},
    receipt=b"\x00signed",
)
PLANES = (
    plane_of(0, "end_state", torch.randn(2, 4, 3)),
    plane_of(0, "transition", torch.empty(0, 4, 4)),
    plane_of(0, "conv_tail", torch.randn(3, 5).bfloat16()),
    plane_of(1, "keys", torch.randn(7, 1, 4)),
    plane_of(1, "values", torch.randn(7, 1, 3)),
    plane_of(2, "end_state", torch.randn(2, 4, 3).to(torch.float8_e4m3fn)),
    plane_of(2, "end_state_exponents", torch.randint(-9, 9, (2, 4), dtype=torch.int8)),
)


def _blob(header: StateHeader = HEADER, planes: Sequence[Plane] = PLANES) -> bytes:
    return b"".join(write_state(header, planes))


def _read(blob: bytes) -> tuple[StateHeader, list[Plane]]:
    reader = StateReader(BytesSource(blob))
    return reader.header, [plane for layer in reader.layers() for plane in layer]


def test_what_is_written_is_read() -> None:
    header, planes = _read(_blob())
    assert replace(header, planes=()) == HEADER
    assert planes == list(PLANES)
    assert [plane.layer for plane in header.planes] == sorted(plane.layer for plane in header.planes)


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=9),
    shapes=st.lists(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=3), max_size=4),
    receipt=st.binary(max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_any_state_is_read_as_it_was_written(
    token_ids: list[int], shapes: list[list[list[int]]], receipt: bytes
) -> None:
    planes = [
        plane_of(layer, f"plane_{index}", torch.rand(shape))
        for layer, own in enumerate(shapes)
        for index, shape in enumerate(own)
    ]
    header = replace(HEADER, token_ids=tuple(token_ids), layers=("linear",) * len(shapes), receipt=receipt)
    again, read = _read(_blob(header, planes))
    assert replace(again, planes=()) == header
    assert read == planes
    for plane in planes:
        assert torch.equal(tensor_of(plane), tensor_of(plane_of(plane.layer, plane.name, tensor_of(plane))))


def test_every_flipped_byte_is_seen() -> None:
    """All bytes, not a sample: length, JSON, checksum and planes."""
    blob = bytearray(_blob())
    for place in range(len(blob)):
        blob[place] ^= 1 << place % 8
        with pytest.raises(BlobError):
            _read(bytes(blob))
        blob[place] ^= 1 << place % 8
    assert _read(bytes(blob))[1] == list(PLANES)


def test_every_truncation_and_every_addition_is_seen() -> None:
    blob = _blob()
    for size in range(len(blob)):
        with pytest.raises(DamagedBlobError):
            StateReader(BytesSource(blob[:size]))
    with pytest.raises(DamagedBlobError, match="bytes are there"):
        StateReader(BytesSource(blob + b"\0"))


@pytest.mark.parametrize("text", [b"[]", b"{}", b'{"__metadata__":{"hypic":"{}"}}', b"\xff"])
def test_a_header_of_something_else(text: bytes) -> None:
    """Even one whose checksum fits."""
    prefix = len(text).to_bytes(8, "little") + text
    with pytest.raises(DamagedBlobError, match="not of this layout"):
        StateReader(BytesSource(prefix + blake3(prefix).digest()))


def test_damage_in_one_layer_leaves_the_others() -> None:
    blob = bytearray(_blob())
    blob[-1] ^= 1
    reader = StateReader(BytesSource(bytes(blob)))
    assert reader.read_layer(0) == [plane for plane in PLANES if plane.layer == 0]
    with pytest.raises(DamagedBlobError, match="end_state_exponents of layer 2"):
        reader.read_layer(2)


def test_later_layers_alone() -> None:
    reader = StateReader(BytesSource(_blob()))
    assert [plane for layer in reader.layers(1) for plane in layer] == [own for own in PLANES if own.layer >= 1]
    assert list(reader.layers(3)) == []


def test_another_version_model_profile_or_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    header, _ = _read(_blob())
    header.check_origin("m1", "p1")
    header.check_tokens(HEADER.token_ids)
    with pytest.raises(ForeignBlobError, match="model_revision is m1, not m2"):
        header.check_origin("m2", "p1")
    with pytest.raises(ForeignBlobError, match="profile_digest is p1, not p2"):
        header.check_origin("m1", "p2")
    with pytest.raises(ForeignBlobError, match="token_ids"):
        header.check_tokens((5, 3, 4))
    blob = _blob()
    monkeypatch.setattr(layout, "LAYOUT_VERSION", layout.LAYOUT_VERSION + 1)
    with pytest.raises(ForeignBlobError, match="version"):
        _read(blob)


def test_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(_blob())
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == {"header_checksum", *(f"layers.{own.layer}.{own.name}" for own in PLANES)}
        for plane in PLANES:
            found = opened.get_tensor(f"layers.{plane.layer}.{plane.name}")
            assert plane_of(plane.layer, plane.name, found) == plane


def test_planes_that_do_not_fit_are_not_written() -> None:
    with pytest.raises(ValueError, match="layer by layer"):
        write_state(HEADER, PLANES[::-1])
    with pytest.raises(ValueError, match="does not fit"):
        write_state(HEADER, [replace(PLANES[0], data=b"")])
