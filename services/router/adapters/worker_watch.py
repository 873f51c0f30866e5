"""Follows one worker: describes it when it comes, notices when it goes."""

import asyncio
import time
from collections.abc import Callable

import grpc

from services.common.errors import HypicError, UnavailableError
from services.common.telemetry import get_logger
from services.router.adapters.clients import Description, GrpcWorker
from services.router.adapters.template import JinjaChatTemplate
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.assembly import Assembler
from services.router.domain.model import ModelRefusedError
from services.router.domain.template_check import find_message_ends
from services.router.served_model import ServedModel

__all__ = ["WorkerWatch", "build_model"]

_DESCRIBE_TIMEOUT_SECONDS = 30.0
_RETRY_SECONDS = 0.25
# Building and checking a model again is work; it only helps once the worker serves another one.
_REFUSED_RETRY_SECONDS = 5.0


def build_model(description: Description, memo_bytes: int) -> ServedModel:
    """Everything that the router needs to speak for the described model.

    Raises:
        ModelRefusedError: its template or tokenizer fails the start-up check.
    """
    info = description.info
    tokenizer = TwoWayTokenizer(description.tokenizer_json, memo_bytes)
    template = JinjaChatTemplate(info.chat_template, info.bos_token, info.eos_token)
    ends = find_message_ends(template)
    assembler = Assembler(tokenizer, template, ends, info.profile, info.context_length)
    return ServedModel(info, assembler, tokenizer.new_detokenizer, int(time.time()))


class WorkerWatch:
    """The served model as the worker's connection comes and goes; implements `Models`."""

    def __init__(
        self, channel: grpc.aio.Channel, worker: GrpcWorker, build: Callable[[Description], ServedModel]
    ) -> None:
        self._channel = channel
        self._worker = worker
        self._build = build
        self._description: Description | None = None
        self._model: ServedModel | None = None
        self._is_up = asyncio.Event()
        self._trouble = "the worker has not been reached yet"

    def require(self) -> ServedModel:
        """See `Models`."""
        if self._model is None or not self._is_up.is_set():
            raise UnavailableError(self._trouble)
        return self._model

    async def wait_back(self, seconds: float) -> ServedModel:
        """See `Models`."""
        # A broken stream is seen before the channel's change of state; give the watch a turn to notice it.
        await asyncio.sleep(min(seconds, _RETRY_SECONDS))
        try:
            await asyncio.wait_for(self._is_up.wait(), seconds)
        except TimeoutError:
            raise UnavailableError(self._trouble) from None
        return self.require()

    async def run(self) -> None:
        """Follow the worker until cancelled."""
        while True:
            try:
                await self._take(await self._worker.describe(_DESCRIBE_TIMEOUT_SECONDS))
            except HypicError as error:
                await self._note_trouble(str(error), _RETRY_SECONDS)
            except ModelRefusedError as error:
                await self._note_trouble(str(error), _REFUSED_RETRY_SECONDS)
            except Exception as error:
                # Without the watch no worker would ever be found again.
                get_logger().exception("worker_watch_failed")
                await self._note_trouble(f"the worker's description cannot be used: {error!r}", _REFUSED_RETRY_SECONDS)
            else:
                await self._until_disconnected()

    async def _take(self, description: Description) -> None:
        known = self._description
        is_same = known and (known.info, known.tokenizer_json) == (description.info, description.tokenizer_json)
        if not is_same:
            self._model = await asyncio.to_thread(self._build, description)
            self._description = description
        get_logger().info("worker_described", model=description.info.name, worker_id=description.info.worker_id)
        self._is_up.set()

    async def _until_disconnected(self) -> None:
        while self._channel.get_state() is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        self._is_up.clear()
        self._trouble = "the worker's connection was lost"

    async def _note_trouble(self, trouble: str, pause_seconds: float) -> None:
        if trouble != self._trouble:
            get_logger().warning("worker_not_ready", reason=trouble)
        self._trouble = trouble
        await asyncio.sleep(pause_seconds)
