"""Decode steps on a GPU, recorded once for every number of requests and replayed: no launch is paid for again."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.recorder import Recorder, Recording
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.triton import FixedLaunch, fixed_launches

__all__ = ["DecodeGraphs"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded step over tensors that stay where they are."""

    step: Recording
    token_ids: torch.Tensor
    batch: DecodeBatch
    launches: Sequence[FixedLaunch]

    def replay(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor | None:
        """Logits `[n, vocabulary]`, valid until the next step; None, with nothing done, where tables have outgrown it."""
        if not all(launch.refresh(batch.queries) for launch in self.launches):
            return None
        self.token_ids.copy_(token_ids)
        self.batch.queries.positions.copy_(batch.queries.positions)
        self.batch.write_slots.copy_(batch.write_slots)
        self.batch.slots.copy_(batch.slots)
        self.step.replay()
        return self.step.outputs[0]


class DecodeGraphs:
    """The recorded steps of one engine, by number of requests.

    A number that is met for the first time runs as it is, which compiles and loads every kernel; then it is recorded.
    Recording runs nothing, so no state moves; where it fails, steps run as they are from then on.
    """

    def __init__(self, context: EngineContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder
        self._recorded: dict[int, _Recorded] = {}
        self._is_given_up = False

    def step(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One step of requests' last tokens `[n]`; logits `[n, vocabulary]`, valid until the next step."""
        if self._is_given_up:
            return self._context.model.decode(token_ids, batch)
        recorded = self._recorded.get(len(token_ids))
        logits = None if recorded is None else recorded.replay(token_ids, batch)
        return self._run_and_record(token_ids, batch) if logits is None else logits

    def _run_and_record(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        own_ids, own = _own(token_ids, batch)
        logits = self._context.model.decode(own_ids, own)
        try:
            self._recorded[len(token_ids)] = self._record(own_ids, own)
        except Exception:  # whatever a device refuses to record, the step has its result
            _log.exception("decode steps could not be recorded; they run as they are from now on")
            self._is_given_up = True
        return logits

    def _record(self, token_ids: torch.Tensor, batch: DecodeBatch) -> _Recorded:
        """A step over tensors that have run before, so that nothing is compiled or loaded on the way.

        The tables of the requests that are there do not live as long as the graph.
        """
        launches = fixed_launches(batch.queries)
        queries = PagedQueries(batch.queries.positions, (), (), is_fixed=True, prepared={**launches})
        recorded = replace(batch, queries=queries)
        step = self._recorder.record(lambda: [self._context.model.decode(token_ids, recorded)])
        return _Recorded(step, token_ids, recorded, tuple(launches.values()))


def _own(token_ids: torch.Tensor, batch: DecodeBatch) -> tuple[torch.Tensor, DecodeBatch]:
    """The same step over tensors of its own."""
    queries = replace(batch.queries, positions=batch.queries.positions.clone(), is_fixed=True, prepared={})
    return token_ids.clone(), DecodeBatch(queries, batch.write_slots.clone(), batch.slots.clone())
