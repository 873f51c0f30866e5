"""How busy one worker is: what this router has given it, at once, and what it reports of others' work, a little later."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.router.adapters.clients import Report
from services.router.domain.ports import Work
from services.router.domain.workers import WorkerSpeeds

__all__ = ["WorkerLoad"]


class WorkerLoad:
    """Work counts until whoever gave it says that it has ended; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Requests that decode are many, and take no time of anybody's who waits: they are counted, not kept.
        self._own: dict[int, Work] = {}
        self._own_requests = 0
        self._next = 0
        # When the work that has been given will be done, if it takes as long as was thought.
        self._busy_until = 0.0
        self._reported_at = -math.inf
        self._others_capture_tokens = 0
        self._others_requests = 0

    @contextmanager
    def occupy(self, work: Work) -> Iterator[None]:
        """Count work from entering to leaving."""
        self._next += 1
        number = self._next
        self._own_requests += work.is_request
        if work.seconds or work.capture_tokens:
            self._own[number] = work
        self._busy_until = max(self._busy_until, self._clock()) + work.seconds
        try:
            yield
        finally:
            self._own_requests -= work.is_request
            self._own.pop(number, None)
            left = sum(each.seconds for each in self._own.values())
            self._busy_until = min(self._busy_until, self._clock() + left)

    def take_report(self, report: Report) -> None:
        """What the worker says it has to do, less what this router has given it, is others'."""
        own_tokens = sum(work.capture_tokens for work in self._own.values())
        self._others_capture_tokens = max(0, report.capture_tokens_waiting - own_tokens)
        self._others_requests = max(0, report.num_requests - self.own_requests)
        self._reported_at = self._clock()

    @property
    def own_requests(self) -> int:
        """Requests of this router that combine or decode there."""
        return self._own_requests

    @property
    def running_requests(self) -> int:
        """Requests of all routers."""
        return self.own_requests + self._others_requests

    def backlog_seconds(self, speeds: WorkerSpeeds) -> float:
        """Until everything is done, by these speeds."""
        now = self._clock()
        others = speeds.capture.seconds(self._others_capture_tokens) if self._others_capture_tokens else 0.0
        return max(0.0, self._busy_until - now) + max(0.0, others - (now - self._reported_at))
