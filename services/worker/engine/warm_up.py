"""Made-up requests ahead of the first real one, so that nobody waits while kernels are compiled and passes recorded.

A pass is recorded when its room is met for the second time, so everything runs twice: prompts over stored segments, alone and
several in one sweep; prompts that capture, and captures alone; decode steps of every number of requests; a long recompute. What
one request has to itself runs once more, for its time: of a worker that has measured nothing nobody knows what it can take.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from services.worker.engine.loop import Engine
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.planes import empty_planes
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    EngineError,
    FailedEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    Serving,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.states import SegmentState
from services.worker.engine.sweep_graphs import RECORDED_TOKENS
from services.worker.mixers.batch import LinearPlane

__all__ = ["WarmUp", "warm_up"]

_log = logging.getLogger(__name__)

_ROUNDS = 2
# Stored documents of a prompt, which make the page tables of a prompt of this length.
_DOCUMENTS, _DOCUMENT_TOKENS = 15, 2048
# So many of them: short runs, most of them seams, are walked in other chunks than a long question behind few.
_USED = (2, 8)
# Live tokens of a prompt alone; of each of several in one sweep, and how many these are.
_ALONE, _SHARED, _TOGETHER = (64, 128, 192, 256, 320, 512, 1024), (96, 160), (2, 3, 4)
# Tokens that are captured, and documents and live tokens of the prompt beside them.
_CAPTURED, _BESIDE = (256, 512, 768, 1024, 1536, 2048, 3072, 4096), ((2, 120), (8, 120), (8, 240))
# One request leaves a batch every so many steps.
_STEPS_APART = 2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What was served ahead: requests and captures, those of them that failed, and seconds in all.

    combines, captures: seconds and tokens of passes that had the device to themselves.
    """

    requests: int
    failed: int
    seconds: float
    combines: tuple[tuple[float, int], ...]
    captures: tuple[tuple[float, int], ...]


def warm_up(engine: Engine) -> WarmUp:
    """Serve them on an idle engine, and leave nothing of them behind but what was compiled and recorded.

    Not for an engine whose model is split: its ranks follow commands.
    """
    began, running = time.monotonic(), _Requests(engine)
    try:
        for _ in range(_ROUNDS):
            running.store_documents()
            for batch in running.batches():
                running.serve(batch)
        running.store_documents()
        running.is_timed = True
        for batch in running.batches():
            if len(batch) == 1:
                running.serve(batch)
    except NoRoomError as error:
        _log.warning("the pools are too small to warm up in full: %s", error)
    finally:
        running.forget()
    seconds = time.monotonic() - began
    done = WarmUp(running.served, running.failed, seconds, tuple(running.combines), tuple(running.captures))
    _log.info("warmed up with %d requests in %.1f s", done.requests, done.seconds)
    return done


