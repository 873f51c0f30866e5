"""Work for a GPU, recorded once and replayed: many launches for the price of one."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.engine.context import EngineContext
from services.worker.mixers.share import Ranks

__all__ = ["Recorder", "Recording", "SharedRecorder", "create_recorder"]


@dataclass(frozen=True, slots=True)
class Recording:
    """replay: does the work again, over the same tensors; outputs: what it gives, valid until the next replay."""

    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]


class Recorder(Protocol):
    """Records what `run` launches without running it. Recordings of one recorder are replayed one at a time."""

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        """All that `run` compiles, loads or asks the host for must have happened before."""
        ...


class _CudaRecorder:
    """CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        return Recording(outputs, graph.replay)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: what it frees on this thread, as an older graph, spoils a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class SharedRecorder:
    """Recordings that all ranks have, or none: ranks that replayed beside others that do not would add up other rows."""

    own: Recorder
    ranks: Ranks
    device: torch.device

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        """See `Recorder`; waits for the other ranks.

        Raises:
            RuntimeError: another rank could not record.
        """
        recording, fault = None, None
        try:
            recording = self.own.record(run)
        except Exception as error:  # the others are to hear of it, whatever it is
            fault = error
        succeeded = torch.full((1,), float(recording is not None), device=self.device)
        everywhere = float(self.ranks.sum(succeeded)) == self.ranks.share.count
        if recording is None or not everywhere:
            raise RuntimeError("not every rank could record") from fault
        return recording


def create_recorder(context: EngineContext) -> Recorder:
    """That of a GPU, or of one among several that hold a model together."""
    own, ranks = _CudaRecorder(), context.memory.ranks
    return own if ranks is None else SharedRecorder(own, ranks, context.device)
