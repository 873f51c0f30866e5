"""Routed experts: every token passes through the few SwiGLU blocks that its router chooses, and through a shared one.

How a router chooses is data, for all families:

| family | scores | chosen by | weights |
| --- | --- | --- | --- |
| Qwen3.5-MoE, MiniMax-M1 | softmax | score | renormalised |
| Qwen3-Next | softmax | score | renormalised where its config says so |
| Kimi-Linear, Ring | sigmoid | score + bias, inside the best groups (arXiv 2412.19437 §2.1.2) | renormalised, scaled |

There is no capacity: a token's experts and their sum depend on its own row alone. The rounding of a matrix product may still
depend on how many rows an expert was given.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F

from services.worker.models.decoder import SwiGlu
from services.worker.models.errors import CheckpointError
from services.worker.models.spec import DenseShape
from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routed_swiglu import dispatch as routed_swiglu

__all__ = ["ExpertNames", "Experts", "ExpertsShape", "Routing", "Scoring", "choose"]


class Scoring(StrEnum):
    """From logits to scores: against each other, or each on its own."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses `top_k` of `num_experts`.

    corrected: a learned bias is added for choosing, and left out of the weights; with several groups only the experts of the
    `top_groups` best are open, a group being as good as its two best experts together; renormalised: the weights of the
    chosen sum to one; scale: on the weights, last.

    Raises:
        CheckpointError: nothing can be chosen so.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalised: bool
    corrected: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        even = self.num_groups >= 1 and self.num_experts % self.num_groups == 0
        possible = even and 1 <= self.top_groups <= self.num_groups
        if not possible or not 1 <= self.top_k <= self.top_groups * self.group_size:
            raise CheckpointError(
                f"config.json: no token can choose {self.top_k} of {self.num_experts} experts in {self.top_groups} of "
                f"{self.num_groups} groups; download config.json again"
            )

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Routed blocks of `size` channels each, and a shared block of `shared_size` where there is one.

    shared_gated: the shared block's output is scaled by a sigmoid of the token.
    """

    size: int
    routing: Routing
    shared_size: int | None = None
    shared_gated: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`."""
        return self.routing.num_experts * self._one(hidden_size) + self._always(hidden_size)

    def num_active_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`: the chosen experts, the router, and the shared block."""
        return self.routing.top_k * self._one(hidden_size) + self._always(hidden_size)

    def _one(self, hidden_size: int) -> int:
        return DenseShape(self.size).num_parameters(hidden_size)

    def _always(self, hidden_size: int) -> int:
        router = self.routing.num_experts * (hidden_size + int(self.routing.corrected))
        shared = 0 if self.shared_size is None else DenseShape(self.shared_size).num_parameters(hidden_size)
        return router + shared + (hidden_size if self.shared_gated else 0)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls the tensors of its block: three of an expert, router and bias, shared block and its gate."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate.weight"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate.weight"


def choose(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    """The experts of tokens by their logits `[N, E]` and the bias `[E]`, both fp32. Of equals the first is taken."""
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    open_scores = _in_best_groups(routing, scores if bias is None else scores + bias)
    experts = _best(open_scores, routing.top_k)
    weights = scores.gather(-1, experts)
    if routing.renormalised:
        # The constant is that of the public routers: sigmoid scores may all round to zero.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Choice(experts, weights * routing.scale)


def _in_best_groups(routing: Routing, scores: torch.Tensor) -> torch.Tensor:
    """Scores with those of all but the best groups closed by −∞."""
    if routing.top_groups == routing.num_groups:
        return scores
    grouped: torch.Tensor = scores.unflatten(-1, (routing.num_groups, routing.group_size))
    worth = grouped.topk(min(2, routing.group_size), dim=-1).values.sum(-1)
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, _best(worth, routing.top_groups), value=False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the largest; `topk` would leave it to the device which of two equals it takes."""
    order: torch.Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's block; see `FeedForward`.

    router `[E, hidden]`, bias `[E]` fp32; gate_up `[E, 2 I, hidden]`, down `[E, hidden, I]`; shared_gate `[1, hidden]`.
    """

    routing: Routing
    router: torch.Tensor
    bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SwiGlu | None = None
    shared_gate: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `FeedForward`. Logits, weights and the sum over experts are fp32."""
        choice = choose(self.routing, F.linear(hidden.float(), self.router), self.bias)
        mixed = routed_swiglu.feed_forward(hidden, choice, self.gate_up, self.down)
        if self.shared is None:
            return mixed
        shared = self.shared(hidden)
        return mixed + (shared if self.shared_gate is None else F.linear(hidden, self.shared_gate).sigmoid() * shared)
