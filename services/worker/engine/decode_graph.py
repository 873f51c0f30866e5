"""Decode steps on a GPU, recorded once for every number of requests and replayed: no launch is paid for again."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.decode import Decoded, DecodeRows
from services.worker.engine.recorder import Recorder, Recording
from services.worker.engine.sampling import pick_likeliest
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.columns import send_into
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.launch import FixedLaunch, fixed_launches

__all__ = ["DecodeGraphs"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a step reads, where it stays: tokens, positions, write slots and state slots `[4, B]`."""

    numbers: torch.Tensor

    @classmethod
    def create(cls, count: int, device: torch.device) -> "_Inputs":
        return cls(torch.zeros(4, count, dtype=torch.int64, device=device))

    def batch(self, queries: PagedQueries) -> DecodeBatch:
        return DecodeBatch(queries, self.numbers[2], self.numbers[3])

    def send(self, rows: DecodeRows) -> None:
        send_into(self.numbers[1:], torch.tensor([rows.positions, rows.write_slots, rows.slots]))

    def send_tokens(self, token_ids: Sequence[int]) -> None:
        send_into(self.numbers[0], torch.tensor(token_ids))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One recorded step over tensors that stay where they are."""

    step: Recording
    inputs: _Inputs
    launches: Sequence[FixedLaunch]

    def refill(self, rows: DecodeRows) -> bool:
        """Take over another step; False where tables have outgrown this one."""
        queries = rows.queries(self.inputs.numbers[1], is_fixed=True)
        if not all(launch.refresh(queries) for launch in self.launches):
            return False
        self.inputs.send(rows)
        return True


class DecodeGraphs:
    """The recorded steps of one engine, by number of requests. See `Decoder`.

    A number that is met for the first time runs as it is, which compiles and loads every kernel; then it is recorded.
    Recording runs nothing, so no state moves; where it fails, steps run as they are from then on.
    """

    prepares = True

    def __init__(self, context: EngineContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder
        self._recorded: dict[int, _Recorded] = {}
        self._ready: tuple[DecodeRows, _Recorded] | None = None
        self._is_given_up = False

    def prepare(self, rows: DecodeRows) -> None:
        """See `Decoder`: what is sent is there behind the step that runs."""
        recorded = self._recorded.get(len(rows.slots))
        self._ready = None if recorded is None or not recorded.refill(rows) else (rows, recorded)

    def step(self, token_ids: Sequence[int], rows: DecodeRows) -> Decoded:
        """See `Decoder`."""
        if self._ready is None or self._ready[0] is not rows:
            self.prepare(rows)
        ready, self._ready = self._ready, None
        if ready is None:
            return self._run(token_ids, rows)
        recorded = ready[1]
        recorded.inputs.send_tokens(token_ids)
        recorded.step.replay()
        return Decoded(*recorded.step.outputs)

    def _run(self, token_ids: Sequence[int], rows: DecodeRows) -> Decoded:
        """As it is, over tensors of its own, on which it is recorded."""
        inputs = _Inputs.create(len(token_ids), self._context.device)
        inputs.send(rows)
        inputs.send_tokens(token_ids)
        batch = inputs.batch(rows.queries(inputs.numbers[1], is_fixed=True))
        decoded = self._decode(inputs, batch)
        if not self._is_given_up:
            try:
                self._recorded[len(token_ids)] = self._record(inputs, batch)
            except Exception:  # whatever a device refuses to record, the step has its result
                _log.exception("decode steps could not be recorded; they run as they are from now on")
                self._is_given_up = True
        return decoded

    def _record(self, inputs: _Inputs, batch: DecodeBatch) -> _Recorded:
        """A step over tensors that have run before, so that nothing is compiled or loaded on the way.

        The tables of the requests that are there do not live as long as the graph.
        """
        launches = fixed_launches(batch.queries)
        queries = PagedQueries(batch.queries.positions, (), (), is_fixed=True, prepared={**launches})
        recorded = replace(batch, queries=queries)

        def run() -> list[torch.Tensor]:
            decoded = self._decode(inputs, recorded)
            return [decoded.logits, decoded.likeliest]

        return _Recorded(self._recorder.record(run), inputs, tuple(launches.values()))

    def _decode(self, inputs: _Inputs, batch: DecodeBatch) -> Decoded:
        logits = self._context.model.decode(inputs.numbers[0], batch)
        return Decoded(logits, pick_likeliest(logits))
