"""A virtual worker: one device that runs one sweep at a time, prompts first, and what waits for it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.router.domain.assignment import ColdSegment
from services.router.domain.workers import WorkerSpeeds, WorkerView
from services.simulator.costs import Costs, Curve
from services.simulator.ways import Link, Window

__all__ = ["CapturePass", "Prompt", "Worker"]

_PAST = Window(-math.inf, -math.inf)


@dataclass(slots=True)
class Prompt:
    """A request on its combine worker.

    own_seconds: of its combine without the pass that it may share; outstanding: states of which it is not known yet
    when they are there; known: when the others are; captures: whether it waits for captures of its own.
    """

    index: int
    own_seconds: float
    live_tokens: int
    outstanding: set[bytes] = field(default_factory=set)
    known: Window = _PAST

    def learn(self, key: bytes, window: Window) -> None:
        """A state is there, layer by layer, within the window."""
        self.outstanding.discard(key)
        self.known = Window(max(self.known.first, window.first), max(self.known.last, window.last))


@dataclass(slots=True)
class CapturePass:
    """Segments that go through the layers together, chunk by chunk of each; taken: tokens of each that are done."""

    segments: list[ColdSegment]
    taken: int = 0

    def take_chunk(self, chunk_tokens: int) -> int:
        """Tokens of the next pass."""
        tokens = sum(min(max(one.num_tokens - self.taken, 0), chunk_tokens) for one in self.segments)
        self.taken += chunk_tokens
        return tokens

    @property
    def is_complete(self) -> bool:
        """No token is left."""
        return all(one.num_tokens <= self.taken for one in self.segments)


@dataclass(slots=True)
class Worker:
    """Its state at the present moment of the simulation.

    captures: in line, the first one first; prompts: accepted, by request, without a first token so far; ready: those of them
    whose states are there, in the order in which they may begin.
    """

    worker_id: str
    host: str
    costs: Costs
    speeds: WorkerSpeeds
    busy_until: float = 0.0
    busy_seconds: float = 0.0
    is_busy: bool = False
    captures: deque[ColdSegment] = field(default_factory=deque)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    ready: deque[Prompt] = field(default_factory=deque)
    link: Link = field(default_factory=Link)
    _pack: CapturePass | None = None
    _capture_tokens: int = 0
    _combine_seconds: float = 0.0

    @property
    def has_work(self) -> bool:
        """Something could run now."""
        return bool(self.ready or self.captures or self._pack)

    def view(self, now: float) -> WorkerView:
        """As the router sees it."""
        running = max(self.busy_until - now, 0.0) if self.is_busy else 0.0
        backlog = running + self.speeds.capture.seconds(self._capture_tokens) + self._combine_seconds
        return WorkerView(self.worker_id, self.speeds, host=self.host, backlog_seconds=backlog)

    def order(self, segment: ColdSegment) -> None:
        """Put a capture in line."""
        self.captures.append(segment)
        self._capture_tokens += segment.num_tokens

    def accept(self, prompt: Prompt) -> None:
        """Take a prompt."""
        self.prompts[prompt.index] = prompt
        self._combine_seconds += self.costs.combine.pass_seconds + prompt.own_seconds

    def begin(self, now: float, until: float) -> None:
        """A sweep runs."""
        self.is_busy, self.busy_until = True, until
        self.busy_seconds += until - now

    def finish(self, prompts: Sequence[Prompt]) -> None:
        """The sweep has ended, and these have their first tokens."""
        self.is_busy = False
        for prompt in prompts:
            del self.prompts[prompt.index]
            self._combine_seconds -= self.costs.combine.pass_seconds + prompt.own_seconds
        if not self.prompts:
            self._combine_seconds = 0.0

    def take_prompts(self) -> list[Prompt]:
        """Ready prompts for one sweep, at least one."""
        taken = [self.ready.popleft()]
        room = self.costs.combine.sweep_tokens - taken[0].live_tokens
        while self.ready and self.ready[0].live_tokens <= room:
            taken.append(self.ready.popleft())
            room -= taken[-1].live_tokens
        return taken

    def combine_seconds(self, prompts: Sequence[Prompt]) -> float:
        """Of a sweep of prompts."""
        return self.costs.combine.pass_seconds + sum(prompt.own_seconds for prompt in prompts)

    def take_pass(self, curve: Curve) -> tuple[float, list[ColdSegment]]:
        """Seconds of the next pass of captures, and the segments that are complete behind it."""
        pack = self._pack or CapturePass(self._take_segments())
        tokens = pack.take_chunk(self.costs.capture.chunk_tokens)
        self._capture_tokens -= tokens
        self._pack = None if pack.is_complete else pack
        return curve.seconds(tokens), pack.segments if pack.is_complete else []

    def _take_segments(self) -> list[ColdSegment]:
        """Neighbours in line up to the tokens of a pass, at least one."""
        taken = [self.captures.popleft()]
        room = self.costs.capture.pass_tokens - taken[0].num_tokens
        while self.captures and self.captures[0].num_tokens <= room:
            taken.append(self.captures.popleft())
            room -= taken[-1].num_tokens
        return taken
