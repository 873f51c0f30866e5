"""`hypic run`: one prompt in one process, without services. The same assembly, engine and ids as the stack."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypic.v1 import worker_pb2

from services.common.content import content_hash
from services.router.adapters.clients import Description
from services.router.adapters.model_builder import build_model
from services.router.domain.parts import PartKind, Prompt
from services.router.domain.request import ChatPrompt, Document, Message, Role, Text
from services.router.served_model import ServedModel
from services.worker.adapters.description import WorkerPlace, describe
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import ServedModel as WorkerModel
from services.worker.adapters.served_model import read_served_model
from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    FailedEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    ServedPart,
    Serving,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.settings import WorkerSettings

__all__ = ["Answer", "OnePrompt", "PromptText", "describe_model", "read_documents"]

_MEMO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PromptText:
    """What to ask: documents are pairs of title and text."""

    question: str
    documents: Sequence[tuple[str, str]] = ()
    system: str = ""

    def conversation(self) -> ChatPrompt:
        """As the API would have received it."""
        messages = [Message(Role.SYSTEM, (Text(self.system),))] if self.system else []
        messages.append(Message(Role.USER, (Text(self.question),)))
        documents = tuple(Document(text, title) for title, text in self.documents)
        return ChatPrompt(tuple(messages), documents)


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply, how each part was served, and the seconds of capture and from then to the first token."""

    text: str
    parts: tuple[tuple[PartKind, ServedPart], ...]
    capture_seconds: float
    first_token_seconds: float


def describe_model(settings: WorkerSettings, served: WorkerModel) -> ServedModel:
    """What the router would build from a worker's description.

    Raises:
        ModelRefusedError: the template or tokenizer fails the start-up check.
    """
    info, tokenizer = _split(describe(served, WorkerPlace(settings.worker_id, min_body=settings.min_body)))
    return build_model(Description(info, tokenizer), _MEMO_BYTES)


class OnePrompt:
    """A model loaded into this process.

    Raises:
        CheckpointError: the checkpoint cannot be served.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        served = read_served_model(settings)
        self._engine = build_engine(settings, served)
        self._model = describe_model(settings, served)

    def ask(self, text: PromptText, max_tokens: int, compose: bool) -> Answer:
        """Capture what is not held yet, combine, decode greedily.

        Raises:
            PromptError: the prompt cannot be assembled.
            EngineError: the engine refuses it.
        """
        prompt = self._model.assembler.assemble(text.conversation())
        parts = tuple(self._parts(prompt, compose))
        started = time.monotonic()
        self._capture(parts)
        captured = time.monotonic()
        events: list[GenerateEvent] = []
        sampling = SamplingOptions(max_tokens, stop_ids=frozenset(self._model.info.stop_token_ids))
        self._engine.submit(GenerateRequest("run", parts, sampling, events.append))
        first_token = 0.0
        while not self._engine.is_idle:
            self._engine.step()
            if events and not first_token:
                first_token = time.monotonic()
        return self._answer(prompt, events, captured - started, first_token - captured)

    def _parts(self, prompt: Prompt, compose: bool) -> Iterator[PromptPart]:
        for part in prompt.parts:
            if compose and part.kind is PartKind.SEGMENT:
                key = content_hash(self._model.info.profile.digest, part.token_ids)
                yield PromptPart(part.token_ids, Serving.SEGMENT, key)
            else:
                yield PromptPart(part.token_ids)

    def _capture(self, parts: Sequence[PromptPart]) -> None:
        """A segment that cannot be captured is served live, as its part in the answer says."""
        wanted = tuple(CaptureSegment(part.key, part.token_ids) for part in parts if part.key)
        events: list[CaptureEvent] = []
        if wanted:
            self._engine.submit_capture(CaptureJob("run", wanted, events.append))
        _drain(self._engine)

    def _answer(
        self, prompt: Prompt, events: Sequence[GenerateEvent], capture_seconds: float, first_token_seconds: float
    ) -> Answer:
        detokenizer = self._model.new_detokenizer()
        text: list[str] = []
        served: tuple[ServedPart, ...] = ()
        for event in events:
            if isinstance(event, FailedEvent):
                raise event.error
            if isinstance(event, PrefilledEvent):
                served = event.parts
            elif isinstance(event, TokenEvent):
                text.append(detokenizer.push([event.token_id]))
        kinds = [part.kind for part in prompt.parts]
        parts = tuple(zip(kinds, served, strict=True))
        return Answer("".join(text), parts, capture_seconds, first_token_seconds)


def _drain(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def _split(messages: Iterator[worker_pb2.DescribeResponse]) -> tuple[worker_pb2.WorkerInfo, bytes]:
    info = next(messages).info
    return info, b"".join(message.tokenizer_chunk for message in messages)


def read_documents(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Files as documents, titled by their names.

    Raises:
        OSError: one cannot be read.
        UnicodeDecodeError: one is no UTF-8 text.
    """
    return [(path.stem.replace("_", " "), path.read_text(encoding="utf-8")) for path in paths]
