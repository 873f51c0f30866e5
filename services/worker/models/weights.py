"""Weights onto the device, as a family's builder asks for them by name and shape."""

from collections.abc import Callable, Mapping, Sequence

import torch

from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Layer, Model, SwiGlu
from services.worker.models.spec import ModelSpec

__all__ = ["WeightReader", "assemble"]


class WeightReader:
    """Reads the tensors of a checkpoint under one of several prefixes, the one under which `probe` stands.

    Raises:
        CheckpointError: from every method, where a tensor is missing, damaged, or of another shape.
    """

    def __init__(self, checkpoint: Checkpoint, memory: DeviceMemory, prefixes: Sequence[str], probe: str) -> None:
        names = checkpoint.names()
        self.memory = memory
        self._checkpoint = checkpoint
        self._prefix = next((prefix for prefix in prefixes if prefix + probe in names), prefixes[-1])

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self._prefix + name in self._checkpoint.names()

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor in the model's dtype."""
        return self._place(self._prefix + name, shape, self.memory.dtype)

    def read_fp32(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor in fp32: what decays are made of, and norms."""
        return self._place(self._prefix + name, shape, torch.float32)

    def read_centred_norm(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, stored as its distance from one, in fp32."""
        return self.read_fp32(name, size) + 1.0

    def stack(self, rows: Mapping[str, int], columns: int) -> torch.Tensor:
        """Several matrices of as many columns as one, `[Σ rows, columns]`: one product instead of several."""
        return torch.cat([self.read(name, count, columns) for name, count in rows.items()])

    def swiglu(self, name: str, size: int, hidden: int) -> SwiGlu:
        """The block of `{gate,up,down}_proj` under a name."""
        gate_up = self.stack({f"{name}.{half}_proj.weight": size for half in ("gate", "up")}, hidden)
        return SwiGlu(gate_up, self.read(f"{name}.down_proj.weight", hidden, size))

    def head(self, spec: ModelSpec, embedding: torch.Tensor, name: str) -> torch.Tensor:
        """The output matrix, which has no prefix; the embedding itself where they are tied."""
        if spec.tied_head:
            return embedding
        return self._place(name, (spec.vocab_size, spec.hidden_size), self.memory.dtype)

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._checkpoint.read(name, shape, dtype).to(self.memory.device)


def assemble(
    spec: ModelSpec,
    reader: WeightReader,
    build_layer: Callable[[int], Layer],
    read_norm: Callable[[str, int], torch.Tensor],
    embedding_name: str = "embed_tokens.weight",
) -> Model:
    """A model of the usual frame: embedding, layers in order, final norm, head."""
    embedding = reader.read(embedding_name, spec.vocab_size, spec.hidden_size)
    layers = [build_layer(index) for index in range(len(spec.layers))]
    final_norm = read_norm("norm.weight", spec.hidden_size)
    return Model(spec, embedding, layers, final_norm, reader.head(spec, embedding, "lm_head.weight"))
