"""How a router decides."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["RoutingRule", "Scoring"]


class Scoring(StrEnum):
    """From logits to scores: against each other, or each on its own."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How a token chooses `top_k` of `num_experts`.

    corrected: a learned bias is added for choosing, and left out of the weights; with several groups only the experts of the
    `top_groups` best are open, a group being as good as its two best experts together; renormalised: the weights of the
    chosen sum to one; scale: on the weights, last.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalised: bool
    corrected: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups
