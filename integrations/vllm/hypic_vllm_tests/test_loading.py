"""States on their way into an engine: whole and right, or not written at all; given up when nobody waits any more."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import torch
from blake3 import blake3
from hypic.v1 import worker_pb2, worker_pb2_grpc
from hypic_vllm.loading import EngineMemory, GroupMemory, Load, Loader, Outcomes

from services.blob.layout import StateHeader, write_state
from services.blob.tensors import plane_of

_IDS = tuple(range(10, 16))
_HANDLE = bytes(range(32))
Chunks = list[worker_pb2.Chunk]


def _state(token_ids: tuple[int, ...] = _IDS, revision: str = "model") -> tuple[Chunks, dict[str, torch.Tensor]]:
    tensors = {
        "state": torch.arange(30.0).view(2, 3, 5),
        "tail": torch.arange(48.0).view(3, 16).to(torch.bfloat16),
        "keys": torch.randn(len(token_ids), 1, 4).to(torch.bfloat16),
        "values": torch.randn(len(token_ids), 1, 4).to(torch.bfloat16),
    }
    prefix, checksum = write_state(StateHeader(revision, "p", token_ids, 0, ("linear", "attention"), {}), [])
    chunks = [worker_pb2.Chunk(header=bytes(prefix) + bytes(checksum))]
    for name, tensor in tensors.items():
        plane = plane_of(0 if name in ("state", "tail") else 1, name, tensor)
        half = len(plane.data) // 2
        first = worker_pb2.Chunk(
            layer=plane.layer, plane=name, data=bytes(plane.data[:half]), dtype=plane.dtype, shape=plane.shape
        )
        rest = worker_pb2.Chunk(layer=plane.layer, plane=name, offset=half, data=bytes(plane.data[half:]))
        rest.checksum = blake3(plane.data).digest()
        chunks += [first, rest]
    return chunks, tensors


@dataclass
class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Gives one state; `go_on` holds it up ahead of its last message."""

    chunks: Chunks
    go_on: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def Take(self, request: worker_pb2.TakeRequest, context: Any) -> Iterator[worker_pb2.Chunk]:  # noqa: N802, ANN401
        context.add_callback(self.ended.set)
        self.begun.set()
        if request.handle != _HANDLE:
            context.abort(grpc.StatusCode.NOT_FOUND, "no decode state waits under this handle")
        yield from self.chunks[:-1]
        while not self.go_on.wait(0.01):
            if not context.is_active():
                return
        yield self.chunks[-1]


@dataclass
class _Attention:
    written: list[tuple[torch.Tensor, torch.Tensor, list[int], int]] = field(default_factory=list)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, last_block: int) -> None:
        self.written.append((keys, values, slots.tolist(), last_block))


@dataclass
class _Rig:
    """An engine's memory, a loader over it and the worker that it asks."""

    worker: _Worker
    address: str
    loader: Loader
    attention: _Attention
    linear: tuple[torch.Tensor, torch.Tensor]

    def load(self, request_id: str = "r", handle: bytes = _HANDLE) -> None:
        self.loader.start(Load(request_id, self.address, handle, _IDS, ((0, 3), (5, 6))))

    def wait(self, num_ended: int = 1) -> Outcomes:
        gathered = Outcomes()
        give_up = time.monotonic() + 30
        while len(gathered.ended) < num_ended:
            assert time.monotonic() < give_up
            new = self.loader.collect()
            gathered.ended |= new.ended
            gathered.failed |= new.failed
            time.sleep(0.005)
        return gathered

    @property
    def is_untouched(self) -> bool:
        return not self.attention.written and all(bool((cache == -1).all()) for cache in self.linear)


Start = Callable[..., _Rig]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[grpc.Server] = []
    rigs: list[_Rig] = []

    def create(chunks: Chunks, limit_bytes: int = 1 << 20, seconds: float = 30.0) -> _Rig:
        worker = _Worker(chunks)  # type: ignore[abstract] # only `Take` is called
        server = grpc.server(ThreadPoolExecutor(4))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        attention = _Attention()
        linear = (torch.full((4, 3, 16), -1.0, dtype=torch.bfloat16), torch.full((4, 2, 5, 3), -1.0))
        groups = (GroupMemory("recurrent", 4, (0,)), GroupMemory("attention", 4, (1,)))
        memory = EngineMemory(groups, {1: attention}, {0: linear})
        rigs.append(_Rig(worker, f"127.0.0.1:{port}", Loader(memory, "model", limit_bytes, seconds), attention, linear))
        return rigs[-1]

    yield create
    for rig in rigs:
        rig.worker.go_on.set()
        rig.loader.close()
    for server in servers:
        server.stop(0).wait(10)


