"""How packed live tokens are cut into runs and parts, shared by the ops that carry a state over them."""

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["BODY_ALIGNMENT", "Body", "BodyAddresses", "PartWalk", "PassAddresses", "WalkRoom", "apply_transition"]


# What kernels read wide begins at such an address.
BODY_ALIGNMENT = 16


def apply_transition(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """`T · state` of states `[..., K, V]`.

    A transition is dense `[..., K, K]`, diagonal `[..., K, 1]`, or a number a head `[..., 1, 1]`.
    """
    return transition * state if transition.shape[-1] == 1 else transition @ state


@dataclass(frozen=True, slots=True)
class Body:
    """What a stored segment body does to a recurrent state: `state_out = transition · state_in + end_state`.

    transition in fp32, in one of the forms of `apply_transition`, or None where the body forgets everything before it.
    end_state: `[H, K, V]` fp32, the state after the body from a zero start.
    """

    transition: torch.Tensor | None
    end_state: torch.Tensor

    def apply(self, state: torch.Tensor) -> torch.Tensor:
        """The state `[H, K, V]` after the body."""
        if self.transition is None:
            return self.end_state.clone()
        return self.end_state + apply_transition(self.transition, state)


@dataclass(frozen=True, slots=True)
class BodyAddresses:
    """Where one layer's stored bodies lie on a device, for kernels: int64 `[3, n]` of transitions, end states and conv tails.

    n: bodies of a walk, in order, or more; is_aligned: all addresses are to 16 bytes; zeros: what stands for the transitions
    of bodies that forget everything; positions int64 `[n]`: where their first tokens stand; turned: end states that were
    moved there. What is not None must live as long as the table.
    """

    table: torch.Tensor
    is_aligned: bool
    zeros: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    turned: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class PassAddresses:
    """`BodyAddresses` of all linear layers of a pass, int64 `[layers, 3, n]`; positions: as there."""

    table: torch.Tensor
    is_aligned: bool
    positions: torch.Tensor | None = None

    def of_layer(self, layer: int) -> BodyAddresses:
        """One layer's."""
        return BodyAddresses(self.table[layer], self.is_aligned, positions=self.positions)


@dataclass(frozen=True, slots=True)
class PartWalk:
    """The order in which one combine pass visits runs of live tokens and stored bodies.

    cu_runs: offsets `[P + 1]` of every part's live run in the packed tokens; a run may be empty.
    cu_parts: offsets `[B + 1]` of every request's parts.
    prepared: what an op works out from the walk alone, once for all layers.
    """

    cu_runs: tuple[int, ...]
    cu_parts: tuple[int, ...]
    prepared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_parts(self) -> int:
        """P."""
        return len(self.cu_runs) - 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.cu_runs[-1]

    def parts_of(self, request: int) -> range:
        """The indices of a request's parts."""
        return range(self.cu_parts[request], self.cu_parts[request + 1])

    def run(self, part: int) -> slice:
        """The packed tokens of a part."""
        return slice(self.cu_runs[part], self.cu_runs[part + 1])

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self.cu_parts) - 1


@dataclass(frozen=True, slots=True)
class WalkRoom:
    """How much a recorded pass over walks holds at most: tokens, parts, chunks of them; requests and kept parts exactly.

    chunk_tokens: of a full chunk.
    """

    tokens: int
    parts: int
    chunks: int
    requests: int
    kept: int
    chunk_tokens: int
