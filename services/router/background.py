"""Work that outlives its request: releases of leases and captures behind a reply."""

import asyncio
from collections.abc import Coroutine

from services.common.telemetry import get_logger

__all__ = ["Background"]


class Background:
    """Runs coroutines apart from the requests that start them, so that cancelling a request does not stop them."""

    def __init__(self, max_captures: int) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._max_captures = max_captures
        self._num_captures = 0

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run this; a failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def can_capture(self) -> bool:
        """Whether one more capture behind a reply may start."""
        return self._num_captures < self._max_captures

    def spawn_capture(self, work: Coroutine[None, None, None]) -> None:
        """Run a capture behind a reply; ask `can_capture` first."""
        self._num_captures += 1
        self.spawn(self._counted(work))

    async def close(self, grace_seconds: float) -> None:
        """Let running work end within the grace, then cancel what is left."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(set(self._tasks), timeout=grace_seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _counted(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        finally:
            self._num_captures -= 1

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            get_logger().warning("background_work_failed", error=repr(error))