def test_a_state_is_written_whole_into_the_requests_blocks(start: Start) -> None:
    chunks, tensors = _state()
    rig = start(chunks)
    rig.load()
    assert rig.loader.collect().ended == set()
    assert rig.is_untouched
    rig.worker.go_on.set()
    outcomes = rig.wait()
    assert (outcomes.ended, outcomes.failed) == ({"r"}, {})
    ((keys, values, slots, last_block),) = rig.attention.written
    assert torch.equal(keys, tensors["keys"])
    assert torch.equal(values, tensors["values"])
    assert (slots, last_block) == ([20, 21, 22, 23, 24, 25], 6)
    tails, states = rig.linear
    assert torch.equal(states[3].view(2, 3, 5), tensors["state"])
    assert torch.equal(tails[3], tensors["tail"])
    assert (states[:3] == -1).all()


def test_a_request_that_ends_meanwhile_ends_the_call_and_writes_nothing(start: Start) -> None:
    rig = start(_state()[0])
    rig.load()
    assert rig.worker.begun.wait(30)
    rig.loader.give_up({"r", "another"})
    outcomes = rig.wait()
    assert (outcomes.ended, outcomes.failed) == ({"r"}, {})
    assert rig.is_untouched
    assert rig.worker.ended.wait(30), "the worker must hear of it"


def _cut(chunks: Chunks) -> Chunks:
    return chunks[:-1]


def _turn_a_bit(chunks: Chunks) -> Chunks:
    data = bytearray(chunks[3].data)
    data[0] ^= 1
    chunks[3].data = bytes(data)
    return chunks


def _swap(chunks: Chunks) -> Chunks:
    chunks[1], chunks[2] = chunks[2], chunks[1]
    return chunks


def _twice(chunks: Chunks) -> Chunks:
    return [*chunks[:3], *chunks[1:3], *chunks[3:]]


def _rename(chunks: Chunks) -> Chunks:
    for chunk in chunks[1:3]:
        chunk.plane = "states"
    return chunks


def _other_layer(chunks: Chunks) -> Chunks:
    for chunk in chunks[1:3]:
        chunk.layer = 7
    return chunks


def _damage_header(chunks: Chunks) -> Chunks:
    chunks[0].header = chunks[0].header[:-1] + b"?"
    return chunks


@pytest.mark.parametrize("spoil", [_cut, _turn_a_bit, _swap, _twice, _rename, _other_layer, _damage_header])
def test_what_is_not_as_it_was_sent_is_not_written(start: Start, spoil: Callable[[Chunks], Chunks]) -> None:
    rig = start(spoil(_state()[0]))
    rig.worker.go_on.set()
    rig.load()
    assert rig.wait().failed.keys() == {"r"}
    assert rig.is_untouched


@pytest.mark.parametrize(
    ("token_ids", "revision", "reason"),
    [((*_IDS[:-1], 99), "model", "token_ids"), (_IDS, "another", "another"), ((*_IDS, 99), "model", "token_ids")],
)
def test_a_state_of_other_tokens_or_another_model_is_not_written(
    start: Start, token_ids: tuple[int, ...], revision: str, reason: str
) -> None:
    rig = start(_state(token_ids, revision)[0])
    rig.worker.go_on.set()
    rig.load()
    assert reason in rig.wait().failed["r"]
    assert rig.is_untouched


def test_a_state_that_is_gone_too_large_or_too_late_fails_its_request_alone(start: Start) -> None:
    rig = start(_state()[0])
    rig.load("gone", bytes(32))
    assert "waits under this handle" in rig.wait().failed["gone"]
    small = start(_state()[0], limit_bytes=100)
    small.load()
    assert "does not begin as a plane does" in small.wait().failed["r"]
    late = start(_state()[0], seconds=0.05)
    late.load()
    assert late.wait().failed.keys() == {"r"}
    rig.worker.go_on.set()
    rig.load()
    assert rig.wait().failed == {}
    assert small.is_untouched
    assert late.is_untouched


def test_a_worker_that_cannot_be_reached_fails_the_request(start: Start) -> None:
    rig = start(_state()[0])
    rig.loader.start(Load("r", "127.0.0.1:1", _HANDLE, _IDS, ((0, 3), (5, 6))))
    assert rig.wait().failed.keys() == {"r"}
    assert rig.is_untouched


def test_blocks_that_do_not_fit_fail_the_request(start: Start) -> None:
    rig = start(_state()[0])
    rig.worker.go_on.set()
    rig.loader.start(Load("r", rig.address, _HANDLE, _IDS, ((0, 3), (5,))))
    assert "1 blocks of 4" in rig.wait().failed["r"]
