"""Decode steps on a GPU, recorded once for every number of requests and replayed: no launch is paid for again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.context import EngineContext
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.triton import FixedLaunch, fix_launches

__all__ = ["DecodeGraphs"]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded step over tensors that stay where they are."""

    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    batch: DecodeBatch
    launches: Sequence[FixedLaunch]
    logits: torch.Tensor

    def replay(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor | None:
        """Logits `[n, vocabulary]`, valid until the next step; None, with nothing done, where tables have outgrown it."""
        if not all(launch.refresh(batch.queries) for launch in self.launches):
            return None
        self.token_ids.copy_(token_ids)
        self.batch.queries.positions.copy_(batch.queries.positions)
        self.batch.write_slots.copy_(batch.write_slots)
        self.batch.slots.copy_(batch.slots)
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """The recorded steps of one engine, by number of requests.

    A number that is met for the first time runs as it is, which compiles and loads every kernel; then it is recorded.
    Recording runs nothing, so no state moves.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._recorded: dict[int, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def step(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One step of requests' last tokens `[n]`; logits `[n, vocabulary]`, valid until the next step."""
        recorded = self._recorded.get(len(token_ids))
        logits = None if recorded is None else recorded.replay(token_ids, batch)
        if logits is None:
            logits = self._context.model.decode(token_ids, batch)
            self._recorded[len(token_ids)] = self._record(token_ids, batch)
        return logits

    def _record(self, token_ids: torch.Tensor, batch: DecodeBatch) -> _Recorded:
        asked = batch.queries
        queries = PagedQueries(asked.positions.clone(), asked.cu_queries, asked.tables, asked.on_host)
        launches = fix_launches(asked, queries)
        own_ids, own = token_ids.clone(), DecodeBatch(queries, batch.write_slots.clone(), batch.slots.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._context.model.decode(own_ids, own)
        # The tables of the requests that were there at the time must not live as long as the graph.
        kept = DecodeBatch(PagedQueries(queries.positions, (), ()), own.write_slots, own.slots)
        return _Recorded(graph, own_ids, kept, launches, logits)
