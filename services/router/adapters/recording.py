"""Keeps the last requests as a decorator round the router."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.common.telemetry import current_request_id
from services.router.adapters.http_errors import http_error
from services.router.adapters.metrics import Generator
from services.router.domain.recent import RecentRequests, RequestSubject
from services.router.domain.request import GenerationRequest
from services.router.reply import Done, ReplyEvent

__all__ = ["RecordingRouter"]


class RecordingRouter:
    """Passes everything on, and notes how it ended."""

    def __init__(self, inner: Generator, recent: RecentRequests) -> None:
        self._inner = inner
        self._recent = recent

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply."""
        subject = RequestSubject(current_request_id(), request.namespace.tenant)
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        self._recent.add_answered(subject, event.reason.value, event.usage, event.explanation)
                    yield event
        except Exception as error:
            self._recent.add_failed(subject, http_error(error).code or "unknown")
            raise
