"""A worker that computes nothing: it replies with fixed text, and serves parts by the keys that it was told to hold."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.common.errors import (
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from services.worker.adapters.generate_streams import GenerateStreams
from tests.stub_cache import StubCache

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|document_start|>", "<|document_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEAM_WINDOW = 4
MIN_BODY = 8
MIN_SEGMENT_TOKENS = SEAM_WINDOW + MIN_BODY
CONTEXT_LENGTH = 2048
MODEL_NAME = "stub-model"


def train_tokenizer() -> Tokenizer:
    """A small byte-level BPE with the demo model's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the answer is in the document about the city of the river"] * 4, trainer)
    return tokenizer


class WorkerDiedError(UnavailableError):
    """What a killed worker looks like to its client."""


@dataclass
class StubWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Knobs first, records after them; `begun` are the keys of captures, ordered either way.

    composed_reply: what it says where a segment is composed, instead of `reply`; empty says the same. held_priority: requests
    of this priority stand still while it is set.
    """

    cache: StubCache
    tokenizer: Tokenizer = field(default_factory=train_tokenizer)
    chat_template: str = CHATML
    reply: str = "The answer is 42, naïvely: 🦉 and 漢字."
    composed_reply: str = ""
    held_priority: int | None = None
    num_repeats: int = 1
    token_delay_seconds: float = 0.0
    capture_delay_seconds: float = 0.0
    failing_captures: bool = False
    broken_captures: bool = False
    deaths_before_first_token: int = 0
    dies_after_tokens: int = -1
    drops_states: bool = False
    refuses_grammars: bool = False
    refuses_holds: bool = False
    holds_turns: bool = False
    refuses_turns: bool = False
    worker_id: str = "stub"
    profile_digest: str = "profile-1"
    calibration: worker_pb2.Calibration | None = None
    can_capture: bool = True
    can_combine: bool = True
    is_draining: bool = False
    held: set[bytes] = field(default_factory=set)
    requests: list[worker_pb2.GenerateRequest] = field(default_factory=list)
    captures: list[worker_pb2.CaptureRequest] = field(default_factory=list)
    kept: list[worker_pb2.KeepRequest] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    begun: list[bytes] = field(default_factory=list)
    failed: Counter[bytes] = field(default_factory=Counter)
    waiting: dict[bytes, asyncio.Event] = field(default_factory=dict)
    num_running: int = 0
    num_cancelled: int = 0

    async def Describe(  # noqa: N802
        self,
        request: worker_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DescribeRequest, worker_pb2.DescribeResponse],
    ) -> AsyncIterator[worker_pb2.DescribeResponse]:
        for message in self.describe():
            yield message

    def describe(self) -> Iterator[worker_pb2.DescribeResponse]:
        yield worker_pb2.DescribeResponse(
            info=worker_pb2.WorkerInfo(
                worker_id=self.worker_id,
                model_name=MODEL_NAME,
                model_revision="revision-1",
                profile=worker_pb2.Profile(
                    digest=self.profile_digest,
                    min_segment_tokens=MIN_SEGMENT_TOKENS,
                    min_body=MIN_BODY,
                    document_open="<|document_start|>",
                    document_close="<|document_end|>",
                ),
                chat_template=self.chat_template,
                context_length=CONTEXT_LENGTH,
                stop_token_ids=[SPECIAL_TOKENS.index("<|im_end|>")],
                eos_token="<|im_end|>",
                can_capture=self.can_capture,
                can_combine=self.can_combine,
                moves_states=True,
                vocab_size=self.tokenizer.get_vocab_size(),
                calibration=self.calibration,
            )
        )
        content = self.tokenizer.to_str().encode()
        for start in range(0, len(content), 5000):
            yield worker_pb2.DescribeResponse(tokenizer_chunk=content[start : start + 5000])

    async def Capture(  # noqa: N802
        self,
        request: worker_pb2.CaptureRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CaptureRequest, worker_pb2.CaptureEvent],
    ) -> AsyncIterator[worker_pb2.CaptureEvent]:
        self.captures.append(request)
        self.begun += [segment.key for segment in request.segments]
        await asyncio.sleep(self.capture_delay_seconds)
        if self.broken_captures:
            self.failed.update(segment.key for segment in request.segments)
            raise InternalError("the stub's captures are broken")
        for segment in request.segments:
            if self.failing_captures:
                self.failed[segment.key] += 1
                outcome = worker_pb2.CAPTURE_OUTCOME_FAILED
                yield worker_pb2.CaptureEvent(key=segment.key, outcome=outcome, reason="over budget")
                continue
            self.held.add(segment.key)
            self.cache.publish(segment.key)
            yield worker_pb2.CaptureEvent(key=segment.key, outcome=worker_pb2.CAPTURE_OUTCOME_STORED)

    async def Generate(  # noqa: N802
        self,
        request_iterator: AsyncIterable[worker_pb2.GenerateOrders],
        context: grpc.aio.ServicerContext[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents],
    ) -> AsyncIterator[worker_pb2.GenerateEvents]:
        async with aclosing(GenerateStreams(self._generate).serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def _generate(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateEvent]:
        self.requests.append(request)
        if self.refuses_grammars and request.HasField("grammar"):
            raise InvalidRequestError("grammar: the stub honours none")
        if self.deaths_before_first_token:
            self.deaths_before_first_token -= 1
            raise WorkerDiedError("the stub died before the first token")
        self.num_running += 1
        try:
            async for event in self._events(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def Keep(  # noqa: N802
        self,
        request: worker_pb2.KeepRequest,
        context: grpc.aio.ServicerContext[worker_pb2.KeepRequest, worker_pb2.KeepResponse],
    ) -> worker_pb2.KeepResponse:
        if self.refuses_turns:
            return worker_pb2.KeepResponse(reason="state_dropped")
        self.held.add(request.key)
        self.cache.publish(request.key)
        self.kept.append(request)
        return worker_pb2.KeepResponse()

    async def Fetch(  # noqa: N802
        self,
        request: worker_pb2.FetchRequest,
        context: grpc.aio.ServicerContext[worker_pb2.FetchRequest, worker_pb2.Chunk],
    ) -> AsyncIterator[worker_pb2.Chunk]:
        raise NotFoundError("the stub holds no planes")
        yield

    async def Take(  # noqa: N802
        self,
        request: worker_pb2.TakeRequest,
        context: grpc.aio.ServicerContext[worker_pb2.TakeRequest, worker_pb2.Chunk],
    ) -> AsyncIterator[worker_pb2.Chunk]:
        """A state without planes, once."""
        if request.handle not in self.waiting:
            raise NotFoundError("the stub holds no such state")
        self.waiting.pop(request.handle).set()
        yield worker_pb2.Chunk()

    async def Drop(  # noqa: N802
        self,
        request: worker_pb2.DropRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DropRequest, worker_pb2.DropResponse],
    ) -> worker_pb2.DropResponse:
        self.dropped += request.keys
        dropped = self.held.intersection(request.keys)
        self.held -= dropped
        return worker_pb2.DropResponse(num_dropped=len(dropped))

    async def Report(  # noqa: N802
        self,
        request: worker_pb2.ReportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReportRequest, worker_pb2.ReportResponse],
    ) -> worker_pb2.ReportResponse:
        return worker_pb2.ReportResponse(draining=self.is_draining)

    async def _events(self, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.GenerateEvent]:
        while request.priority == self.held_priority:  # noqa: ASYNC110 # a knob
            await asyncio.sleep(0.01)
        if ordered := [part.key for part in request.parts if part.HasField("capture")]:
            self.begun += ordered
            await asyncio.sleep(self.capture_delay_seconds)
        await self._wait_for_sources(request)
        parts = [self._serve(part, request) for part in request.parts]
        for snapshot in request.snapshots:
            self.held.add(snapshot.key)
            self.cache.publish(snapshot.key)
        yield worker_pb2.GenerateEvent(
            prefilled=worker_pb2.Prefilled(parts=parts, queue_seconds=0.001, combine_seconds=0.002)
        )
        if request.HasField("hold"):
            async for event in self._hold(request):
                yield event
            return
        is_composed = any(part.serving == worker_pb2.PART_SERVING_SEGMENT for part in request.parts)
        reply = self.composed_reply if is_composed and self.composed_reply else self.reply
        ids = self.tokenizer.encode(reply, add_special_tokens=False).ids * self.num_repeats
        shown = ids[: request.sampling.max_tokens]
        for index, token_id in enumerate(shown):
            if index == self.dies_after_tokens:
                raise WorkerDiedError("the stub died mid-stream")
            logprobs = self._logprobs(token_id, request.sampling)
            yield worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=[token_id], logprobs=logprobs))
            await asyncio.sleep(self.token_delay_seconds)
        is_whole = len(shown) == len(ids)
        reason = worker_pb2.FINISH_REASON_STOP if is_whole else worker_pb2.FINISH_REASON_LENGTH
        yield worker_pb2.GenerateEvent(
            finished=worker_pb2.Finished(
                reason=reason,
                decode_seconds=0.003,
                generated_tokens=len(shown),
                held_key=b"held" if is_whole and self.holds_turns and request.closing_token_ids else b"",
            )
        )

    async def _hold(self, request: worker_pb2.GenerateRequest) -> AsyncIterator[worker_pb2.GenerateEvent]:
        if self.refuses_holds:
            raise OverloadedError("the stub has no room for a decode state")
        handle = len(self.requests).to_bytes(32, "big")
        taken = self.waiting[handle] = asyncio.Event()
        num_tokens = sum(len(part.token_ids) for part in request.parts)
        try:
            yield worker_pb2.GenerateEvent(held=worker_pb2.Held(handle=handle, num_tokens=num_tokens, seconds=30.0))
            await taken.wait()
            yield worker_pb2.GenerateEvent(released=worker_pb2.Released(taken=True))
        finally:
            self.waiting.pop(handle, None)

    def _logprobs(self, token_id: int, sampling: worker_pb2.Sampling) -> list[worker_pb2.TokenLogprobs]:
        """The drawn token is the likeliest, the others follow by id."""
        if not sampling.HasField("logprobs"):
            return []
        top = [token_id, *range(sampling.logprobs)][: sampling.logprobs]
        values = [-0.5 - rank for rank in range(len(top))]
        return [worker_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=top, top_logprobs=values)]

    async def _wait_for_sources(self, request: worker_pb2.GenerateRequest) -> None:
        """As a fetch of what is being captured does."""
        before = self.failed.copy()
        for part in request.parts:
            for _ in range(int(part.source_wait_seconds / 0.01)):
                if part.key in self.held or self.failed[part.key] > before[part.key]:
                    break
                await asyncio.sleep(0.01)

    def _serve(self, part: worker_pb2.PromptPart, request: worker_pb2.GenerateRequest) -> worker_pb2.ServedPart:
        length = len(part.token_ids)
        key = request.prefix_key if part.serving == worker_pb2.PART_SERVING_PREFIX else part.key
        if part.serving == worker_pb2.PART_SERVING_LIVE:
            return worker_pb2.ServedPart(serving=part.serving, live_tokens=length)
        if part.HasField("capture") and key not in self.held:
            return self._capture(part)
        if key not in self.held or self.drops_states:
            reason = "state_dropped"
            return worker_pb2.ServedPart(serving=worker_pb2.PART_SERVING_LIVE, live_tokens=length, reason=reason)
        is_segment = part.serving == worker_pb2.PART_SERVING_SEGMENT
        live = SEAM_WINDOW if is_segment else 0
        refreshed = min(16 * request.refresh.blocks, length - live) if is_segment else 0
        return worker_pb2.ServedPart(
            serving=part.serving,
            live_tokens=live + refreshed,
            reused_tokens=length - live - refreshed,
            tier="host",
            refreshed_tokens=refreshed,
        )

    def _capture(self, part: worker_pb2.PromptPart) -> worker_pb2.ServedPart:
        """As it combines."""
        length = len(part.token_ids)
        if self.failing_captures or self.broken_captures:
            live = worker_pb2.PART_SERVING_LIVE
            return worker_pb2.ServedPart(serving=live, live_tokens=length, reason="capture_failed")
        self.held.add(part.key)
        self.cache.publish(part.key)
        return worker_pb2.ServedPart(
            serving=part.serving, live_tokens=SEAM_WINDOW, captured_tokens=length - SEAM_WINDOW, tier="host"
        )


@dataclass
class StubPrefill(StubWorker):
    """The same worker at another address, where it captures and does not combine; records are those of `behind`."""

    behind: "StubWorker" = field(kw_only=True)

    async def Capture(  # noqa: N802
        self,
        request: worker_pb2.CaptureRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CaptureRequest, worker_pb2.CaptureEvent],
    ) -> AsyncIterator[worker_pb2.CaptureEvent]:
        async for event in self.behind.Capture(request, context):
            yield event
