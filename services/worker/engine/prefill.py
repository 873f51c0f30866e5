"""What runs ahead of decoding: captures and combines, taken from their lines through the layers, together where that is free."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.capture_queue import CaptureQueue
from services.worker.engine.combine_queue import AdmittedPrompt, CombineQueue
from services.worker.engine.context import EngineContext
from services.worker.engine.sweep import ALL_LAYERS, Rows, Sweep
from services.worker.engine.sweep_graphs import SweepGraphs, choose_sweep_graphs
from services.worker.engine.transfer import IncomingState

__all__ = ["Line", "Prefill"]


# Sweeps of other prompts that go before one of a prompt that captures.
_OVERTAKING_SWEEPS = 8


class Line(Protocol):
    """Work of one kind, of which at most one piece is in a sweep: taken from the line, it is finished, retried or failed."""

    @property
    def is_ready(self) -> bool:
        """Something waits, and nothing of it is in a sweep."""
        ...

    @property
    def has_work(self) -> bool:
        """Something waits or is in a sweep."""
        ...

    @property
    def layers_present(self) -> int:
        """How many layers the rows in the sweep may run now: what they read of later ones has yet to come."""
        ...

    def note_blocked(self, layer: int, seconds: float) -> None:
        """The sweep has waited so long for this layer."""
        ...

    def take(self) -> Sequence[Rows]:
        """The rows of the next piece; none where the line has dealt with what waited."""
        ...

    def finish(self) -> None:
        """The rows have come through all layers."""
        ...

    def retry(self) -> None:
        """A sweep failed that others shared: what was in it runs again, each on its own."""
        ...

    def fail(self, error: Exception) -> None:
        """A sweep of this line alone failed: what was in it runs again, each on its own, or is told."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Forget a request; no event follows. Returns whether the rows in the sweep are given up with it."""
        ...


@dataclass(frozen=True, slots=True)
class _Member:
    line: Line
    rows: Sequence[Rows]


@dataclass(slots=True)
class _Running:
    """A sweep on its way, and whose rows are in it. layer: the next one; blocked_since: when it could not run."""

    members: list[_Member]
    sweep: Sweep
    steps: Generator[None, None, None]
    layer: int = 0
    blocked_since: float | None = None

    @property
    def line(self) -> Line:
        """For which it was begun."""
        return self.members[0].line

    def can_advance(self) -> bool:
        """What the next layer reads is there; how long it was not is told when it is."""
        if any(member.line.layers_present <= self.layer for member in self.members):
            self.blocked_since = self.blocked_since or time.monotonic()
            return False
        if self.blocked_since is not None:
            for member in self.members:
                member.line.note_blocked(self.layer, time.monotonic() - self.blocked_since)
            self.blocked_since = None
        return True


