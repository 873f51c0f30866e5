"""Decoding: one token for every running request in one batch."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from services.worker.engine.combine import Prompt
from services.worker.engine.context import EngineContext
from services.worker.engine.logprobs import find_logprobs
from services.worker.engine.requests import (
    EngineError,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    GenerateRequest,
    TokenEvent,
)
from services.worker.engine.sampling import Likeliest, Sampler, pick_likeliest, read_likeliest
from services.worker.mixers.batch import DecodeBatch
from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention import PagedQueries, PageTable
from services.worker.ops.paged_attention.dispatch import takes_kernel

__all__ = ["DecodeLoop", "DecodeRows", "Decoded", "Decoder", "PlainDecoder", "RunningRequest"]


@dataclass(slots=True)
class RunningRequest:
    """A request that decodes. write_slot: of the token that it feeds next, once its page table has it.

    finished: it runs no more; reply: the tokens that it has given. closing: once the reply has ended and the state behind its
    message is wanted, tokens of that end behind `last_token`; is_closed: all of them have run.
    """

    request: GenerateRequest
    prompt: Prompt
    sampler: Sampler
    last_token: int = 0
    generated: int = 0
    finished: bool = False
    write_slot: int | None = None
    reply: list[int] = field(default_factory=list)
    closing: deque[int] | None = None
    is_closed: bool = False
    started_at: float = field(default_factory=time.monotonic)

    @property
    def goes_on(self) -> bool:
        """It feeds a token behind this step too, unless a stop token ends it."""
        if self.closing is not None:
            return bool(self.closing)
        return self.generated + 1 < self.request.sampling.max_tokens

    def reserve(self) -> int:
        """The slot of the token that it feeds next."""
        if self.write_slot is None:
            self.write_slot = self.prompt.append_slot()
        return self.write_slot

    def accept(self, logits: torch.Tensor, likeliest: Likeliest) -> None:
        """Draw the next token from logits `[vocabulary]`, and say so; logits that are no numbers fail this request alone."""
        if self.closing is not None:
            self._close_on(self.closing)
            return
        try:
            token = self.sampler.draw(logits, likeliest)
        except ValueError as error:
            self.finished = True
            self.request.sink(FailedEvent(EngineError(f"sampling failed: {error}")))
            return
        sampling = self.request.sampling
        self.generated += 1
        if token in sampling.stop_ids:
            self.last_token = token
            self._finish(FinishReason.STOP)
            return
        self.last_token = token
        self.reply.append(token)
        logprobs = None if sampling.logprobs is None else find_logprobs(logits, token, sampling.logprobs)
        self.request.sink(TokenEvent(token, logprobs))
        if self.generated >= sampling.max_tokens:
            self._finish(FinishReason.LENGTH)

    def _finish(self, reason: FinishReason) -> None:
        self.closing = self._find_closing() if reason is FinishReason.STOP else None
        self.finished = self.closing is None
        decode_seconds = time.monotonic() - self.started_at
        self.request.sink(FinishedEvent(reason, decode_seconds, self.generated, holds=not self.finished))

    def _find_closing(self) -> deque[int] | None:
        """What is to run behind the stop token; None where no state is wanted, or the message would end otherwise.

        It has the room of `max_tokens`, and no more: a state that may be of use later keeps no request waiting.
        """
        hold = self.request.turn
        if hold is None or hold.closing_ids[0] != self.last_token:
            return None
        if len(self.reply) + len(hold.closing_ids) > self.request.sampling.max_tokens:
            return None
        return deque(hold.closing_ids[1:])

    def _close_on(self, closing: deque[int]) -> None:
        if closing:
            self.last_token = closing.popleft()
        else:
            self.is_closed = True


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One step of requests but for their tokens: positions, write_slots and state slots `[B]`, and page tables."""

    positions: Sequence[int]
    write_slots: Sequence[int]
    slots: Sequence[int]
    tables: Sequence[PageTable]

    @classmethod
    def of(cls, running: Sequence[RunningRequest]) -> "DecodeRows":
        """The next step's; page tables have its tokens from now on."""
        write_slots = [one.reserve() for one in running]
        return cls(
            positions=[one.prompt.length - 1 for one in running],
            write_slots=write_slots,
            slots=[one.prompt.slot for one in running],
            tables=[one.prompt.table for one in running],
        )

    def queries(self, positions: torch.Tensor, is_fixed: bool = False) -> PagedQueries:
        """Over positions on the device."""
        return PagedQueries(
            positions, range(len(self.slots) + 1), self.tables, on_host=self.positions, is_fixed=is_fixed
        )


