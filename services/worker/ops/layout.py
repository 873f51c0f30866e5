"""How packed live tokens are cut into runs and parts, shared by the ops that carry a state over them."""

from dataclasses import dataclass

import torch

__all__ = ["Body", "PartWalk"]


@dataclass(frozen=True, slots=True)
class Body:
    """What a stored segment body does to a recurrent state: `state_out = transition @ state_in + end_state`.

    transition: `[H, K, K]` fp32, or None where the body forgets everything before it.
    end_state: `[H, K, V]` fp32, the state after the body from a zero start.
    """

    transition: torch.Tensor | None
    end_state: torch.Tensor

    def apply(self, state: torch.Tensor) -> torch.Tensor:
        """The state `[H, K, V]` after the body."""
        if self.transition is None:
            return self.end_state.clone()
        return torch.baddbmm(self.end_state, self.transition, state)


@dataclass(frozen=True, slots=True)
class PartWalk:
    """The order in which one combine pass visits runs of live tokens and stored bodies.

    cu_runs: offsets `[P + 1]` of every part's live run in the packed tokens; a run may be empty.
    cu_parts: offsets `[B + 1]` of every request's parts.
    """

    cu_runs: tuple[int, ...]
    cu_parts: tuple[int, ...]

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
