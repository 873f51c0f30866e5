"""Weights onto the device, as a family's builder asks for them by name and shape."""

from collections.abc import Callable, Mapping, Sequence

import torch

from services.worker.mixers.share import WHOLE, Share
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.cuts import Cut
from services.worker.models.decoder import FeedForward, Layer, Model, SwiGlu
from services.worker.models.errors import CheckpointError
from services.worker.models.experts import ExpertNames, Experts, ExpertsShape, stack_router
from services.worker.models.shared_layer import SharedLayer
from services.worker.models.spec import DenseShape, FeedForwardShape, ModelSpec

__all__ = ["WeightReader", "assemble"]


class WeightReader:
    """Reads the tensors of a checkpoint under one of several prefixes, the one under which `probe` stands.

    Shapes are those of the whole model, as files have them; a `cut` is what this rank takes.

    Raises:
        CheckpointError: from every method, where a tensor is missing, damaged, or of another shape.
    """

    def __init__(self, checkpoint: Checkpoint, memory: DeviceMemory, prefixes: Sequence[str], probe: str) -> None:
        names = checkpoint.names()
        self.memory = memory
        self.share = memory.share
        self._checkpoint = checkpoint
        self._prefix = next((prefix for prefix in prefixes if prefix + probe in names), prefixes[-1])

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return self._prefix + name in self._checkpoint.names()

    def rows(self, *lengths: int, share: Share | None = None) -> Cut:
        """This rank's share, or another, of each of several runs of rows."""
        return Cut.of(lengths, share or self.share)

    def all_rows(self, length: int) -> Cut:
        """Rows that every rank has."""
        return Cut.of((length,), WHOLE)

    def columns(self, length: int) -> Cut:
        """This rank's share of the columns of a matrix that leads out of a block: ranks add up what comes of them."""
        return Cut.of((length,), self.share, axis=1)

    def read(self, name: str, *shape: int, cut: Cut | None = None) -> torch.Tensor:
        """One tensor in the model's dtype."""
        return self._place(self._prefix + name, shape, self.memory.dtype, cut)

    def read_fp32(self, name: str, *shape: int, cut: Cut | None = None) -> torch.Tensor:
        """One tensor in fp32: what decays are made of, and norms."""
        return self._place(self._prefix + name, shape, torch.float32, cut)

    def read_centred_norm(self, name: str, size: int) -> torch.Tensor:
        """A norm's weight, stored as its distance from one, in fp32."""
        return self.read_fp32(name, size) + 1.0

    def stack(self, rows: Mapping[str, Cut], columns: int) -> torch.Tensor:
        """Rows of several matrices of as many columns as one, `[Σ rows, columns]`: one product instead of several."""
        return torch.cat([self.read(name, own.length, columns, cut=own) for name, own in rows.items()])

    def swiglu(self, name: str, size: int, hidden: int) -> SwiGlu:
        """The block of `{gate,up,down}_proj` under a name."""
        gate_up = self.stack({f"{name}.{half}_proj.weight": self.rows(size) for half in ("gate", "up")}, hidden)
        return SwiGlu(gate_up, self.read(f"{name}.down_proj.weight", hidden, size, cut=self.columns(size)))

    def feed_forward(
        self, name: str, shape: FeedForwardShape, hidden: int, names: ExpertNames | None = None
    ) -> FeedForward:
        """The dense or routed block under a name; `names` are those of a routed block, Qwen's by default."""
        if isinstance(shape, DenseShape):
            return self.swiglu(name, shape.size, hidden)
        if isinstance(shape, ExpertsShape):
            return self._experts(name, shape, hidden, names or ExpertNames())
        raise TypeError(f"{shape} is no shape of a feed-forward block")

    def _experts(self, name: str, shape: ExpertsShape, hidden: int, names: ExpertNames) -> Experts:
        routing, shared_size = shape.routing, shape.shared_size
        return Experts(
            routing=routing,
            router=self._router(name, shape, hidden, names),
            bias=self.read_fp32(f"{name}.{names.bias}", routing.num_experts) if routing.corrected else None,
            gate_up=self._gate_up(f"{name}.experts", shape, hidden, names),
            down=self._down(f"{name}.experts", shape, hidden, names),
            shared=None if shared_size is None else self.swiglu(f"{name}.{names.shared}", shared_size, hidden),
            shared_gated=shape.shared_gated,
        )

    def _router(self, name: str, shape: ExpertsShape, hidden: int, names: ExpertNames) -> torch.Tensor:
        """The router's matrix as `Experts` has it."""
        read = self.read_fp32 if shape.router_fp32 else self.read
        router = read(f"{name}.{names.router}", shape.routing.num_experts, hidden)
        return stack_router(router, read(f"{name}.{names.shared_gate}", 1, hidden)) if shape.shared_gated else router

    def _gate_up(self, name: str, shape: ExpertsShape, hidden: int, names: ExpertNames) -> torch.Tensor:
        """`[E, 2 I, hidden]`, which checkpoints keep as one tensor or in halves an expert."""
        fused, count, size = f"{name}.gate_up_proj", shape.routing.num_experts, shape.size
        if self._has_fused(fused, f"{name}.0.{names.gate}.weight"):
            return self.read(fused, count, 2 * size, hidden, cut=Cut.of((size, size), self.share, axis=1))
        own = shape.split(self.share).size
        halves = torch.empty(count, 2, own, hidden, dtype=self.memory.dtype, device=self.memory.device)
        # Filled in place: experts are most of a model, and a copy of a layer's might not fit beside them.
        for expert in range(count):
            for half, part in enumerate((names.gate, names.up)):
                halves[expert, half] = self.read(f"{name}.{expert}.{part}.weight", size, hidden, cut=self.rows(size))
        return halves.flatten(1, 2)

    def _down(self, name: str, shape: ExpertsShape, hidden: int, names: ExpertNames) -> torch.Tensor:
        """`[E, hidden, I]`, likewise."""
        fused, count, size = f"{name}.down_proj", shape.routing.num_experts, shape.size
        if self._has_fused(fused, f"{name}.0.{names.down}.weight"):
            return self.read(fused, count, hidden, size, cut=Cut.of((size,), self.share, axis=2))
        own = shape.split(self.share).size
        matrices = torch.empty(count, hidden, own, dtype=self.memory.dtype, device=self.memory.device)
        for expert in range(count):
            single = f"{name}.{expert}.{names.down}.weight"
            matrices[expert] = self.read(single, hidden, size, cut=self.columns(size))
        return matrices

    def _has_fused(self, fused: str, single: str) -> bool:
        """Which of the two layouts a layer's experts have; with both there is no telling which of them was trained."""
        if self.has(fused) and self.has(single):
            raise CheckpointError(
                f"tensors {self._prefix}{fused} and {self._prefix}{single} both hold the expert; "
                "download the checkpoint again, without files of another revision"
            )
        return self.has(fused)

    def head(self, spec: ModelSpec, embedding: torch.Tensor, name: str) -> torch.Tensor:
        """The output matrix, which has no prefix; the embedding itself where they are tied."""
        if spec.tied_head:
            return embedding
        return self._place(name, (spec.vocab_size, spec.hidden_size), self.memory.dtype, None)

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None) -> torch.Tensor:
        needed = None if cut is None or cut.is_whole else cut
        return self._checkpoint.read(name, shape, dtype, needed).to(self.memory.device)


def assemble(
    spec: ModelSpec,
    reader: WeightReader,
    build_layer: Callable[[int], Layer],
    read_norm: Callable[[str, int], torch.Tensor],
    embedding_name: str = "embed_tokens.weight",
) -> Model:
    """A model of the usual frame: embedding, layers in order, final norm, head.

    Of a model that is split over ranks every rank has embedding and head whole: a row is looked up, and a vocabulary's
    logits, which only the last tokens of a pass have, are cheaper computed everywhere than gathered.
    """
    own, ranks = spec.split(reader.share), reader.memory.ranks
    embedding = reader.read(embedding_name, spec.vocab_size, spec.hidden_size)
    layers = [build_layer(index) for index in range(len(spec.layers))]
    final_norm = read_norm("norm.weight", spec.hidden_size)
    head = reader.head(spec, embedding, "lm_head.weight")
    shared = layers if ranks is None else [SharedLayer.of(layer, ranks) for layer in layers]
    return Model(own, embedding, shared, final_norm, head)
