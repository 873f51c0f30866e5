"""Decoding: one token for every running request in one batch."""

import time
from dataclasses import dataclass, field
from typing import Protocol

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
from services.worker.engine.sampling import Likeliest, Sampler, find_likeliest
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.dispatch import takes_kernel

__all__ = ["Decoder", "RunningRequest", "choose_decoder", "decode_step"]


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

    def accept(self, logits: torch.Tensor, likeliest: Likeliest) -> None:
        """Draw the next token from logits `[vocabulary]`, and say so; logits that are no numbers fail this request alone."""
        try:
            token = self.sampler.draw(logits, likeliest)
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


class Decoder(Protocol):
    """What runs a decode step; logits `[B, vocabulary]` are valid until the next one."""

    def __call__(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One step of requests' last tokens `[B]`."""
        ...


def choose_decoder(context: EngineContext) -> Decoder:
    """Recorded steps on a GPU whose kernels take every attention layer, else the model as it is."""
    page_tokens = context.pages.page_size
    recordable = all(takes_kernel(context.device, shape.key_dim, page_tokens) for shape in context.model.spec.pages)
    if not recordable or not has_kernels(context.device):
        return context.model.decode
    from services.worker.engine.decode_graph import DecodeGraphs
    from services.worker.engine.recorder import CudaRecorder

    return DecodeGraphs(context, CudaRecorder()).step


def decode_step(context: EngineContext, decoder: Decoder, running: list[RunningRequest]) -> None:
    """Run every request's last token through the model and draw the next one."""
    positions = [request.prompt.length for request in running]
    write_slots = [request.prompt.append_slot() for request in running]
    slots = [request.prompt.slot for request in running]
    tokens = [request.last_token for request in running]
    # One transfer for all of them: each would wait for the device on its own.
    sent = context.integers([*tokens, *positions, *write_slots, *slots]).view(4, -1)
    tables = [request.prompt.table for request in running]
    batch = DecodeBatch(
        queries=PagedQueries(sent[1], range(len(running) + 1), tables, on_host=positions),
        write_slots=sent[2],
        slots=sent[3],
    )
    logits = decoder(sent[0], batch)
    for request, own, likeliest in zip(running, logits, find_likeliest(logits), strict=True):
        request.accept(own, likeliest)
