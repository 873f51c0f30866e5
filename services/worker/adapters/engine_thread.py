"""The thread that owns the device: runs the engine's loop, and whatever others ask it to do between two steps."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from services.common.errors import UnavailableError
from services.common.telemetry import get_logger
from services.worker.engine.commands import Command
from services.worker.engine.leading import Lead, RankError
from services.worker.engine.loop import Engine

__all__ = ["EngineThread"]

Result = TypeVar("Result")

_ENDED = "the worker's engine has ended; send the request again"


class EngineThread:
    """Start it once; `call` and `post` may be used from any thread.

    `on_death` is called from the engine's thread when the loop fails: nothing can be served any more. `lead` tells other
    ranks, where there are any: commands run on all of them, whatever else is called on this one alone, and changes nothing.
    """

    def __init__(
        self, build: Callable[[], Engine], on_death: Callable[[BaseException], None], lead: Lead | None = None
    ) -> None:
        self._build = build
        self._on_death = on_death
        self._lead = lead
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._built: Future[None] = Future()
        self._lock = threading.Lock()
        self._unanswered: set[Future[Any]] = set()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Build the engine on its thread; returns when it is ready. Raises whatever building raises."""
        self._thread.start()
        await asyncio.wrap_future(self._built)

    def post(self, command: Callable[[Engine], object]) -> None:
        """Run a command on the engine's thread, sometime soon."""

        def run(engine: Engine) -> None:
            self._tell(command)
            command(engine)

        self._commands.put(run)

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function on the engine's thread and return its result, or raise its exception.

        Raises:
            UnavailableError: the loop has ended, or ends before it comes to this function.
        """
        future: Future[Result] = Future()

        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._tell(function)
                future.set_result(function(engine))
            except RankError:
                future.set_exception(UnavailableError(_ENDED))
                raise
            except Exception as error:
                future.set_exception(error)

        with self._lock:
            if self._has_ended:
                raise UnavailableError(_ENDED)
            self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        self._commands.put(run)
        return await asyncio.wrap_future(future)

    async def acquire(self, make: Callable[[Engine], Result], give_back: Callable[[Engine, Result], None]) -> Result:
        """As `call`, for what must be given back: it is, where the caller is cancelled before it has the result."""
        call = asyncio.ensure_future(self.call(make))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(lambda done: self._give_back_late(done, give_back))
            raise

    def _give_back_late(self, done: "asyncio.Future[Result]", give_back: Callable[[Engine, Result], None]) -> None:
        if not done.cancelled() and done.exception() is None:
            made = done.result()
            self.post(lambda engine: give_back(engine, made))

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
                if self._lead is not None:
                    self._lead.step(engine)
                engine.step()
        except Exception as error:
            get_logger().exception("engine_died")
            self._on_death(error)
        finally:
            self._refuse_the_rest()

    def _tell(self, function: Callable[[Engine], object]) -> None:
        if self._lead is not None and isinstance(function, Command):
            self._lead.tell(function)

    def _refuse_the_rest(self) -> None:
        """Nobody waits for a function that will never run."""
        with self._lock:
            self._has_ended = True
            unanswered = tuple(self._unanswered)
        for future in unanswered:
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError(_ENDED))

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
