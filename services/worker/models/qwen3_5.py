"""Qwen3.5, dense: three Gated DeltaNet layers to one gated full-attention layer, partial rotary position.

Text-only and multimodal checkpoints are accepted; vision towers and multi-token prediction heads are ignored. For text the
three position axes of interleaved multimodal rotary coincide, which makes it plain half-split rotary.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.mixers.gated_attention import AttentionWeights, FullAttention, FullAttentionShape
from services.worker.mixers.gated_delta import GatedDelta, GatedDeltaShape, GatedDeltaWeights
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.errors import CheckpointError
from services.worker.models.spec import FeedForward, Layer, Model, ModelSpec
from services.worker.ops.rotary import Rotary

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_text"})
_PREFIXES = ("model.language_model.", "model.")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    text = config.get("text_config", config)
    fields = _Fields(text)
    rope = text.get("rope_parameters") or {}
    _refuse_unsupported(config, text, fields)
    eps = float(text.get("rms_norm_eps", 1e-6))
    head_dim = fields.integer("head_dim")
    linear = GatedDeltaShape(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_taps=fields.integer("linear_conv_kernel_dim"),
        eps=eps,
    )
    attention = FullAttentionShape(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", 0.25))),
        rotary_theta=float(rope.get("rope_theta", 1e7)),
        gated=True,
        eps=eps,
    )
    return ModelSpec(
        family="qwen3_5",
        hidden_size=fields.integer("hidden_size"),
        feed_forward_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        eps=eps,
        mixers=tuple(_layer_shape(kind, linear, attention) for kind in fields.layer_types()),
    )


class _Fields:
    """Typed access to a config, with errors that name the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def integer(self, name: str) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def check_groups(self, heads: str, shared_heads: str) -> None:
        """Every shared head serves the same number of heads."""
        if self.integer(heads) % self.integer(shared_heads):
            raise CheckpointError(f"config.json: {heads} must be a multiple of {shared_heads}")

    def layer_types(self) -> list[str]:
        layers = self.integer("num_hidden_layers")
        kinds = self._config.get("layer_types")
        if kinds is None:
            interval = self.integer("full_attention_interval")
            kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise CheckpointError(f"config.json: layer_types must list {layers} layers")
        return [str(kind) for kind in kinds]


def _refuse_unsupported(config: Mapping[str, Any], text: Mapping[str, Any], fields: _Fields) -> None:
    rope = text.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise CheckpointError(f"config.json: rope_parameters.rope_type {rope['rope_type']!r} is not supported")
    if text.get("attention_bias"):
        raise CheckpointError("config.json: attention_bias true is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {text['hidden_act']!r} is not supported; silu is")
    if "quantization_config" in config:
        raise CheckpointError("config.json: quantised checkpoints are not supported; use the bf16 release")
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    fields.check_groups("linear_num_value_heads", "linear_num_key_heads")


def _layer_shape(
    kind: str, linear: GatedDeltaShape, attention: FullAttentionShape
) -> GatedDeltaShape | FullAttentionShape:
    if kind == "linear_attention":
        return linear
    if kind == "full_attention":
        return attention
    raise CheckpointError(f"config.json: layer_types has {kind!r}; linear_attention and full_attention are supported")


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    return _Loader(spec, checkpoint, memory).load()


class _Loader:
    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._memory = memory
        names = checkpoint.names()
        self._prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names), _PREFIXES[-1])
        self._linear_layers = 0

    def load(self) -> Model:
        spec = self._spec
        embedding = self._read("embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = [self._layer(index) for index in range(len(spec.mixers))]
        final_norm = self._norm("norm.weight", spec.hidden_size)
        if spec.tied_head:
            head = embedding
        else:
            shape = (spec.vocab_size, spec.hidden_size)
            head = self._place(self._checkpoint.read("lm_head.weight", shape, self._memory.dtype))
        return Model(spec, embedding, layers, final_norm, head)

    def _layer(self, index: int) -> Layer:
        spec, name = self._spec, f"layers.{index}"
        shape = spec.mixers[index]
        mixer: GatedDelta | FullAttention
        if isinstance(shape, GatedDeltaShape):
            mixer = self._linear(f"{name}.linear_attn", shape)
        else:
            mixer = self._attention(f"{name}.self_attn", shape)
        size = (spec.feed_forward_size, spec.hidden_size)
        gate_up = [self._read(f"{name}.mlp.{half}_proj.weight", *size) for half in ("gate", "up")]
        return Layer(
            mixer_norm=self._norm(f"{name}.input_layernorm.weight", spec.hidden_size),
            mixer=mixer,
            feed_forward_norm=self._norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
            feed_forward=FeedForward(
                torch.cat(gate_up),
                self._read(f"{name}.mlp.down_proj.weight", spec.hidden_size, spec.feed_forward_size),
            ),
            eps=spec.eps,
        )

    def _linear(self, name: str, shape: GatedDeltaShape) -> GatedDelta:
        hidden, heads = self._spec.hidden_size, shape.num_value_heads
        values = heads * shape.value_dim
        rows = {"qkv": shape.conv_channels, "z": values, "b": heads, "a": heads}
        conv = self._read(f"{name}.conv1d.weight", shape.conv_channels, 1, shape.conv_taps)
        weights = GatedDeltaWeights(
            in_proj=torch.cat(
                [self._read(f"{name}.in_proj_{part}.weight", size, hidden) for part, size in rows.items()]
            ),
            conv=conv.squeeze(1),
            decay_rate=self._read_fp32(f"{name}.A_log", heads).exp(),
            dt_bias=self._read_fp32(f"{name}.dt_bias", heads),
            norm=self._read(f"{name}.norm.weight", shape.value_dim),
            out_proj=self._read(f"{name}.out_proj.weight", hidden, values),
        )
        self._linear_layers += 1
        return GatedDelta(shape, weights, self._linear_layers - 1, self._memory.add_linear_slots(shape))

    def _attention(self, name: str, shape: FullAttentionShape) -> FullAttention:
        hidden, queries = self._spec.hidden_size, shape.num_heads * shape.head_dim
        rows = {"q": 2 * queries, "k": shape.num_kv_heads * shape.head_dim, "v": shape.num_kv_heads * shape.head_dim}
        weights = AttentionWeights(
            in_proj=torch.cat([self._read(f"{name}.{part}_proj.weight", size, hidden) for part, size in rows.items()]),
            out_proj=self._read(f"{name}.o_proj.weight", hidden, queries),
            q_norm=self._norm(f"{name}.q_norm.weight", shape.head_dim),
            k_norm=self._norm(f"{name}.k_norm.weight", shape.head_dim),
        )
        rotary = Rotary.create(shape.rotary_theta, shape.rotary_dim, self._memory.device)
        return FullAttention(shape, weights, rotary, self._memory.add_page_pool(shape))

    def _norm(self, name: str, size: int) -> torch.Tensor:
        """Zero-centred in the checkpoint: the stored weight is the distance from one."""
        return self._read_fp32(name, size) + 1.0

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self._place(self._checkpoint.read(self._prefix + name, shape, self._memory.dtype))

    def _read_fp32(self, name: str, *shape: int) -> torch.Tensor:
        return self._place(self._checkpoint.read(self._prefix + name, shape, torch.float32))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._memory.device)
