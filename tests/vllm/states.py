"""A worker that gives decode states of the demo model's shape without having computed them.

Their bytes are drawn at random: a reply that begins from one says something else than the prompt, and so would every other
request that one of these bytes reached.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import torch
from blake3 import blake3
from hypic.v1 import worker_pb2, worker_pb2_grpc
from hypic_vllm.claims import salt_of

from services.blob.layout import StateHeader, write_state
from services.blob.tensors import plane_of

__all__ = ["StateGiver", "give_states"]

_KINDS = ("linear", "linear", "linear", "attention") * 2


@dataclass
class StateGiver(worker_pb2_grpc.WorkerServiceServicer):
    """States by handle, each given once. holds_back: the last message does not come; taken: handles so far; num_left: calls that
    were cancelled.
    """

    revision: str
    address: str = ""
    holds_back: bool = False
    spoils: bool = False
    states: dict[bytes, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    taken: list[bytes] = field(default_factory=list)
    num_left: int = 0
    _num_offers: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def offer(self, token_ids: tuple[int, ...], seed: int) -> dict[str, Any]:
        """What a request says to begin from a state drawn from a seed."""
        with self._lock:
            self._num_offers += 1
            handle = self._num_offers.to_bytes(32, "big")
            self.states[handle] = (token_ids[:-1], seed)
        fields = {"handle": handle.hex(), "address": self.address, "num_tokens": len(token_ids) - 1}
        return {"cache_salt": salt_of(handle), "kv_transfer_params": {"hypic": fields}}

    def Take(self, request: worker_pb2.TakeRequest, context: Any) -> Iterator[worker_pb2.Chunk]:  # noqa: N802, ANN401
        with self._lock:
            self.taken.append(request.handle)
            found = self.states.get(request.handle)
            is_first = self.taken.count(request.handle) == 1
        if found is None or not is_first:
            context.abort(grpc.StatusCode.NOT_FOUND, "no decode state waits under this handle")
            return
        *chunks, last = _messages(self.revision, *found)
        yield from chunks
        ended = threading.Event()
        context.add_callback(ended.set)
        if self.holds_back:
            ended.wait(120)
            with self._lock:
                self.num_left += 1
            return
        if self.spoils:
            last.checksum = bytes(32)
        yield last


def _messages(revision: str, token_ids: tuple[int, ...], seed: int) -> Iterator[worker_pb2.Chunk]:
    source = torch.Generator().manual_seed(seed)
    prefix, checksum = write_state(StateHeader(revision, "drawn", token_ids, 0, _KINDS, {}), [])
    yield worker_pb2.Chunk(header=bytes(prefix) + bytes(checksum))
    for layer, kind in enumerate(_KINDS):
        for name, tensor in _draw(kind, len(token_ids), source).items():
            plane = plane_of(layer, name, tensor)
            data = bytes(plane.data)
            for start in range(0, len(data), 1 << 20):
                chunk = worker_pb2.Chunk(layer=layer, plane=name, offset=start, data=data[start : start + (1 << 20)])
                if start == 0:
                    chunk.dtype = plane.dtype
                    chunk.shape.extend(plane.shape)
                if start + (1 << 20) >= len(data):
                    chunk.checksum = blake3(data).digest()
                yield chunk


def _draw(kind: str, num_tokens: int, source: torch.Generator) -> dict[str, torch.Tensor]:
    if kind == "linear":
        tail = torch.randn(3, 1024, generator=source).to(torch.bfloat16)
        return {"state": torch.randn(8, 64, 64, generator=source), "tail": tail}
    shape = (num_tokens, 2, 64)
    return {name: torch.randn(shape, generator=source).to(torch.bfloat16) for name in ("keys", "values")}


@contextmanager
def give_states(revision: str) -> Iterator[StateGiver]:
    """A giver on loopback."""
    giver = StateGiver(revision)  # type: ignore[abstract] # only `Take` is called
    server = grpc.server(ThreadPoolExecutor(32))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(giver, server)
    giver.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield giver
    server.stop(0).wait(10)