class _Requests:
    """What is made up for one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._context = engine.context
        self._stored: list[PromptPart] = []
        self._captured: list[bytes] = []
        self._names = count()
        self.served = 0
        self.failed = 0
        self.is_timed = False
        self.combines: list[tuple[float, int]] = []
        self.captures: list[tuple[float, int]] = []

    @property
    def _least(self) -> int:
        """Tokens of the shortest segment with a body."""
        history = max(1, self._context.model.spec.conv_history)
        return self._context.profile.seam_window.least_segment(history) + history

    @torch.inference_mode()
    def store_documents(self) -> None:
        """Segments of zeros under keys of their own, where they are not there yet: others may have needed their pages. Fewer and
        shorter ones where there is little room.

        Raises:
            NoRoomError: there is room for none.
        """
        context, size = self._context, self._context.pages.page_size
        tokens = min(self._engine.limits.context_length, context.pages.num_pages * size) // 2
        length = max(self._least, min(_DOCUMENT_TOKENS, tokens // _DOCUMENTS))
        self._stored = [
            PromptPart(self._ids(length), Serving.SEGMENT, self._key(number))
            for number in range(min(_DOCUMENTS, tokens // length))
        ]
        planes = empty_planes(context)
        for tensor in (tensor for plane in planes for tensor in plane.tensors):
            tensor.zero_()
        for part in self._stored:
            if part.key not in context.store:
                self._store(part, planes)

    def _store(self, part: PromptPart, planes: Sequence[LinearPlane]) -> None:
        context = self._context
        seam = context.profile.seam_window.tokens(len(part.token_ids))
        pages = context.pages.allocate(pages_for(len(part.token_ids) - seam, context.pages.page_size))
        places = context.integers(pages)
        for pool in context.memory.page_pools:
            for tensor in (pool.keys,) if pool.latent else (pool.keys, pool.values):
                tensor[places] = 0
        try:
            context.store.put(part.key, SegmentState(part.token_ids, seam, planes, pages))
        except NoRoomError:
            context.pages.release(pages)
            raise

    def batches(self) -> Iterator[Sequence[GenerateRequest | CaptureJob]]:
        """Of each what is under way together."""
        limits = self._engine.limits
        for used in _USED:
            yield from ([self._request(self._over(used, live))] for live in _ALONE)
            for together in _TOGETHER:
                if together <= limits.max_running:
                    yield from ([self._request(self._over(used, live)) for _ in range(together)] for live in _SHARED)
        most = min(limits.capture_tokens, self._context.profile.chunk_tokens)
        for tokens in _CAPTURED:
            if self._least <= tokens <= most:
                yield from ([self._request((self._cold(tokens), *self._over(*beside)))] for beside in _BESIDE)
                # The second one does not fit into the sweep of the first.
                yield [
                    self._request((self._cold(tokens), self._cold(most - tokens + self._least), *self._over(8, 120)))
                ]
                segment = CaptureSegment(self._new_key(), self._ids(tokens))
                yield [CaptureJob(self._name(), (segment,), self._hear_capture)]
        readers = [self._over(_USED[-1], 96)] * limits.max_running
        yield [self._request(parts, 1 + _STEPS_APART * number) for number, parts in enumerate(readers, start=1)]
        yield [self._request((PromptPart(self._ids(RECORDED_TOKENS + 1)),))]

    def serve(self, batch: Sequence[GenerateRequest | CaptureJob]) -> None:
        """Until all have ended; what is too large for the engine is left out."""
        for one in batch:
            try:
                if isinstance(one, CaptureJob):
                    self._engine.submit_capture(one)
                else:
                    self._engine.submit(one)
            except EngineError:
                continue
            self.served += 1
        while not self._engine.is_idle:
            self._engine.step()
        while self._captured:
            self._context.store.drop(self._captured.pop())

    def forget(self) -> None:
        """Drop what is stored."""
        for part in self._stored:
            self._context.store.drop(part.key)

    def _over(self, used: int, live: int) -> tuple[PromptPart, ...]:
        """So many stored documents and a question, with about so many live tokens in all."""
        documents = self._stored[:used]
        seams = sum(self._context.profile.seam_window.tokens(len(part.token_ids)) for part in documents)
        return (*documents, PromptPart(self._ids(max(1, live - seams))))

    def _cold(self, length: int) -> PromptPart:
        return PromptPart(self._ids(length), Serving.SEGMENT, self._new_key(), captures=True)

    def _request(self, parts: tuple[PromptPart, ...], max_tokens: int = 1) -> GenerateRequest:
        return GenerateRequest(self._name(), parts, SamplingOptions(max_tokens), self._hear)

    def _hear(self, event: GenerateEvent | CaptureEvent) -> None:
        if isinstance(event, FailedEvent):
            self.failed += 1
            _log.warning("a request of the warm-up failed: %s", event.error)
        if isinstance(event, PrefilledEvent) and self.is_timed:
            tokens = sum(part.live_tokens + part.captured_tokens for part in event.parts)
            self.combines.append((event.combine_seconds, tokens))

    def _hear_capture(self, event: CaptureEvent) -> None:
        if self.is_timed and event.pass_tokens:
            self.captures.append((event.seconds, event.pass_tokens))

    def _ids(self, length: int) -> tuple[int, ...]:
        return tuple(number * 7919 % self._context.model.spec.vocab_size for number in range(length))

    def _name(self) -> str:
        return f"warm-up {next(self._names)}"

    def _new_key(self) -> bytes:
        self._captured.append(self._key(_DOCUMENTS + len(self._captured)))
        return self._captured[-1]

    def _key(self, number: int) -> bytes:
        return b"warm-up" + number.to_bytes(8, "big")
