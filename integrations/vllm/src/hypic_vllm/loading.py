"""The connector's side in vLLM's worker process: states on their way, and what becomes of them.

A state is fetched on a thread of its own, and written between two steps of the engine once all of it has come and been checked:
a fetch that fails or is given up leaves no byte behind.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import torch

from hypic_vllm.fetch import DecodeState, FetchError, Taking, Wanted
from hypic_vllm.layout import LayoutError, slots_of, state_block, write_linear
from services.blob.tensors import tensor_of

__all__ = ["AttentionMemory", "EngineMemory", "GroupMemory", "Load", "Loader", "Outcomes", "write_state"]

_THREADS = 8
# A worker that has gone is found out sooner than a request gives up.
_CHANNEL_OPTIONS = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]


class AttentionMemory(Protocol):
    """One attention layer's keys and values."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, last_block: int) -> None:
        """Store keys and values `[N, Hkv, D]` at flat slots `[N]`; what the last block has behind them becomes zero."""
        ...


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """One KV cache group. layers: which of the model's it holds."""

    kind: str
    block_size: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """attention: by layer; linear: a layer's tails and states, by layer."""

    groups: tuple[GroupMemory, ...]
    attention: Mapping[int, AttentionMemory]
    linear: Mapping[int, Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Load:
    """One request's state. block_ids: of every group, for its leading `token_ids`."""

    request_id: str
    address: str
    handle: bytes
    token_ids: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Outcomes:
    """Requests whose load has ended since they were last asked for; failed ones are among the ended."""

    ended: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    load: Load
    taking: Taking
    future: Future[DecodeState]
    is_given_up: bool = False


def write_state(memory: EngineMemory, load: Load, state: DecodeState) -> None:
    """Put a whole state into a request's blocks.

    Raises:
        LayoutError: it does not fit; nothing may be read from the blocks.
    """
    num_tokens = len(load.token_ids)
    kinds = {"linear": set(memory.linear), "attention": set(memory.attention)}
    for kind, layers in kinds.items():
        if layers != {index for index, own in enumerate(state.layers) if own == kind}:
            raise LayoutError(f"the state's {kind} layers are not those of the engine")
    for group, block_ids in zip(memory.groups, load.block_ids, strict=True):
        if group.kind == "attention":
            slots = slots_of(block_ids, group.block_size, num_tokens)
            for layer in group.layers:
                planes = {name: tensor_of(plane) for name, plane in state.planes[layer].items()}
                memory.attention[layer].write(planes["keys"], planes["values"], slots, block_ids[-1])
        else:
            block = state_block(block_ids, group.block_size, num_tokens)
            for layer in group.layers:
                planes = {name: tensor_of(plane) for name, plane in state.planes[layer].items()}
                write_linear(memory.linear[layer], block, planes["state"], planes["tail"])


class Loader:
    """Lives on the thread that runs vLLM's steps. limit_bytes: of one state; seconds: in which one must come."""

    def __init__(
        self,
        memory: EngineMemory,
        model_revision: str,
        limit_bytes: int,
        seconds: float,
        connect: Callable[[str], grpc.Channel] = lambda address: grpc.insecure_channel(address, _CHANNEL_OPTIONS),
    ) -> None:
        self._memory = memory
        self._model_revision = model_revision
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._connect = connect
        self._channels: dict[str, grpc.Channel] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hypic")
        self._running: dict[str, _Running] = {}

    def start(self, load: Load) -> None:
        """Begin to fetch."""
        channel = self._channels.get(load.address)
        if channel is None:
            channel = self._channels[load.address] = self._connect(load.address)
        wanted = Wanted(load.handle, load.token_ids, self._model_revision)
        taking = Taking(channel, wanted, self._limit_bytes, self._seconds)
        self._running[load.request_id] = _Running(load, taking, self._threads.submit(taking.run))

    def give_up(self, request_ids: Collection[str]) -> None:
        """Of these nobody waits for anything any more; what was on its way for one ends without having been written."""
        for request_id in self._running.keys() & set(request_ids):
            self._running[request_id].is_given_up = True
            self._running[request_id].taking.cancel()

    def collect(self) -> Outcomes:
        """Write what has come, and say what has ended."""
        outcomes = Outcomes()
        for request_id, running in [(name, one) for name, one in self._running.items() if one.future.done()]:
            del self._running[request_id]
            outcomes.ended.add(request_id)
            if running.is_given_up:
                continue
            try:
                write_state(self._memory, running.load, running.future.result())
            except (FetchError, LayoutError) as error:
                outcomes.failed[request_id] = str(error)
        return outcomes

    def close(self) -> None:
        """End everything."""
        self.give_up(list(self._running))
        self._threads.shutdown(cancel_futures=True)
        for channel in self._channels.values():
            channel.close()
