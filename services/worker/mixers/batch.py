"""What the three passes hand to a mixer, and the planes that linear mixers leave behind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.blob.encodings import StateEncoding, decode, decode_tail, encode, encode_tail
from services.worker.ops.body_planes import PackedBodies, PassedBody, keep, keep_packed
from services.worker.ops.layout import BodyAddresses, PartWalk, PassAddresses
from services.worker.ops.paged_attention import PagedQueries

__all__ = [
    "CaptureBatch",
    "CombineBatch",
    "DecodeBatch",
    "LinearCarry",
    "LinearPlane",
    "LinearSlots",
    "LinearSnapshot",
    "Mixer",
    "WholeSegments",
    "finish_planes",
]


@dataclass(frozen=True, slots=True)
class LinearPlane:
    """What one linear layer keeps of a segment's body.

    transition (in the form that its `StateShape` names) and end_state `[H, K, V]` in fp32; tail `[taps − 1, C]` in the
    model's dtype; decay `[H]`: the product of the body's slowest decays, which bounds the transition's spectral norm.
    Where keys carry rotary position, end_state stands as if the body's first token were at position 0.
    """

    transition: torch.Tensor
    end_state: torch.Tensor
    tail: torch.Tensor
    decay: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four, in their order."""
        return (self.transition, self.end_state, self.tail, self.decay)

    def stored_as(self, encoding: StateEncoding) -> "LinearPlane":
        """The plane as an encoding gives it back."""
        if encoding.is_exact:
            return self
        transition, end_state = decode(encode(self.transition, self.end_state, self.decay, encoding), encoding)
        tail = decode_tail(encode_tail(self.tail, encoding), encoding, self.tail.dtype)
        return LinearPlane(transition, end_state, tail, self.decay)


@dataclass(frozen=True, slots=True)
class LinearSnapshot:
    """One linear layer's exact state at a place of a prompt: state `[H, K, V]` fp32, tail `[taps − 1, C]`."""

    state: torch.Tensor
    tail: torch.Tensor


@dataclass(slots=True)
class LinearSlots:
    """The running states of one linear layer: states `[slots, H, K, V]` fp32, tails `[slots, taps − 1, C]`.

    index: which of the model's linear layers it is.
    """

    index: int
    states: torch.Tensor
    tails: torch.Tensor


@dataclass(slots=True)
class LinearCarry:
    """A linear layer's state while one segment is being captured, chunk after chunk.

    seam_state is the state at the body's first token; transition is None until the body begins; log_decays `[n, H]` of
    the body's tokens, chunk after chunk.
    """

    state: torch.Tensor
    tail: torch.Tensor
    seam_state: torch.Tensor | None = None
    transition: torch.Tensor | None = None
    log_decays: list[torch.Tensor] = field(default_factory=list)


def finish_planes(carries: Sequence[LinearCarry]) -> list[LinearPlane]:
    """The planes of finished bodies of one layer: `S = h_end − T h_w` (design §5), memory of their own.

    Raises:
        ValueError: a body has not begun.
    """
    kept = keep([_passed(carry) for carry in carries])
    return [LinearPlane(own.transition, own.end_state, own.tail, own.decay) for own in kept]


def _passed(carry: LinearCarry) -> PassedBody:
    if carry.seam_state is None or carry.transition is None:
        raise ValueError("a segment has no body")
    bounds = carry.log_decays[0] if len(carry.log_decays) == 1 else torch.cat(carry.log_decays)
    return PassedBody(carry.transition, carry.seam_state, carry.state, carry.tail, bounds)


@dataclass(frozen=True, slots=True)
class WholeSegments:
    """Segments that one chunk holds whole, on a device that runs kernels.

    begin: with what every linear layer begins; targets int64 `[layers, R, 4]`: the addresses of their planes, which are there
    before the pass, zeros where there is no segment; firsts, counts int64 `[R]`: the first token of every body, and how many it
    has; no_bodies: stands for stored bodies, of which there are none, in passes that are recorded, whose walks are prepared.
    """

    begin: Sequence[LinearSnapshot]
    targets: torch.Tensor
    is_aligned: bool
    firsts: torch.Tensor
    counts: torch.Tensor
    no_bodies: BodyAddresses | None = None

    def keep(self, linear_layer: int, bodies: PackedBodies) -> None:
        """Leave one layer's planes."""
        keep_packed(bodies, self.targets[linear_layer], self.is_aligned)


@dataclass(slots=True)
class CaptureBatch:
    """One chunk of each of several segments, packed.

    walk: a run a segment; seam_tokens: how many leading tokens of each run belong to the seam window; queries: positions
    count from the prime's first token, `base` is the segments' first; write_slots `[N]` flat slots of the page pool; carries:
    of every segment, one a linear layer; whole: in place of carries, where kernels take segments in one chunk.
    """

    walk: PartWalk
    seam_tokens: tuple[int, ...]
    queries: PagedQueries
    base: int
    write_slots: torch.Tensor
    carries: Sequence[Sequence[LinearCarry]] = ()
    whole: WholeSegments | None = None

    def carries_of(self, linear_layer: int) -> list[LinearCarry]:
        """Every segment's carry at one linear layer."""
        return [carry[linear_layer] for carry in self.carries]


@dataclass(slots=True)
class CombineBatch:
    """The live tokens of all parts of the requests of one combine pass, packed in prompt order.

    queries: at true positions; write_slots `[N]` flat slots of the page pool; slots `[B]` state slots; planes: every part's
    stored planes, one a linear layer, None for a part without a stored body; body_positions: the true position of the token
    behind every part's live run, a stored body's first; keep_after: parts whose end state is wanted as a snapshot; addresses:
    where every linear layer's bodies lie, for kernels that read them as they are; is_fresh `[B]`: requests that begin with no
    state, whatever their slots hold; None where every slot holds what its request begins with.
    """

    walk: PartWalk
    queries: PagedQueries
    write_slots: torch.Tensor
    slots: torch.Tensor
    planes: Sequence[Sequence[LinearPlane] | None]
    body_positions: Sequence[int]
    keep_after: frozenset[int] = frozenset()
    kept: dict[int, list[LinearSnapshot]] = field(default_factory=dict)
    addresses: PassAddresses | None = None
    is_fresh: torch.Tensor | None = None

    def begin(self, held: torch.Tensor) -> torch.Tensor:
        """What the requests `[B, …]` begin with, of what all slots `[slots, …]` hold."""
        own = held[self.slots]
        if self.is_fresh is not None:
            own.masked_fill_(self.is_fresh.view(-1, *[1] * (own.ndim - 1)), 0.0)
        return own

    def addresses_of(self, linear_layer: int) -> BodyAddresses | None:
        """Where one linear layer's bodies lie, if kernels are to read them as they are."""
        return None if self.addresses is None else self.addresses.of_layer(linear_layer)

    def planes_of(self, linear_layer: int) -> list[LinearPlane | None]:
        """Every part's plane at one linear layer."""
        return [None if planes is None else planes[linear_layer] for planes in self.planes]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each running request: write_slots, slots `[B]`."""

    queries: PagedQueries
    write_slots: torch.Tensor
    slots: torch.Tensor


class Mixer(Protocol):
    """A layer's token mixer. Inputs and outputs are normed hidden states `[N, hidden]`.

    Every pass updates the state that its batch names: slots, pages or carries.
    """

    def capture(self, hidden: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """One chunk of segments being captured."""
        ...

    def combine(self, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """The live tokens of prompts."""
        ...

    def decode(self, hidden: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One generated token a request."""
        ...
