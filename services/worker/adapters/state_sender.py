"""The worker's side of `Fetch`: whatever tier a state lies in, a layer or two are in memory on their way out."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from hypic.v1 import worker_pb2

from services.blob.errors import BlobError
from services.common.errors import NotFoundError, UnavailableError
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.layer_carriers import choose_carrier
from services.worker.adapters.readable_states import ReadableState
from services.worker.adapters.state_stream import header_message, receipt_message
from services.worker.adapters.tiered_states import TieredStates

__all__ = ["StateSender"]

_POLL_SECONDS = 0.005
_RECEIPT_POLLS = 400


class StateSender:
    """receipt_of: the directory's receipt of a published state, empty of another; budget: of layers on their way."""

    def __init__(self, states: TieredStates, receipt_of: Callable[[bytes], bytes], budget: ByteBudget) -> None:
        self._states = states
        self._receipt_of = receipt_of
        self._budget = budget

    async def send(self, request: worker_pb2.FetchRequest) -> AsyncGenerator[worker_pb2.Chunk]:
        """The messages of a state.

        Raises:
            NotFoundError: it is not here, and has not come in time.
            UnavailableError: it cannot be read any more.
        """
        key = request.key
        state = await self._wait_for(key, request.wait_seconds)
        carrier = choose_carrier(request, self._states.threads)
        try:
            yield header_message(state.header, key, state.is_being_computed)
            # Of the stream no more is in memory at a time.
            held = self._budget.held(carrier.layers_held * state.layer_bytes)
            async with held, aclosing(state.layers(request.from_layer)) as layers:
                async for planes in layers:
                    for chunk in await carrier.carry(key, planes):
                        yield chunk
            yield receipt_message(
                key, await self._wait_for_receipt(key) if state.is_being_computed else self._receipt_of(key)
            )
        except (BlobError, OSError) as error:
            raise UnavailableError(f"the state cannot be read any more: {error}") from error
        finally:
            carrier.close()
            await state.close()

    async def _wait_for_receipt(self, key: bytes) -> bytes:
        """A captured state is published a little later."""
        for _ in range(_RECEIPT_POLLS):
            if receipt := self._receipt_of(key):
                return receipt
            await asyncio.sleep(_POLL_SECONDS)
        return b""

    async def _wait_for(self, key: bytes, wait_seconds: float) -> ReadableState:
        clock = asyncio.get_running_loop()
        deadline = clock.time() + wait_seconds
        while (state := await self._states.read(key)) is None:
            # Written so that a wait that is no number ends at once.
            if not clock.time() < deadline:
                raise NotFoundError("the worker holds no segment state under this key")
            await asyncio.sleep(_POLL_SECONDS)
        return state