class Prefill:
    """Prompts first: they wait for no sweep of captures, and those that capture themselves come behind those that do not,
    though not behind more than `_OVERTAKING_SWEEPS` of them.

    Captures that wait when a sweep of prompts begins fill its room, up to a number of rows that costs a GPU no more than
    one of them; not where prompts are replayed, which takes half the time of any sweep, so that nobody's first token is
    later for a neighbour's capture.

    A prompt whose states are on their way has a line and a sweep of its own, which waits where a layer has yet to come, while
    the others go on.
    """

    def __init__(
        self, context: EngineContext, combines: CombineQueue, cold: CombineQueue, captures: CaptureQueue
    ) -> None:
        self._context = context
        self._combines = combines
        self._cold = cold
        self._captures = captures
        self._arriving: list[CombineQueue] = []
        # Of each kind, since one kind's sweeps run between two layers of another's, over memory of their own.
        self._graphs, self._cold_graphs, self._capture_graphs = (choose_sweep_graphs(context) for _ in range(3))
        self._running: list[_Running] = []
        self._overtaken = 0

    @property
    def _lines(self) -> tuple[Line, ...]:
        """The most urgent first."""
        return (self._combines, *self._arriving, self._cold, self._captures)

    @property
    def combining(self) -> Sequence[CombineQueue]:
        """The lines of prompts."""
        return (self._combines, *self._arriving, self._cold)

    def add_line(self, line: CombineQueue) -> None:
        """The line of one prompt whose states are on their way."""
        self._arriving.append(line)

    def withdraw(self, incoming: IncomingState) -> list[AdmittedPrompt]:
        """A state will not come: take out the prompts that use it; what they held is given back."""
        found: list[AdmittedPrompt] = []
        for line in self._arriving:
            prompts, is_swept = line.withdraw(incoming)
            found += prompts
            if is_swept:
                self._drop(line)
        self._forget_lines()
        return found

    @property
    def has_work(self) -> bool:
        """Something is left to capture or to combine."""
        return any(line.has_work for line in self._lines)

    def cancel(self, request_id: str) -> None:
        """Stop whatever runs under an id."""
        for line in self._lines:
            if line.cancel(request_id):
                self._drop(line)
        self._forget_lines()

    def advance(self) -> int | None:
        """One layer of a running sweep, or the start of the next; returns token layers spent.

        None where every sweep waits for a layer that has yet to come.
        """
        running = next((one for one in reversed(self._running) if one.can_advance()), None)
        line = self._next_line(running)
        if line is not None:
            self._begin(line)
            return 0
        if running is None:
            return None
        self._run_layer(running)
        self._forget_lines()
        return running.sweep.num_tokens

    def _run_layer(self, running: _Running) -> None:
        try:
            next(running.steps)
            running.layer += 1
        except StopIteration:
            self._end(running)
            for member in running.members:
                member.line.finish()
        except Exception as error:
            if self._context.is_split:
                raise
            self._end(running)
            self._give_back(running.members, error)

    def _next_line(self, running: _Running | None) -> Line | None:
        """Whose sweep begins now, between two layers of one that is less urgent."""
        lines = self._lines
        is_overtaken = self._cold.has_work and self._overtaken >= _OVERTAKING_SWEEPS
        first = lines.index(self._cold) if is_overtaken else 0
        last = len(lines) if running is None else lines.index(running.line)
        return next((line for line in lines[first:last] if line.is_ready), None)

    def _forget_lines(self) -> None:
        self._arriving = [line for line in self._arriving if line.has_work]

    def _end(self, running: _Running) -> None:
        self._running.remove(running)
        if any(member.line is self._cold for member in running.members):
            self._overtaken = 0

    def _begin(self, line: Line) -> None:
        if line not in (self._cold, self._captures) and self._cold.has_work:
            self._overtaken += 1
        members = [member for member in self._take(line) if member.rows]
        if members:
            rows = [own for member in members for own in member.rows]
            sweep = Sweep(self._context, rows)
            is_present = all(member.line.layers_present == ALL_LAYERS for member in members)
            graphs = self._graphs_of(line) if is_present else None
            self._running.append(_Running(members, sweep, sweep.run() if graphs is None else graphs.run(rows)))

    def _graphs_of(self, line: Line) -> SweepGraphs | None:
        if line is self._captures:
            return self._capture_graphs
        return self._cold_graphs if line is self._cold else self._graphs

    def _take(self, line: Line) -> list[_Member]:
        taken = [_Member(line, line.take())]
        if line is self._combines and self._graphs is None:
            taken.append(_Member(self._captures, self._captures.take_within(self._combines.room)))
        return taken

    def _give_back(self, members: Sequence[_Member], error: Exception) -> None:
        if len(members) == 1:
            members[0].line.fail(error)
            return
        for member in members:
            member.line.retry()

    def _drop(self, line: Line) -> None:
        """Sweeps go on without a line's rows, or end where there are no others."""
        for running in self._running:
            for member in [one for one in running.members if one.line is line]:
                running.members.remove(member)
                running.sweep.drop(member.rows)
        self._running = [running for running in self._running if running.members]
