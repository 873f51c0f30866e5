"""What a request's span says of the model's work, by OpenTelemetry's names for generative models."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from opentelemetry.trace import Span

from services.common.tracing import current_span
from services.router.adapters.metrics import Generator
from services.router.domain.request import ChatPrompt, GenerationRequest
from services.router.reply import Done, ReplyEvent, Started

__all__ = ["TracedRouter"]


class TracedRouter:
    """Passes everything on; the span is the one that the HTTP request began."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply."""
        span = current_span()
        return self._describe(request, span) if span.is_recording() else self._inner.generate(request)

    async def _describe(self, request: GenerationRequest, span: Span) -> AsyncGenerator[ReplyEvent]:
        is_chat = isinstance(request.prompt, ChatPrompt)
        span.set_attribute("gen_ai.operation.name", "chat" if is_chat else "text_completion")
        span.set_attribute("gen_ai.request.model", request.model)
        async with aclosing(self._inner.generate(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    span.add_event("first_token")
                elif isinstance(event, Done):
                    span.set_attribute("gen_ai.usage.input_tokens", event.usage.prompt_tokens)
                    span.set_attribute("gen_ai.usage.output_tokens", event.usage.completion_tokens)
                    span.set_attribute("gen_ai.usage.cache_read.input_tokens", event.usage.cached_tokens)
                    span.set_attribute("gen_ai.response.finish_reasons", [event.reason.value])
                yield event
