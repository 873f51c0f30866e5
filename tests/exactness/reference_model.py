"""A whole model in fp64 from the public implementation's weights: full recompute, capture, and composition.

Written a second time, token by token and with dense attention, so that the engine's own forms are not their own judge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.exactness.reference import Maps, Tokens, attend, body_maps, convolve, rotate, run_delta

__all__ = ["AttentionRecord", "LinearRecord", "Part", "Record", "ReferenceModel"]


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What a linear layer keeps of a body."""

    maps: Maps
    tail: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """Unrotated keys and values of a body; shift: how far from their true place the keys are read (a control)."""

    keys: torch.Tensor
    values: torch.Tensor
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A segment: its seam window and one record a layer."""

    seam_window: int
    layers: tuple[LinearRecord | AttentionRecord, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A live part, or a segment with its record."""

    token_ids: tuple[int, ...]
    record: Record | None = None

    @property
    def num_live(self) -> int:
        """Tokens that run through the model."""
        return len(self.token_ids) if self.record is None else self.record.seam_window


@dataclass(frozen=True, slots=True)
class _LinearTrace:
    rows: torch.Tensor
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class _AttentionTrace:
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Mixed:
    outputs: torch.Tensor
    trace: _LinearTrace | _AttentionTrace


@dataclass(frozen=True, slots=True)
class _Ran:
    logits: torch.Tensor
    traces: list[_LinearTrace | _AttentionTrace]


