"""Routed experts, how tokens choose them, and what their router asks of the host."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from bench.kernels.case import Case, Timed, draw
from services.worker.ops.routed_swiglu import Choice, SharedTerm, grouped, naive
from services.worker.ops.routed_swiglu import triton as kernels
from services.worker.ops.routing import RoutingRule, Scoring, choose
from services.worker.ops.routing import naive as naive_routing
from services.worker.ops.routing import triton as routing_kernels

__all__ = ["small_cases", "true_cases"]


_GROUPED = RoutingRule(256, 8, Scoring.SIGMOID, True, corrected=True, num_groups=8, top_groups=4, scale=2.5)


@dataclass(frozen=True, slots=True)
class _Block:
    """Weights of one layer."""

    routing: RoutingRule
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, routing: RoutingRule, hidden: int, size: int, dtype: torch.dtype, device: torch.device) -> "_Block":
        experts = routing.num_experts
        gate_up = draw(experts, 2 * size, hidden, device=device) * hidden**-0.5
        return cls(routing, gate_up.to(dtype), (draw(experts, hidden, size, device=device) * size**-0.5).to(dtype))

    def wide(self) -> "_Block":
        return replace(self, gate_up=self.gate_up.float(), down=self.down.float())

    def choose(self, tokens: int) -> Choice:
        return choose(self.routing, draw(tokens, self.routing.num_experts, device=self.down.device), None)

    def share(self, hidden: torch.Tensor) -> SharedTerm:
        """What a gated shared block might have made of the hidden states."""
        return SharedTerm(hidden.flip(0), draw(len(hidden), device=hidden.device))

    def run(self, form: ModuleType, hidden: torch.Tensor, choice: Choice) -> list[torch.Tensor]:
        return [form.feed_forward(hidden, choice, self.gate_up, self.down, self.share(hidden))]

    def num_bytes(self, choice: Choice) -> float:
        """The weights of the chosen experts, rows in and out, and activations and parts written and read back."""
        _, hidden, size = self.down.shape
        chosen, pairs = len(choice.experts.unique()), choice.experts.numel()
        rows = 3 * len(choice.experts) * hidden + 2 * pairs * (size + hidden)
        return self.down.itemsize * (3.0 * chosen * size * hidden + rows)


def _case(tokens: int, block: _Block, form: ModuleType, tolerance: float) -> Case:
    _, channels, size = block.down.shape
    hidden, choice = draw(tokens, channels, device=block.down.device, dtype=block.down.dtype), block.choose(tokens)
    shared = block.share(hidden)
    return Case(
        f"experts, {tokens} tokens",
        lambda: block.run(kernels, hidden, choice),
        lambda: block.wide().run(form, hidden.float(), choice),
        tolerance,
        Timed(
            lambda: kernels.feed_forward(hidden, choice, block.gate_up, block.down, shared),
            block.num_bytes(choice),
            6.0 * choice.experts.numel() * channels * size,
        ),
    )


def _routing_case(tokens: int, rule: RoutingRule, device: torch.device) -> Case:
    """Weights from the best on: where two forms round equals apart, they name other experts of the same weight."""
    wider = draw(tokens, rule.num_experts + 8, device=device)
    logits = wider[:, : rule.num_experts]
    bias = draw(rule.num_experts, device=device) * 1e-2 if rule.corrected else None
    return Case(
        f"routing, {tokens} tokens, {rule.num_experts} experts in {rule.num_groups} groups",
        lambda: [routing_kernels.choose(rule, logits, bias).weights],
        lambda: [naive_routing.choose(rule, logits, bias).weights],
        1e-5,
        Timed(lambda: routing_kernels.choose(rule, logits, bias), tokens * (4.0 * rule.num_experts + 8.0 * rule.top_k)),
    )


def _without_waiting(tokens: int, block: _Block) -> Case:
    """CUDA raises where routing or experts would wait for the device."""
    hidden = draw(tokens, block.down.shape[1], device=block.down.device, dtype=block.down.dtype)

    def run() -> list[torch.Tensor]:
        block.run(kernels, hidden, block.choose(tokens))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return block.run(kernels, hidden, block.choose(tokens))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return Case(
        f"router and experts wait for nothing, {tokens} tokens",
        run,
        lambda: block.run(kernels, hidden, block.choose(tokens)),
        0.0,
    )


def small_cases(device: torch.device) -> Iterator[Case]:
    """Against the naive form, an expert without a token among them."""
    block = _Block.draw(RoutingRule(6, 3, Scoring.SOFTMAX, renormalised=True), 72, 40, torch.float32, device)
    for tokens in (1, 40):
        yield _case(tokens, block, naive, 1e-4)
        yield _routing_case(tokens, RoutingRule(6, 3, Scoring.SOFTMAX, renormalised=True), device)
        yield _routing_case(tokens, replace(_GROUPED, num_experts=24, top_k=4), device)


def true_cases(device: torch.device) -> Iterator[Case]:
    """In bf16 against the grouped form in fp32."""
    block = _Block.draw(RoutingRule(256, 8, Scoring.SOFTMAX, renormalised=True), 2048, 512, torch.bfloat16, device)
    for tokens in (1, 64, 600, 4096, 32768):
        yield _case(tokens, block, grouped, 2e-2)
        yield _routing_case(tokens, block.routing, device)
    # Few tokens: where sums with a bias are all but equal, two forms choose experts of other weights.
    yield _routing_case(64, _GROUPED, device)
    for tokens in (1, 32768):
        yield _without_waiting(tokens, block)
