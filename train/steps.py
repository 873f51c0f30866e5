"""Single steps of the training, and what changes from step to step."""

from collections import deque

import torch

from train.loader import Batch
from train.network import Network
from train.optimiser import Optimiser

_WARM_UP_STEPS = 150
_DECAY_FROM = 0.45
_REPLY_SHARE = 0.7
_RETRIEVES_UNDER = 1.1
_HARDER_FROM_AT_LATEST = 0.3
_HARDER_OVER = 0.2


class Stepper:
    """One optimiser step a batch; on a GPU one captured graph for each row length."""

    def __init__(self, network: Network, optimiser: Optimiser, tokens: int) -> None:
        self._network, self._optimiser, self._tokens = network, optimiser, tokens
        device = network.weights["embed"].device
        self._device = device
        self._ids = torch.zeros(tokens, dtype=torch.long, device=device)
        self._is_reply = torch.zeros(tokens, dtype=torch.bool, device=device)
        self._losses = torch.zeros(2, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._events: deque[torch.cuda.Event] = deque()

    def step(self, batch: Batch) -> None:
        """Updates the weights from one batch."""
        ids = torch.from_numpy(batch.ids.astype("int64"))
        is_reply = torch.from_numpy(batch.is_reply.astype("bool"))
        if self._device.type != "cuda":
            self._ids.copy_(ids)
            self._is_reply.copy_(is_reply)
            self._update(batch.row_length)
            return
        self._ids.copy_(ids.pin_memory(), non_blocking=True)
        self._is_reply.copy_(is_reply.pin_memory(), non_blocking=True)
        if batch.row_length in self._graphs:
            self._graphs[batch.row_length].replay()
        else:
            self._capture(batch.row_length)
        self._keep_pace()

    def _keep_pace(self) -> None:
        """Lets the host run one step ahead of the device, so that the clock means something."""
        self._events.append(torch.cuda.Event())
        self._events[-1].record()
        if len(self._events) > 2:
            self._events.popleft().synchronize()

    def losses(self) -> list[float]:
        """Mean loss of the last batch's reply tokens and of its other tokens."""
        return [round(x, 4) for x in self._losses.tolist()]

    def _capture(self, length: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._update(length)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool = next((g.pool() for g in self._graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._update(length)
        self._optimiser.forget_gradients()
        self._graphs[length] = graph

    def _update(self, length: int) -> None:
        position = torch.arange(self._tokens, device=self._device) % length
        inside = position != length - 1
        losses = self._network.losses(self._ids, self._ids.roll(-1), position, self._tokens // length)
        is_reply = (self._is_reply.roll(-1) & inside).float()
        is_other = inside.float() - is_reply
        reply = (losses * is_reply).sum() / is_reply.sum().clamp(min=1)
        other = (losses * is_other).sum() / is_other.sum()
        self._optimiser.forget_gradients()
        (_REPLY_SHARE * reply + (1 - _REPLY_SHARE) * other).backward()
        self._optimiser.step()
        self._losses.copy_(torch.stack([reply.detach(), other.detach()]))


def learning_rate_factor(step: int, progress: float) -> float:
    """Warm-up by steps, then constant, then linear to zero by the clock."""
    warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
    decay = min(1.0, (1 - progress) / (1 - _DECAY_FROM))
    return max(0.0, min(warm, decay))


class Curriculum:
    """Keeps rows easy until replies are retrieved, then makes them harder by the clock."""

    def __init__(self) -> None:
        self._from = _HARDER_FROM_AT_LATEST

    def observe(self, progress: float, reply_loss: float) -> None:
        """Notes the reply loss at a point of the run."""
        if reply_loss < _RETRIEVES_UNDER:
            self._from = min(self._from, progress)

    def difficulty(self, progress: float) -> float:
        """From 0 (easy) to 1 (the final mix)."""
        return min(1.0, max(0.0, (progress - self._from) / _HARDER_OVER))
