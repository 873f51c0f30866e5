"""The thread that owns the device: runs the engine's loop, and whatever others ask it to do between two steps."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.common.telemetry import get_logger
from services.worker.engine.loop import Engine

__all__ = ["EngineThread"]

Result = TypeVar("Result")


class EngineThread:
    """Start it once; `call` and `post` may be used from any thread.

    `on_death` is called from the engine's thread when the loop fails: nothing can be served any more.
    """

    def __init__(self, build: Callable[[], Engine], on_death: Callable[[BaseException], None]) -> None:
        self._build = build
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._built: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Build the engine on its thread; returns when it is ready. Raises whatever building raises."""
        self._thread.start()
        await asyncio.wrap_future(self._built)

    def post(self, command: Callable[[Engine], None]) -> None:
        """Run a command on the engine's thread, sometime soon."""
        self._commands.put(command)

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine's thread and return its result, or raise its exception."""
        future: Future[Result] = Future()

        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """End the loop after the commands given so far, and wait for the thread."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            while self._obey(engine):
                engine.step()
        except Exception as error:
            get_logger().exception("engine_died")
            self._on_death(error)

    def _obey(self, engine: Engine) -> bool:
        """Run every waiting command; sleeps while the engine is idle. False when it is time to stop."""
        while True:
            try:
                command = self._commands.get(block=engine.is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(engine)
