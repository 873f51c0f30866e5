"""Decoding: one token for every running request in one batch."""

import time
from dataclasses import dataclass, field

import torch

from services.worker.engine.combine import Prompt
from services.worker.engine.context import EngineContext
from services.worker.engine.requests import (
    EngineError,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    GenerateRequest,
    TokenEvent,
)
from services.worker.engine.sampling import Sampler
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.paged_attention import PagedQueries

__all__ = ["RunningRequest", "decode_step"]


@dataclass(slots=True)
class RunningRequest:
    """A request that decodes. finished: its last event has been sent."""

    request: GenerateRequest
    prompt: Prompt
    sampler: Sampler
    last_token: int = 0
    generated: int = 0
    finished: bool = False
    started_at: float = field(default_factory=time.monotonic)

    def accept(self, logits: torch.Tensor) -> None:
        """Draw the next token from logits `[vocabulary]`, and say so; logits that are no numbers fail this request alone."""
        try:
            token = self.sampler.draw(logits)
        except ValueError as error:
            self.finished = True
            self.request.sink(FailedEvent(EngineError(f"sampling failed: {error}")))
            return
        sampling = self.request.sampling
        self.generated += 1
        if token in sampling.stop_ids:
            self._finish(FinishReason.STOP)
            return
        self.last_token = token
        self.request.sink(TokenEvent(token))
        if self.generated >= sampling.max_tokens:
            self._finish(FinishReason.LENGTH)

    def _finish(self, reason: FinishReason) -> None:
        self.finished = True
        self.request.sink(FinishedEvent(reason, time.monotonic() - self.started_at, self.generated))


def decode_step(context: EngineContext, running: list[RunningRequest]) -> None:
    """Run every request's last token through the model and draw the next one."""
    positions = [request.prompt.length for request in running]
    write_slots = [request.prompt.append_slot() for request in running]
    batch = DecodeBatch(
        queries=PagedQueries(
            context.integers(positions), range(len(running) + 1), [request.prompt.table for request in running]
        ),
        write_slots=context.integers(write_slots),
        slots=context.integers([request.prompt.slot for request in running]),
    )
    hidden = context.model.embed(context.integers([request.last_token for request in running]))
    for layer in context.model.layers:
        hidden = layer.run(hidden, lambda mixer, normed: mixer.decode(normed, batch))
    for request, logits in zip(running, context.model.logits(hidden), strict=True):
        request.accept(logits)
