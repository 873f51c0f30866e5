"""Sampled requests run again, composed and in full, behind their replies and out of traffic's way."""

import asyncio
import contextvars
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from services.common.errors import HypicError, UnavailableError
from services.common.telemetry import get_logger
from services.router.domain.divergence import Comparison, compare
from services.router.domain.errors import RouterError
from services.router.domain.explain import Explanation
from services.router.domain.parts import PartKind
from services.router.domain.plan import Served
from services.router.domain.ports import Source, Work, Worker, Workers
from services.router.domain.request import Cold, GenerationRequest, Reuse, Sampling
from services.router.domain.shown_tokens import ShownToken
from services.router.domain.workers import Role, WorkerView
from services.router.guard import ModelVersion, QualityGuard, SampleOutcome
from services.router.reply import Delta, Done, ReplyEvent

__all__ = ["QuietWorkers", "ShadowPolicy", "ShadowSubject", "Shadows", "TrafficWorkers", "Way", "composes"]

_NUM_TOKENS = 4
_NUM_LIKELIEST = 20
_LAST_PRIORITY = 2**31 - 1
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    """running: comparisons at once; waiting: how many more are kept; patience_seconds: until one that found no quiet worker is
    dropped; busy_requests: a worker with more of them under way is left alone.
    """

    running: int
    waiting: int
    patience_seconds: float
    busy_requests: int


@dataclass(frozen=True, slots=True)
class ShadowSubject:
    """A request that was answered, and under what it counts."""

    request: GenerationRequest
    tag: str
    version: ModelVersion


class Way:
    """Where shadows run, so that traffic can stop them."""

    def __init__(self) -> None:
        self._running: defaultdict[str, set[asyncio.Task[object]]] = defaultdict(set)

    def clear(self, worker_id: str) -> None:
        """Traffic goes to this worker: shadows leave it."""
        for task in self._running.get(worker_id, ()):
            task.cancel()

    @contextmanager
    def use(self, worker_id: str) -> Iterator[None]:
        """The running task is a shadow there from entering to leaving."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a shadow runs in a task")
        self._running[worker_id].add(task)
        try:
            yield
        finally:
            self._running[worker_id].discard(task)
            if not self._running[worker_id]:
                del self._running[worker_id]


class TrafficWorkers:
    """The workers as clients' requests use them: shadows leave whichever gets work. Implements `Workers`."""

    def __init__(self, inner: Workers, way: Way) -> None:
        self._inner = inner
        self._way = way

    def views(self) -> tuple[WorkerView, ...]:
        """See `Workers`."""
        return self._inner.views()

    def find(self, worker_id: str) -> Worker:
        """See `Workers`."""
        return self._inner.find(worker_id)

    def sources(self, worker_ids: Sequence[str]) -> tuple[Source, ...]:
        """See `Workers`."""
        return self._inner.sources(worker_ids)

    @contextmanager
    def occupy(self, worker_id: str, work: Work) -> Iterator[None]:
        """See `Workers`."""
        self._way.clear(worker_id)
        with self._inner.occupy(worker_id, work):
            yield


class QuietWorkers:
    """The workers as shadows see them: busy ones take nothing, and their own work keeps nobody away. Implements `Workers`."""

    def __init__(self, inner: Workers, way: Way, busy_requests: int) -> None:
        self._inner = inner
        self._way = way
        self._busy_requests = busy_requests

    def views(self) -> tuple[WorkerView, ...]:
        """See `Workers`."""
        return tuple(view if self._is_quiet(view) else replace(view, is_draining=True) for view in self._inner.views())

    @property
    def has_room(self) -> bool:
        """Whether one that combines is quiet."""
        return any(view.accepts(Role.COMBINE) for view in self.views())

    def find(self, worker_id: str) -> Worker:
        """See `Workers`."""
        return self._inner.find(worker_id)

    def sources(self, worker_ids: Sequence[str]) -> tuple[Source, ...]:
        """See `Workers`."""
        return self._inner.sources(worker_ids)

    @contextmanager
    def occupy(self, worker_id: str, work: Work) -> Iterator[None]:
        """See `Workers`. A prompt counts as a request, and not as a wait for those that come: they need not wait for it."""
        if work.capture_tokens:
            with self._inner.occupy(worker_id, work):
                yield
            return
        with self._way.use(worker_id), self._inner.occupy(worker_id, replace(work, seconds=0.0)):
            yield

    def _is_quiet(self, view: WorkerView) -> bool:
        """Nobody waits there for a first token, and few requests are under way."""
        return view.backlog_seconds == 0 and view.running_requests <= self._busy_requests