Visibility = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def causal(query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """A query sees every key at or before its true position."""
    return key_positions[None] <= query_positions[:, None]


class ReferenceModel:
    """Works on a copy of a public model's weights. Qwen3.5 layers."""

    def __init__(self, public: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._weights: dict[str, torch.Tensor] = {
            name: value.detach().double() for name, value in public.state_dict().items()
        }
        self._config = public.config
        rope = public.config.rope_parameters
        self._theta = float(rope["rope_theta"])
        self._rotary_dim = int(public.config.head_dim * float(rope["partial_rotary_factor"]))

    def logits(self, parts: Sequence[Part], visible: Visibility = causal) -> torch.Tensor:
        """Logits `[n, vocabulary]` of all live tokens of a prompt."""
        return self._run(parts, visible).logits

    def capture(self, prime: tuple[int, ...], token_ids: tuple[int, ...], seam_window: int) -> Record:
        """The record of a segment alone behind the prime."""
        traces = self._run([Part(prime + token_ids)], causal).traces
        body = slice(len(prime) + seam_window, None)
        layers: list[LinearRecord | AttentionRecord] = []
        for trace in traces:
            if isinstance(trace, _LinearTrace):
                history = self._config.linear_conv_kernel_dim - 1
                layers.append(LinearRecord(body_maps(trace.tokens[body]), trace.rows[-history:]))
            else:
                layers.append(AttentionRecord(trace.keys[body], trace.values[body]))
        return Record(seam_window, tuple(layers))

    def _run(self, parts: Sequence[Part], visible: Visibility) -> _Ran:
        token_ids = [token for part in parts for token in part.token_ids[: part.num_live]]
        hidden = self._weights["model.embed_tokens.weight"][token_ids]
        traces = []
        for layer, kind in enumerate(self._config.layer_types):
            name = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            if kind == "linear_attention":
                mixed = self._linear(normed, f"{name}.linear_attn", layer, parts)
            else:
                mixed = self._attention(normed, f"{name}.self_attn", layer, parts, visible)
            traces.append(mixed.trace)
            hidden = hidden + mixed.outputs
            hidden = hidden + self._feed_forward(self._norm(hidden, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return _Ran(self._project(self._norm(hidden, "model.norm"), "lm_head"), traces)

    def _project(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        return hidden @ self._weights[f"{name}.weight"].T

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        scale = (hidden.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt()
        normed: torch.Tensor = hidden * scale * (1 + self._weights[f"{name}.weight"])
        return normed

    def _feed_forward(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self._project(hidden, f"{name}.gate_proj"), self._project(hidden, f"{name}.up_proj")
        return self._project(F.silu(gate) * up, f"{name}.down_proj")

    def _linear(self, hidden: torch.Tensor, name: str, layer: int, parts: Sequence[Part]) -> _Mixed:
        config, weights = self._config, self._weights
        rows = self._project(hidden, f"{name}.in_proj_qkv")
        taps = weights[f"{name}.conv1d.weight"][:, 0]
        tail = rows.new_zeros(config.linear_conv_kernel_dim - 1, rows.shape[1])
        heads = config.linear_num_value_heads
        state = rows.new_zeros(heads, config.linear_key_head_dim, config.linear_value_head_dim)
        outputs, pieces, start = [], [], 0
        for part in parts:
            run = slice(start, start + part.num_live)
            start = run.stop
            tokens = self._tokens(convolve(rows[run], taps, tail), hidden[run], name)
            ran = run_delta(tokens, state)
            outputs.append(ran.outputs)
            pieces.append(tokens)
            state, tail = ran.state, torch.cat([tail, rows[run]])[-tail.shape[0] :]
            if part.record is not None:
                record = part.record.layers[layer]
                assert isinstance(record, LinearRecord)
                state = record.maps.transition @ state + record.maps.end_state
                tail = record.tail
        gate = self._project(hidden, f"{name}.in_proj_z").unflatten(-1, (heads, -1))
        mixed = torch.cat(outputs)
        scale = (mixed.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        normed = mixed * scale * weights[f"{name}.norm.weight"] * F.silu(gate)
        return _Mixed(
            self._project(normed.flatten(1), f"{name}.out_proj"), _LinearTrace(rows, Tokens.concatenate(pieces))
        )

    def _tokens(self, convolved: torch.Tensor, hidden: torch.Tensor, name: str) -> Tokens:
        config, weights = self._config, self._weights
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        q, k, v = F.silu(convolved).split([keys, keys, values], dim=-1)
        repeats: int = config.linear_num_value_heads // config.linear_num_key_heads

        def unit(flat: torch.Tensor) -> torch.Tensor:
            heads = flat.unflatten(-1, (config.linear_num_key_heads, -1))
            normed: torch.Tensor = heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            return normed.repeat_interleave(repeats, dim=1)

        steps = F.softplus(self._project(hidden, f"{name}.in_proj_a") + weights[f"{name}.dt_bias"])
        return Tokens(
            q=unit(q) * config.linear_key_head_dim**-0.5,
            k=unit(k),
            v=v.unflatten(-1, (config.linear_num_value_heads, -1)),
            decay=(-weights[f"{name}.A_log"].exp() * steps).exp(),
            beta=self._project(hidden, f"{name}.in_proj_b").sigmoid(),
        )

    def _attention(
        self, hidden: torch.Tensor, name: str, layer: int, parts: Sequence[Part], visible: Visibility
    ) -> _Mixed:
        config = self._config
        queries = self._project(hidden, f"{name}.q_proj").unflatten(-1, (config.num_attention_heads, -1))
        queries, gate = queries.chunk(2, dim=-1)
        queries = self._norm(queries, f"{name}.q_norm")
        keys = self._project(hidden, f"{name}.k_proj").unflatten(-1, (config.num_key_value_heads, -1))
        keys = self._norm(keys, f"{name}.k_norm")
        values = self._project(hidden, f"{name}.v_proj").unflatten(-1, (config.num_key_value_heads, -1))
        all_keys, all_values, places, own, position, start = [keys], [values], [], [], 0, 0
        stored_places = []
        for part in parts:
            own.append(torch.arange(position, position + part.num_live))
            start += part.num_live
            if part.record is not None:
                record = part.record.layers[layer]
                assert isinstance(record, AttentionRecord)
                all_keys.append(record.keys)
                all_values.append(record.values)
                stored_places.append(torch.arange(position + part.num_live, position + len(part.token_ids)))
                places.append(stored_places[-1] + record.shift)
            position += len(part.token_ids)
        query_places = torch.cat(own)
        turned = rotate(torch.cat(all_keys), torch.cat([query_places, *places]), self._theta, self._rotary_dim)
        mixed = attend(
            rotate(queries, query_places, self._theta, self._rotary_dim),
            turned,
            torch.cat(all_values),
            visible(query_places, torch.cat([query_places, *stored_places])),
            config.head_dim**-0.5,
        )
        outputs = self._project((mixed * gate.sigmoid()).flatten(1), f"{name}.o_proj")
        return _Mixed(outputs, _AttentionTrace(keys, values))
