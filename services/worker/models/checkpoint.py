"""Reads Hugging Face checkpoint directories: `config.json`, one or many safetensors files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from services.worker.models.cuts import Cut
from services.worker.models.errors import CheckpointError
from services.worker.models.quantisation import SCALE_SUFFIX, BlockScales

__all__ = ["SUFFIX", "Checkpoint", "CheckpointDirectory", "TensorHeader", "read_json"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_FP8 = "F8_E4M3"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; give the directory of a Hugging Face checkpoint") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error}); download the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; download the file again")
    return content


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file says of a tensor ahead of its bytes; dtype as safetensors spells it (`BF16`, `F32`, `F8_E4M3`)."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """What a family's loader asks for: tensors by name."""

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """One tensor of a shape that the config implies, or what a cut takes of it.

        Raises:
            CheckpointError: it is missing, damaged, or of another shape.
        """
        ...


class CheckpointDirectory:
    """Tensors of a directory, read one at a time onto the CPU; see `Checkpoint`. Use as a context manager.

    blocks: of the weights that are kept in fp8, None where the config quantises nothing.
    """

    def __init__(self, directory: Path, blocks: BlockScales | None = None) -> None:
        self.directory = directory
        self._blocks = blocks
        index_path = directory / _INDEX
        self._listing = index_path if index_path.exists() else directory / _SINGLE
        self._file_of = self._locate()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(kind, error, trace)
        self._open.clear()

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._file_of)

    def header(self, name: str) -> TensorHeader:
        """Shape and dtype of a tensor, whose bytes stay where they are.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self._path(name)
        try:
            entry = self._handle(path).get_slice(name)
            return TensorHeader(tuple(entry.get_shape()), str(entry.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise _damaged(path, name, error) from error

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """See `Checkpoint`; of a cut only its bytes are read, unless blocks of fp8 share scales across its edges."""
        path, found = self._path(name), self.header(name)
        if found.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {found.shape} where config.json implies {shape}; "
                "download config.json and the weights of one revision"
            )
        if found.dtype == _FP8 and self._blocks is not None and len(shape) >= 2:
            scales = self.read(name + SCALE_SUFFIX, self._blocks.shape(shape), torch.float32)
            whole = self._blocks.dequantise(self._bytes(name, None), scales).to(dtype)
            return whole if cut is None else cut.apply(whole)
        tensor = self._bytes(name, cut)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise CheckpointError(
                f"{path}: tensor {name} is {tensor.dtype}, which config.json does not announce in a supported "
                "quantization_config; use the bf16 release"
            )
        return tensor.to(dtype)

    def _bytes(self, name: str, cut: Cut | None) -> torch.Tensor:
        """A tensor, or what a cut takes of it, as the file has it."""
        path = self._path(name)
        try:
            handle = self._handle(path)
            if cut is None:
                tensor: torch.Tensor = handle.get_tensor(name)
                return tensor
            entry = handle.get_slice(name)
            return torch.cat([entry[cut.index(taken)] for taken in cut.ranges], dim=cut.axis)
        except (SafetensorError, OSError) as error:
            raise _damaged(path, name, error) from error

    def _path(self, name: str) -> Path:
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(
                f"{self._listing}: tensor {name} is missing; the checkpoint is incomplete, download every file of it"
            )
        return path

    def _handle(self, path: Path) -> Any:  # noqa: ANN401 # safetensors ships no types
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt").__enter__()
        return self._open[path]

    def _locate(self) -> Mapping[str, Path]:
        if self._listing.name == _INDEX:
            weight_map = read_json(self._listing).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{self._listing}: has no weight_map; download the file again")
            for name, file in weight_map.items():
                self._check_shard(name, file)
            return {name: self._shard(file) for name, file in weight_map.items()}
        path = self._shard(_SINGLE)
        try:
            with safe_open(path, framework="pt") as handle:
                return dict.fromkeys(handle.keys(), path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: damaged ({error}); download the file again") from error

    def _check_shard(self, name: str, file: object) -> None:
        """The model's revision is made of the directory's own files: weights from elsewhere could change unseen."""
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != SUFFIX:
            raise CheckpointError(
                f"{self._listing}: tensor {name} stands in {file!r}, which is no {SUFFIX} file of this directory; "
                "download the file again"
            )

    def _shard(self, file: str) -> Path:
        path = self.directory / file
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; download every shard of the checkpoint")
        return path


def _damaged(path: Path, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {name} is damaged ({error}); download the file again")
