"""What runs ahead of decoding: captures and combines, taken from their lines through the layers, together where that is free."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.capture_queue import CaptureQueue
from services.worker.engine.combine import CombineRows
from services.worker.engine.combine_graph import choose_combine_graphs
from services.worker.engine.combine_queue import CombineQueue
from services.worker.engine.context import EngineContext
from services.worker.engine.sweep import Rows, Sweep

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
    """A sweep on its way, and whose rows are in it."""

    members: list[_Member]
    sweep: Sweep
    steps: Generator[None, None, None]


class Prefill:
    """Prompts first: they wait for no sweep of captures, and those that capture themselves come behind those that do not,
    though not behind more than `_OVERTAKING_SWEEPS` of them.

    Captures that wait when a sweep of prompts begins fill its room, up to a number of rows that costs a GPU no more than
    one of them; not where prompts are replayed, which takes half the time of any sweep, so that nobody's first token is
    later for a neighbour's capture.
    """

    def __init__(
        self, context: EngineContext, combines: CombineQueue, cold: CombineQueue, captures: CaptureQueue
    ) -> None:
        self._context = context
        self._combines = combines
        self._cold = cold
        self._captures = captures
        # The most urgent first.
        self._lines: tuple[Line, ...] = (combines, cold, captures)
        self._graphs = choose_combine_graphs(context)
        self._running: list[_Running] = []
        self._overtaken = 0

    @property
    def has_work(self) -> bool:
        """Something is left to capture or to combine."""
        return any(line.has_work for line in self._lines)

    def cancel(self, request_id: str) -> None:
        """Stop whatever runs under an id."""
        for line in self._lines:
            if line.cancel(request_id):
                self._drop(line)

    def advance(self) -> int:
        """One layer of the running sweep, or the start of the next; returns token layers spent."""
        line = self._next_line()
        if line is not None:
            self._begin(line)
            return 0
        running = self._running[-1]
        tokens = running.sweep.num_tokens
        try:
            next(running.steps)
        except StopIteration:
            self._end(running)
            for member in running.members:
                member.line.finish()
        except Exception as error:
            if self._context.is_split:
                raise
            self._end(running)
            self._give_back(running.members, error)
        return tokens

    def _next_line(self) -> Line | None:
        """Whose sweep begins now, between two layers of one that is less urgent."""
        first = 1 if self._cold.has_work and self._overtaken >= _OVERTAKING_SWEEPS else 0
        last = self._lines.index(self._running[-1].members[0].line) if self._running else len(self._lines)
        return next((line for line in self._lines[first:last] if line.is_ready), None)

    def _end(self, running: _Running) -> None:
        self._running.remove(running)
        if any(member.line is self._cold for member in running.members):
            self._overtaken = 0

    def _begin(self, line: Line) -> None:
        if line is self._combines and self._cold.has_work:
            self._overtaken += 1
        members = [member for member in self._take(line) if member.rows]
        if members:
            rows = [own for member in members for own in member.rows]
            sweep = Sweep(self._context, rows)
            self._running.append(_Running(members, sweep, self._steps(sweep, rows)))

    def _steps(self, sweep: Sweep, rows: Sequence[Rows]) -> Generator[None, None, None]:
        """Prompts alone are replayed where they can be recorded."""
        first = rows[0]
        if self._graphs is not None and len(rows) == 1 and isinstance(first, CombineRows):
            return self._graphs.run(first)
        return sweep.run()

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
