"""Arguments and results of the op."""

from dataclasses import dataclass

import torch

__all__ = ["BodyPlanes", "PackedBodies", "PassedBody"]


@dataclass(frozen=True, slots=True)
class PassedBody:
    """What a capture leaves of one body in one linear layer; all may be views of what was packed with it.

    transition in a form of `apply_transition`; seam_state `[H, K, V]` at the body's first token and state behind its last, fp32;
    tail `[taps − 1, C]`; log_bounds `[n, H]` fp32: of every token the logarithm of what bounds its transition.
    """

    transition: torch.Tensor
    seam_state: torch.Tensor
    state: torch.Tensor
    tail: torch.Tensor
    log_bounds: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedBodies:
    """What a capture leaves of segments that one chunk holds whole, in one linear layer: as of `PassedBody`, packed.

    transitions, seam_states, states `[R, H, …]`, tails `[R, taps − 1, C]`; log_bounds `[N, H]` of all tokens; firsts, counts
    int64 `[R]`: every body's first token, and how many it has.
    """

    transitions: torch.Tensor
    seam_states: torch.Tensor
    states: torch.Tensor
    tails: torch.Tensor
    log_bounds: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class BodyPlanes:
    """What is kept of a body: transition, end state and tail as above, decay `[H]` fp32; memory of its own."""

    transition: torch.Tensor
    end_state: torch.Tensor
    tail: torch.Tensor
    decay: torch.Tensor
