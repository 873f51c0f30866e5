"""The stages of one `Generate` as spans below the call's own."""

import time

from services.common.tracing import add_span
from services.worker.engine.requests import FinishedEvent, GenerateEvent, PrefilledEvent

__all__ = ["StageSpans"]


class StageSpans:
    """Made when the request is submitted; hears of the engine's events."""

    def __init__(self) -> None:
        self._stage_began = time.time_ns()

    def note(self, event: GenerateEvent) -> None:
        """Only the ends of stages count."""
        if isinstance(event, PrefilledEvent):
            now = time.time_ns()
            admitted = min(self._stage_began + round(event.queue_seconds * 1e9), now)
            add_span("queue", self._stage_began, admitted)
            tokens = {
                "hypic.live_tokens": sum(part.live_tokens for part in event.parts),
                "hypic.captured_tokens": sum(part.captured_tokens for part in event.parts),
                "hypic.reused_tokens": sum(part.reused_tokens for part in event.parts),
                "hypic.fetch_seconds": event.fetch_seconds,
            }
            add_span("combine", admitted, now, tokens)
            self._stage_began = now
        elif isinstance(event, FinishedEvent):
            add_span("decode", self._stage_began, time.time_ns(), {"hypic.generated_tokens": event.generated_tokens})
