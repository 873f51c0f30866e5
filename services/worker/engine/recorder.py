"""Work for a GPU, recorded once and replayed: many launches for the price of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["CudaRecorder", "Recorder", "Recording"]


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


class CudaRecorder:
    """CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> Recording:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        return Recording(outputs, graph.replay)