class Shadows:
    """Runs comparisons one after the other, each when a worker is quiet, and tells the guard.

    generate: answers a request on quiet workers alone. Nothing is kept of a request once it was compared or dropped.
    """

    def __init__(
        self,
        generate: Callable[[GenerationRequest], AsyncGenerator[ReplyEvent]],
        workers: QuietWorkers,
        guard: QualityGuard,
        policy: ShadowPolicy,
    ) -> None:
        self._generate = generate
        self._workers = workers
        self._guard = guard
        self._policy = policy
        self._room = asyncio.Semaphore(policy.running)
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, subject: ShadowSubject) -> None:
        """Compare this later, or drop it where enough others wait."""
        if len(self._tasks) >= self._policy.running + self._policy.waiting:
            self._guard.drop(SampleOutcome.FULL)
            return
        # A context of its own: it is no part of the request's trace, nor of its log lines.
        task = asyncio.get_running_loop().create_task(self._run(subject), context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop all of it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, subject: ShadowSubject) -> None:
        try:
            async with asyncio.timeout(self._policy.patience_seconds), self._room:
                found = await self._until_compared(subject.request)
        except TimeoutError:
            self._guard.drop(SampleOutcome.BUSY)
        except (HypicError, RouterError, ValueError) as error:
            get_logger().info("quality_sample_failed", tag=subject.tag, error=str(error))
            self._guard.drop(SampleOutcome.FAILED)
        else:
            if found is None:
                self._guard.drop(SampleOutcome.NOT_COMPOSED)
            else:
                self._guard.note(subject.version, subject.tag, found)

    async def _until_compared(self, request: GenerationRequest) -> Comparison | None:
        """Again after traffic has stopped it."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if not self._workers.has_room:
                continue
            attempt = asyncio.create_task(self._compare(request))
            try:
                await asyncio.wait([attempt])
            finally:
                attempt.cancel()
                await asyncio.gather(attempt, return_exceptions=True)
            if attempt.cancelled() or isinstance(attempt.exception(), UnavailableError):
                # Traffic was there first.
                continue
            try:
                return attempt.result()
            finally:
                # Its error's traceback holds this frame, which would hold it: the request would stay until memory is searched.
                del attempt

    async def _compare(self, request: GenerationRequest) -> Comparison | None:
        composed = await self._answer(_as_shadow(request, Reuse.COMPOSE))
        if not composed.is_composed:
            return None
        full = await self._answer(_as_shadow(request, Reuse.OFF))
        return compare(full.tokens, composed.tokens)

    async def _answer(self, request: GenerationRequest) -> "_Answer":
        tokens: list[ShownToken] = []
        is_composed = False
        async with aclosing(self._generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    tokens += event.tokens
                elif isinstance(event, Done):
                    is_composed = composes(event.explanation)
        return _Answer(tuple(tokens), is_composed)


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: tuple[ShownToken, ...]
    is_composed: bool


def composes(explanation: Explanation) -> bool:
    """Whether any segment was composed, of itself or in a snapshot."""
    served = (Served.HIT, Served.COLD, Served.PREFIX)
    return any(part.kind is PartKind.SEGMENT and part.served in served for part in explanation.parts)


def _as_shadow(request: GenerationRequest, reuse: Reuse) -> GenerationRequest:
    """The same prompt, greedily and for a few tokens, whatever ends it: what is compared is the model's own distribution."""
    wanted = min(_NUM_TOKENS, request.sampling.max_tokens or _NUM_TOKENS)
    return replace(
        request,
        sampling=Sampling(temperature=0.0, max_tokens=wanted, ignore_eos=True, logprobs=_NUM_LIKELIEST),
        stop=(),
        options=replace(request.options, reuse=reuse, cold=Cold.PARALLEL),
        priority=_LAST_PRIORITY,
        num_choices=1,
        further_prompts=(),
    )
