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

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.share import Share
from services.worker.models.decoder import SwiGlu
from services.worker.models.errors import CheckpointError
from services.worker.models.spec import DenseShape
from services.worker.ops.routed_swiglu import SharedTerm
from services.worker.ops.routed_swiglu import dispatch as routed_swiglu
from services.worker.ops.routing import RoutingRule, Scoring, choose

__all__ = ["ExpertNames", "Experts", "ExpertsShape", "Routing", "Scoring", "stack_router"]


@dataclass(frozen=True, slots=True)
class Routing(RoutingRule):
    """A rule under which a token can choose.

    Raises:
        CheckpointError: nothing can be chosen so.
    """

    def __post_init__(self) -> None:
        even = self.num_groups >= 1 and self.num_experts % self.num_groups == 0
        possible = even and 1 <= self.top_groups <= self.num_groups
        if not possible or not 1 <= self.top_k <= self.top_groups * self.group_size:
            raise CheckpointError(
                f"config.json: no token can choose {self.top_k} of {self.num_experts} experts in {self.top_groups} of "
                f"{self.num_groups} groups; download config.json again"
            )


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Routed blocks of `size` channels each, and a shared block of `shared_size` where there is one.

    shared_gated: the shared block's output is scaled by a sigmoid of the token; router_fp32: the router's matrix is kept in
    fp32, as for families whose public code multiplies it so, or in the model's dtype.
    """

    size: int
    routing: Routing
    shared_size: int | None = None
    shared_gated: bool = False
    router_fp32: bool = True

    def num_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`."""
        return self.routing.num_experts * self._one(hidden_size) + self._always(hidden_size)

    def num_active_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`: the chosen experts, the router, and the shared block."""
        return self.routing.top_k * self._one(hidden_size) + self._always(hidden_size)

    def split(self, share: Share) -> "ExpertsShape":
        """See `FeedForwardShape`: a rank has some channels of every expert, so that ranks work alike whatever is chosen."""
        shared = None if self.shared_size is None else share.of(self.shared_size, "channels of a shared expert")
        return replace(self, size=share.of(self.size, "channels of an expert"), shared_size=shared)

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


def stack_router(experts: torch.Tensor, shared_gate: torch.Tensor) -> torch.Tensor:
    """Rows of experts `[E, hidden]` and a shared block's gate `[1, hidden]`, for one product.

    Rows of zeros follow up to a multiple of eight: tensor cores take rows of products that are whole vectors.
    """
    rows = torch.cat([experts, shared_gate.to(experts.dtype)])
    return F.pad(rows, (0, 0, 0, -len(rows) % 8))


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's block; see `FeedForward`.

    router `[R, hidden]` in the hidden states' dtype or fp32: a row an expert, behind them that of the shared block's gate
    where `shared_gated`, then rows that nothing reads; bias `[E]` fp32; gate_up `[E, 2 I, hidden]`, down `[E, hidden, I]`.
    """

    routing: Routing
    router: torch.Tensor
    bias: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SwiGlu | None = None
    shared_gated: bool = False

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `FeedForward`. Logits, weights and the sum over experts are fp32."""
        logits = _router_logits(hidden, self.router)
        choice = choose(self.routing, logits[:, : self.routing.num_experts], self.bias)
        shared = self._shared_term(hidden, logits)
        return routed_swiglu.feed_forward(hidden, choice, self.gate_up, self.down, shared, residual)

    def _shared_term(self, hidden: torch.Tensor, logits: torch.Tensor) -> SharedTerm | None:
        if self.shared is None:
            return None
        return SharedTerm(self.shared(hidden), logits[:, self.routing.num_experts] if self.shared_gated else None)


def _router_logits(hidden: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """fp32 logits `[N, R]`; products of halves are exact in fp32, so that a GPU multiplies them as they are."""
    if hidden.is_cuda and hidden.dtype == router.dtype and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, router.t(), out_dtype=torch.float32)
    return F.linear(hidden.float(), router.float())
