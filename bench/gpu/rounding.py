"""How far bf16 takes a composed prompt from the same composition in fp32, by the number of its segments.

Captured, composed and answered in either dtype over the same weights, and recomputed for comparison. Only the first layers
are asked, as by the gate.
"""

from collections.abc import Iterator, Sequence

import torch

from bench.engine_runs import capture_together, key
from bench.gpu.gate import QUESTIONS, last_logits, mean_error
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.loop import Engine

__all__ = ["measure"]

_GROWTH = 4


def measure(rig: Rig) -> Iterator[Row]:
    """One segment, and four times as many each time."""
    sizes = rig.sizes
    documents = [rig.ids(number, sizes.short_tokens) for number in range(sizes.many_segments)]
    engines = [_engine(rig, documents, dtype) for dtype in (rig.dtype, torch.float32)]
    count = 1
    while count <= len(documents):
        name = f"{count} segments of {sizes.short_tokens:,} tokens behind {rig.first_of_each_kind} layers"
        for kind, is_composed in (("composed", True), ("recomputed", False)):
            own, exact = (_logits(rig, engine, documents[:count], is_composed) for engine in engines)
            yield Row(f"relative error of logits, {kind}, {name}", mean_error(own, exact), "", better="lower")
        count *= _GROWTH


def _engine(rig: Rig, documents: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Engine:
    """That has captured all documents."""
    sizes = rig.sizes
    tokens = 2 * len(documents) * sizes.short_tokens + sizes.prime_tokens + sizes.question_tokens
    engine = rig.engine(tokens, 3 * len(documents) + 8, num_layers=rig.first_of_each_kind, dtype=dtype)
    capture_together(engine, {key(number): ids for number, ids in enumerate(documents)})
    return engine


def _logits(rig: Rig, engine: Engine, documents: Sequence[tuple[int, ...]], is_composed: bool) -> list[torch.Tensor]:
    store = engine.context.store
    parts = [
        CombinePart(ids, store.get_segment(key(number), ids) if is_composed else None)
        for number, ids in enumerate(documents)
    ]
    return [last_logits(rig, engine, parts, number).float() for number in range(QUESTIONS)]
