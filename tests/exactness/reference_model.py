"""A whole model in fp64 from the public implementation's weights: full recompute, capture, and composition.

Projections, norms and feed-forward blocks are the public implementation's own, in fp64; what mixes tokens is written a
second time, token by token and with dense attention, so that the engine's own forms are not their own judge.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tests.exactness.reference import Maps, Tokens, attend, body_maps, convolve, run_tokens

__all__ = [
    "AttentionRecord",
    "LinearRecord",
    "Part",
    "Projections",
    "Record",
    "ReferenceAttention",
    "ReferenceFamily",
    "ReferenceLayer",
    "ReferenceLinear",
    "ReferenceModel",
]


class ReferenceLinear(ABC):
    """A family's linear layer, taken apart. Hidden states are normed `[N, hidden]`, fp64."""

    #: Taps `[C, K]` of the short convolution, None without one.
    taps: torch.Tensor | None = None
    #: Whether keys carry rotary position, so that states must be turned to where they are used.
    turns: bool = False

    @abstractmethod
    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows `[N, C]` ahead of the convolution."""

    @abstractmethod
    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        """Rows behind the convolution, before any activation, to what the tokens bring."""

    @abstractmethod
    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The recurrence's outputs `[N, H, V]` to `[N, hidden]`."""

    @abstractmethod
    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        """The public module over a whole sequence `[N, hidden]` from position 0."""

    def turn(self, state: torch.Tensor, places: int) -> torch.Tensor:
        """A state `[H, K, V]` moved by so many positions."""
        return state


@dataclass(frozen=True, slots=True)
class Projections:
    """Queries `[N, Hq, D]`, keys `[N, Hkv, D]` before rotation, values `[N, Hkv, Dv]`."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class ReferenceAttention(ABC):
    """A family's attention layer, taken apart. Hidden states are normed `[N, hidden]`, fp64."""

    scale: float
    #: Whether queries and keys carry rotary position.
    turns: bool = True

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> Projections:
        """Heads before rotation."""

    @abstractmethod
    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys `[N, H, D]` at positions `[N]`."""

    @abstractmethod
    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Attention's outputs `[N, Hq, Dv]` to `[N, hidden]`."""


