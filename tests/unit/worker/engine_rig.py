"""An engine over a tiny checkpoint, and what it said about each request."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.refresh import RefreshOrder
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    FetchEvent,
    FinishedEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    ServedPart,
    Serving,
    SnapshotOrder,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import OutgoingState
from tests.exactness.rig import draw_ids

__all__ = ["WINDOW", "Elsewhere", "EngineRig", "Heard", "cold", "fetched", "live", "segment"]

WINDOW = 4


@dataclass(slots=True)
class Heard:
    """The events of one request, in order."""

    events: list[GenerateEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return [event.token_id for event in self.events if isinstance(event, TokenEvent)]

    @property
    def logprobs(self) -> list[dict[int, float]]:
        """The likeliest tokens with theirs, step by step."""
        return [dict(event.logprobs.top) for event in self.events if isinstance(event, TokenEvent) and event.logprobs]

    @property
    def prefilled(self) -> PrefilledEvent:
        """The one event that says how the parts were served."""
        (event,) = [event for event in self.events if isinstance(event, PrefilledEvent)]
        return event

    @property
    def served(self) -> tuple[ServedPart, ...]:
        """How each part was served."""
        return self.prefilled.parts

    @property
    def captured(self) -> dict[bytes, str]:
        """Why each ordered capture failed, by key; empty for those that did not."""
        return {event.key: event.reason for event in self.events if isinstance(event, CaptureEvent)}

    @property
    def fetches(self) -> list[FetchEvent]:
        """States that were to be brought."""
        return [event for event in self.events if isinstance(event, FetchEvent)]

    @property
    def is_complete(self) -> bool:
        """Captures and fetches aside: one prefill first, one end last, tokens between, and their count adds up."""
        events = [event for event in self.events if not isinstance(event, CaptureEvent | FetchEvent)]
        if len(events) < 2:
            return False
        first, *tokens, last = events
        return (
            isinstance(first, PrefilledEvent)
            and all(isinstance(event, TokenEvent) for event in tokens)
            and isinstance(last, FinishedEvent)
            and last.generated_tokens >= len(tokens)
        )


def live(count: int, seed: int) -> PromptPart:
    """A live part of random tokens."""
    return PromptPart(draw_ids(count, seed))


def segment(key: bytes, token_ids: tuple[int, ...]) -> PromptPart:
    """A part to be served from a stored state."""
    return PromptPart(token_ids, Serving.SEGMENT, key)


def cold(key: bytes, token_ids: tuple[int, ...]) -> PromptPart:
    """A part to be served from a stored state, which is captured where there is none."""
    return PromptPart(token_ids, Serving.SEGMENT, key, captures=True)


def fetched(key: bytes, token_ids: tuple[int, ...]) -> PromptPart:
    """A part to be served from a stored state, which is brought from elsewhere where there is none."""
    return PromptPart(token_ids, Serving.SEGMENT, key, is_fetched=True)


@dataclass(slots=True)
class Elsewhere:
    """An engine that holds what another one fetches. layers: of every segment, its planes, by key."""

    layers: dict[bytes, list[Mapping[str, torch.Tensor]]]

    @classmethod
    def capture(cls, rig: "EngineRig", segments: Mapping[bytes, tuple[int, ...]]) -> "Elsewhere":
        """Capture segments with an engine that is needed for nothing else; those without a body never come."""
        rig.capture(*(CaptureSegment(key, ids) for key, ids in segments.items()))
        layers: dict[bytes, list[Mapping[str, torch.Tensor]]] = {}
        for key in segments:
            state = rig.context.store.get(key)
            if not isinstance(state, SegmentState):
                continue
            outgoing = OutgoingState(rig.context, state)
            layers[key] = [outgoing.read_layer(layer) for layer in range(len(outgoing.layers))]
            outgoing.close()
        return cls(layers)

    def bring(self, event: FetchEvent, layers: int) -> None:
        """The next layers of a state, as far as there are more."""
        first = event.incoming.layers_present
        for layer, planes in list(enumerate(self.layers.get(event.key, ())))[first : first + layers]:
            event.incoming.write_layer(layer, planes)


class EngineRig:
    """Submits, steps with integrity checks, and keeps what was heard."""

    def __init__(self, context: EngineContext, limits: EngineLimits | None = None) -> None:
        self.engine = Engine(context, limits or EngineLimits(1024))
        self.context = context
        self._spare_pages = context.pages.num_free

    def submit(
        self,
        name: str,
        *parts: PromptPart,
        max_tokens: int = 4,
        prefix_key: bytes = b"",
        snapshots: tuple[SnapshotOrder, ...] = (),
        refresh: RefreshOrder | None = None,
    ) -> Heard:
        """Put a greedy request in the line, which is told log probabilities."""
        heard = Heard()
        sampling = SamplingOptions(max_tokens, logprobs=20)
        request = GenerateRequest(name, parts, sampling, heard.events.append, prefix_key, snapshots, refresh=refresh)
        self.engine.submit(request)
        return heard

    def submit_capture(self, name: str, *segments: CaptureSegment, background: bool = False) -> list[CaptureEvent]:
        """Put segments in the line; the list fills with their events."""
        events: list[CaptureEvent] = []
        self.engine.submit_capture(CaptureJob(name, segments, events.append, background))
        return events

    def capture(self, *segments: CaptureSegment) -> list[CaptureEvent]:
        """Capture segments to the end."""
        events = self.submit_capture("capture", *segments)
        self.run()
        return events

    def step(self) -> None:
        """One step, after which everything must add up."""
        self.engine.step()
        self.engine.check_integrity()

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError(f"the engine still has work after {max_steps} steps")

    def drop_all(self, keys: Iterable[bytes]) -> None:
        """Drop stored states, there or not."""
        for key in keys:
            self.context.store.drop(key)

    def assert_nothing_held(self) -> None:
        """Apart from the prime, every page and slot is free again."""
        self.engine.check_integrity()
        assert self.context.pages.num_free == self._spare_pages
        assert self.context.slots.num_free == self.context.slots.num_slots
        assert self.context.store.used_bytes == 0


def create_profile(prime_tokens: int = 5, window: SeamWindow | None = None) -> CaptureProfile:
    """The profile of engine tests: small chunks, so that captures take several; a fixed window unless another is asked for."""
    return CaptureProfile(window or SeamWindow(WINDOW), draw_ids(prime_tokens, 77), chunk_tokens=32)
