"""Bytes of weights that a pass reads: all but the experts that no token chose."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import measure_sizes
from services.worker.mixers.share import WHOLE, Share
from services.worker.models.checkpoint import read_json
from services.worker.models.experts import ExpertsShape
from services.worker.models.registry import find_family
from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routed_swiglu import dispatch as routed_swiglu

__all__ = ["ExpertCount", "WeightSizes", "counted_experts"]


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """In bytes, but for the counts.

    total: all weights; always: what every pass reads, without an embedding that is no head; expert: one expert of one
    layer; expert_layers: layers that have experts, `experts` each, of which a token takes `chosen`; active_parameters: see
    `inspection.sizes.Sizes`.
    """

    total: int
    always: int
    expert: int
    expert_layers: int
    experts: int
    chosen: int
    active_parameters: int

    @classmethod
    def read(cls, config: Path, dtype: torch.dtype, share: Share = WHOLE) -> "WeightSizes":
        """Of a share of a model in `dtype`; needs its `config.json` alone."""
        fields = read_json(config / "config.json")
        family = find_family(config, fields)
        spec = family.read_spec(fields)
        requests = record_requests(family, spec, dtype, frozenset(), share)
        sizes = measure_sizes(spec, requests, dtype.itemsize, share)
        routed = sum(request.num_bytes for name, request in requests.items() if ".experts." in name)
        looked_up = sum(request.num_bytes for name, request in requests.items() if "embed" in name)
        blocks = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsShape)]
        num_experts = sum(block.routing.num_experts for block in blocks)
        return cls(
            total=sizes.weights,
            always=sizes.weights - routed - (0 if spec.tied_head else looked_up),
            expert=routed // num_experts if num_experts else 0,
            expert_layers=len(blocks),
            experts=blocks[0].routing.num_experts if blocks else 0,
            chosen=blocks[0].routing.top_k if blocks else 0,
            active_parameters=sizes.active_parameters,
        )

    def touched(self, count: "ExpertCount", num_tokens: int) -> int:
        """Bytes that a pass over `num_tokens` tokens reads at least once, from the first pass that was counted.

        Where none was, a note is printed and experts are taken to be equally likely, which are more than random weights choose.
        """
        if len(count.blocks) >= self.expert_layers:
            return self.always + self.expert * sum(count.blocks[: self.expert_layers])
        print("  note: no routed block was seen; experts are taken to be equally likely", flush=True)
        missed = (1 - self.chosen / self.experts) ** num_tokens
        return self.always + int(self.expert * self.expert_layers * self.experts * (1 - missed))


@dataclass(slots=True)
class ExpertCount:
    """Distinct experts of every routed block that ran, in order."""

    blocks: list[int] = field(default_factory=list)


@contextmanager
def counted_experts() -> Iterator[ExpertCount]:
    """Counts the experts that tokens choose while it is open; it waits for the device, so time nothing in it."""
    count, feed_forward = ExpertCount(), routed_swiglu.feed_forward

    def counting(hidden: torch.Tensor, choice: Choice, *rest: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 # passed through
        # Nothing may wait for the device while a graph is recorded.
        if not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
            count.blocks.append(choice.experts.unique().numel())
        return feed_forward(hidden, choice, *rest, **named)

    with patch.object(routed_swiglu, "feed_forward", counting):
        yield count
