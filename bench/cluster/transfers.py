"""A segment's state from one process of a host to another, in messages and through shared memory.

The worker's own sender and reader over real gRPC; the reader copies every plane to where an engine would keep it. The two ways
take turns, so that what else the machine does falls on both.
"""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import cast

import grpc
import torch
from hypic.v1 import worker_pb2

from bench.results import Row
from services.blob.layout import StateHeader
from services.blob.planes import Plane
from services.blob.tensors import plane_of, tensor_of
from services.common.rpc import HealthSwitch, create_server
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.peer_states import FetchLimits, PeerStates, Source
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.adapters.state_sender import StateSender
from services.worker.adapters.tiered_states import TieredStates
from services.worker.settings import WorkerSettings

__all__ = ["measure_transfers"]

# As of one segment of 2,048 tokens of Qwen3.5-35B-A3B with fp32 states.
_LAYERS, _LAYER_BYTES, _TOKENS = 40, 4 << 20, tuple(range(2048))
_ROUNDS = 9
_KEY = bytes(32)
_LIMITS = FetchLimits(wait_seconds=0.0, stall_seconds=30.0, seconds=60.0)


class _HeldState:
    """A state that is there whole, in the form in which the sender reads one."""

    is_being_computed = False

    def __init__(self, served: ServedModel, num_layers: int, layer_bytes: int) -> None:
        self.header = StateHeader(
            model_revision=served.revision,
            profile_digest=served.profile_digest,
            token_ids=_TOKENS,
            seam_window=8,
            layers=("linear",) * num_layers,
            encoding=served.profile.encoding.fields,
        )
        self.layer_bytes = layer_bytes
        halves = torch.randint(256, (2, layer_bytes // 2), dtype=torch.uint8)
        self._planes = [
            [plane_of(layer, name, half) for name, half in zip(("transition", "end_state"), halves, strict=True)]
            for layer in range(num_layers)
        ]

    async def layers(self, from_layer: int) -> AsyncGenerator[list[Plane]]:
        for planes in self._planes[from_layer:]:
            yield planes

    async def close(self) -> None:
        """Nothing is held."""


class _Holder:
    """What the sender reads from, and the worker's `Fetch`."""

    def __init__(self, state: _HeldState) -> None:
        self.threads = ThreadPoolExecutor(2)
        self._state = state
        self._sender = StateSender(cast(TieredStates, self), lambda _: b"receipt", ByteBudget(1 << 28))

    async def read(self, key: bytes) -> _HeldState:
        """As of `TieredStates`."""
        return self._state

    def enter(self, server: grpc.aio.Server) -> None:
        """Serve `Fetch`."""
        fetch = grpc.unary_stream_rpc_method_handler(
            self._fetch,
            request_deserializer=worker_pb2.FetchRequest.FromString,
            response_serializer=worker_pb2.Chunk.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler("hypic.v1.WorkerService", {"Fetch": fetch})
        server.add_generic_rpc_handlers([handler])

    async def _fetch(self, request: worker_pb2.FetchRequest, context: object) -> AsyncIterator[worker_pb2.Chunk]:
        async with aclosing(self._sender.send(request)) as messages:
            async for message in messages:
                yield message


def _hold(told: Connection, checkpoint: Path, num_layers: int, layer_bytes: int) -> None:
    """The holder's process: says its port, then its processor seconds whenever it is asked, until the other end goes."""

    async def serve() -> None:
        served = read_served_model(WorkerSettings(checkpoint=checkpoint))
        holder = _Holder(_HeldState(served, num_layers, layer_bytes))
        server, port = await create_server([holder.enter], "127.0.0.1:0", HealthSwitch())
        told.send(port)
        while await asyncio.to_thread(_is_asked, told):
            told.send(time.process_time())
        await server.stop(0)

    asyncio.run(serve())


def _is_asked(told: Connection) -> bool:
    try:
        return told.recv() is not None
    except EOFError:
        return False


def measure_transfers(
    checkpoint: Path, num_layers: int = _LAYERS, layer_bytes: int = _LAYER_BYTES, rounds: int = _ROUNDS
) -> list[Row]:
    """Rows of both ways."""
    context = multiprocessing.get_context("spawn")
    own, others = context.Pipe()
    process = context.Process(target=_hold, args=(others, checkpoint, num_layers, layer_bytes), daemon=True)
    process.start()
    try:
        return asyncio.run(_measure(own, checkpoint, num_layers * layer_bytes, rounds))
    finally:
        own.send(None)
        process.join(10)
        process.kill()


async def _measure(holder: Connection, checkpoint: Path, num_bytes: int, rounds: int) -> list[Row]:
    source = Source("holder", f"127.0.0.1:{holder.recv()}")
    served = read_served_model(WorkerSettings(checkpoint=checkpoint))
    ways = {
        name: PeerStates(served, "127.0.0.1:1", ByteBudget(1 << 28), shares_memory=is_shared)
        for name, is_shared in (("in messages", False), ("through shared memory", True))
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, peers in ways.items():
            busy, began = _processor(holder), time.perf_counter()
            await _fetch(peers, source)
            elapsed = time.perf_counter() - began
            # The first ones open connections.
            if turn:
                seconds[name].append(elapsed)
                processor[name].append(_processor(holder) - busy)
    for peers in ways.values():
        await peers.close()
    return list(_rows(num_bytes, seconds, processor))


def _processor(holder: Connection) -> float:
    holder.send("asked")
    return float(holder.recv()) + time.process_time()


async def _fetch(peers: PeerStates, source: Source) -> None:
    kept: list[torch.Tensor] = []
    async with (
        peers.open(source, _KEY, _TOKENS, 0, _LIMITS) as state,
        aclosing(state.layers(0)) as layers,
    ):
        async for planes in layers:
            if not kept:
                kept = [torch.empty_like(tensor_of(plane)) for plane in planes]
            for room, plane in zip(kept, planes, strict=True):
                room.copy_(tensor_of(plane))
        await state.read_receipt()


def _rows(num_bytes: int, seconds: dict[str, list[float]], processor: dict[str, list[float]]) -> Iterator[Row]:
    size = f"{num_bytes >> 20} MiB between two processes of a host"
    for name, own in seconds.items():
        yield Row(f"{size}, {name}", num_bytes / 1e9 / median(own), "GB/s")
        each = 1000 * median(processor[name])
        yield Row(f"{size}, {name}: processor time of both", each, "ms", better="lower")
    messages, shared = (median(own) for own in seconds.values())
    yield Row(f"{size}, messages over shared memory, time", messages / shared, "×")