@dataclass(frozen=True, slots=True)
class Decoded:
    """logits `[B, vocabulary]`, and what `pick_likeliest` picks of them; both valid until the next step."""

    logits: torch.Tensor
    likeliest: torch.Tensor


class Decoder(Protocol):
    """What runs decode steps."""

    @property
    def prepares(self) -> bool:
        """Preparing a step apart spares time."""
        ...

    def prepare(self, rows: DecodeRows) -> None:
        """What the next step needs but its tokens; the device may still be busy with the one before."""
        ...

    def step(self, token_ids: Sequence[int], rows: DecodeRows) -> Decoded:
        """One step of requests' last tokens `[B]`; does not wait for the device."""
        ...


@dataclass(frozen=True, slots=True)
class PlainDecoder:
    """Steps that run as they are."""

    context: EngineContext
    prepares: bool = False

    def prepare(self, rows: DecodeRows) -> None:
        """See `Decoder`: nothing."""

    def step(self, token_ids: Sequence[int], rows: DecodeRows) -> Decoded:
        """See `Decoder`."""
        # One transfer for all of them: each would wait for the device on its own.
        sent = self.context.integers([*token_ids, *rows.positions, *rows.write_slots, *rows.slots]).view(4, -1)
        logits = self.context.model.decode(sent[0], DecodeBatch(rows.queries(sent[1]), sent[2], sent[3]))
        return Decoded(logits, pick_likeliest(logits))


def _choose_decoder(context: EngineContext) -> Decoder:
    """Recorded steps on a GPU whose kernels take every attention layer, else the model as it is."""
    page_tokens = context.pages.page_size
    recordable = all(
        takes_kernel(context.device, shape.key_dim, page_tokens, shape.latent_dim) for shape in context.model.spec.pages
    )
    if not recordable or not has_kernels(context.device):
        return PlainDecoder(context)
    from services.worker.engine.decode_graph import DecodeGraphs
    from services.worker.engine.recorder import create_recorder

    return DecodeGraphs(context, create_recorder(context))


class DecodeLoop:
    """Step by step, each of which the host prepares while the device is busy with the one before, if the same requests go on."""

    def __init__(self, context: EngineContext, decoder: Decoder | None = None) -> None:
        self._decoder = _choose_decoder(context) if decoder is None else decoder
        self._ahead: tuple[list[RunningRequest], DecodeRows] | None = None

    def step(self, running: Sequence[RunningRequest]) -> None:
        """Run every request's last token through the model and draw the next one."""
        rows = self._take(running)
        decoded = self._decoder.step([one.last_token for one in running], rows)
        for one in running:
            one.write_slot = None
        if self._decoder.prepares and all(one.goes_on for one in running):
            self._ahead = (list(running), DecodeRows.of(running))
            self._decoder.prepare(self._ahead[1])
        for one, own, likeliest in zip(running, decoded.logits, read_likeliest(decoded.likeliest), strict=True):
            one.accept(own, likeliest)

    def _take(self, running: Sequence[RunningRequest]) -> DecodeRows:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and len(ahead[0]) == len(running) and all(map(_is, ahead[0], running)):
            return ahead[1]
        return DecodeRows.of(running)


def _is(one: RunningRequest, other: RunningRequest) -> bool:
    return one is other