class ReferenceLayer(Protocol):
    """A decoder layer: its mixer, and the frame around it."""

    @property
    def mixer(self) -> ReferenceLinear | ReferenceAttention: ...

    def run(self, hidden: torch.Tensor, mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Hidden states after the layer; `mix` takes the mixer's normed input."""
        ...


class ReferenceFamily(Protocol):
    """A public model, taken apart."""

    @property
    def layers(self) -> Sequence[ReferenceLayer]: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[N]` to hidden states."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the last layer to logits."""
        ...


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What a linear layer keeps of a body: its maps as if its first token stood at position 0, and the tail.

    turned_by: how many positions the maps' state is turned too little at use (a control).
    """

    maps: Maps
    tail: torch.Tensor
    turned_by: int = 0


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
    mixer: ReferenceLinear
    rows: torch.Tensor
    tokens: Tokens

    def record(self, start: int) -> LinearRecord:
        """The record of everything from token `start` on."""
        maps = body_maps(self.tokens[start:])
        rebased = Maps(maps.transition, self.mixer.turn(maps.end_state, -start))
        history = 0 if self.mixer.taps is None else self.mixer.taps.shape[1] - 1
        return LinearRecord(rebased, self.rows[len(self.rows) - history :])


@dataclass(frozen=True, slots=True)
class _AttentionTrace:
    keys: torch.Tensor
    values: torch.Tensor

    def record(self, start: int) -> AttentionRecord:
        """The record of everything from token `start` on."""
        return AttentionRecord(self.keys[start:], self.values[start:])


@dataclass(frozen=True, slots=True)
class _Mixed:
    outputs: torch.Tensor
    trace: _LinearTrace | _AttentionTrace


@dataclass(frozen=True, slots=True)
class _Ran:
    logits: torch.Tensor
    traces: list[_LinearTrace | _AttentionTrace]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A part at its true position; rows: its live tokens among all live tokens."""

    part: Part
    rows: slice
    position: int

    @property
    def body_position(self) -> int:
        return self.position + self.part.num_live


Visibility = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def causal(query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """A query sees every key at or before its true position."""
    return key_positions[None] <= query_positions[:, None]


class ReferenceModel:
    """Full recompute, capture and composition of one family's model in fp64."""

    def __init__(self, family: ReferenceFamily) -> None:
        self.family = family

    @property
    def mixers(self) -> list[ReferenceLinear | ReferenceAttention]:
        """Every layer's mixer."""
        return [layer.mixer for layer in self.family.layers]

    def logits(self, parts: Sequence[Part], visible: Visibility = causal) -> torch.Tensor:
        """Logits `[n, vocabulary]` of all live tokens of a prompt."""
        return self._run(parts, visible).logits

    def capture(self, prime: tuple[int, ...], token_ids: tuple[int, ...], seam_window: int) -> Record:
        """The record of a segment alone behind the prime."""
        traces = self._run([Part(prime + token_ids)], causal).traces
        start = len(prime) + seam_window
        return Record(seam_window, tuple(trace.record(start) for trace in traces))

    @torch.inference_mode()
    def _run(self, parts: Sequence[Part], visible: Visibility) -> _Ran:
        placed: list[_Placed] = []
        row = position = 0
        for part in parts:
            placed.append(_Placed(part, slice(row, row + part.num_live), position))
            row, position = row + part.num_live, position + len(part.token_ids)
        token_ids = [token for part in parts for token in part.token_ids[: part.num_live]]
        hidden = self.family.embed(torch.tensor(token_ids))
        traces: list[_LinearTrace | _AttentionTrace] = []
        for index, layer in enumerate(self.family.layers):

            def mix(normed: torch.Tensor, index: int = index) -> torch.Tensor:
                mixer = self.mixers[index]
                if isinstance(mixer, ReferenceLinear):
                    mixed = _mix_linear(mixer, normed, index, placed)
                else:
                    mixed = _mix_attention(mixer, normed, index, placed, visible)
                traces.append(mixed.trace)
                return mixed.outputs

            hidden = layer.run(hidden, mix)
        return _Ran(self.family.logits(hidden), traces)


def _live_positions(placed: Sequence[_Placed]) -> torch.Tensor:
    return torch.cat([torch.arange(own.position, own.body_position) for own in placed])


def _mix_linear(mixer: ReferenceLinear, hidden: torch.Tensor, layer: int, placed: Sequence[_Placed]) -> _Mixed:
    rows, positions = mixer.rows(hidden), _live_positions(placed)
    history = 0 if mixer.taps is None else mixer.taps.shape[1] - 1
    tail = rows.new_zeros(history, rows.shape[1])
    state: torch.Tensor | None = None
    outputs, pieces = [], []
    for own in placed:
        convolved = rows[own.rows] if mixer.taps is None else convolve(rows[own.rows], mixer.taps, tail)
        tokens = mixer.tokens(convolved, hidden[own.rows], positions[own.rows])
        if state is None:
            state = tokens.v.new_zeros(tokens.k.shape[1], tokens.k.shape[2], tokens.v.shape[2])
        ran = run_tokens(tokens, state)
        outputs.append(ran.outputs)
        pieces.append(tokens)
        state, tail = ran.state, torch.cat([tail, rows[own.rows]])[own.part.num_live :]
        if own.part.record is not None:
            record = own.part.record.layers[layer]
            assert isinstance(record, LinearRecord)
            end_state = mixer.turn(record.maps.end_state, own.body_position - record.turned_by)
            state = record.maps.transition @ state + end_state
            tail = record.tail
    mixed = mixer.outputs(torch.cat(outputs), hidden)
    return _Mixed(mixed, _LinearTrace(mixer, rows, Tokens.concatenate(pieces)))


def _mix_attention(
    mixer: ReferenceAttention, hidden: torch.Tensor, layer: int, placed: Sequence[_Placed], visible: Visibility
) -> _Mixed:
    own, positions = mixer.project(hidden), _live_positions(placed)
    keys, values, places, read_places = [own.keys], [own.values], [positions], [positions]
    for each in placed:
        if each.part.record is not None:
            record = each.part.record.layers[layer]
            assert isinstance(record, AttentionRecord)
            keys.append(record.keys)
            values.append(record.values)
            places.append(torch.arange(each.body_position, each.position + len(each.part.token_ids)))
            read_places.append(places[-1] + record.shift)
    mixed = attend(
        mixer.rotate(own.queries, positions),
        mixer.rotate(torch.cat(keys), torch.cat(read_places)),
        torch.cat(values),
        visible(positions, torch.cat(places)),
        mixer.scale,
    )
    return _Mixed(mixer.outputs(mixed, hidden), _AttentionTrace(own.keys, own.values))
