"""The guard as a decorator round the router: tags that lose too much are answered exactly, and a share is looked at again."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from services.common.errors import UnavailableError
from services.router.domain.explain import Explanation
from services.router.domain.parts import PartKind, Reason
from services.router.domain.request import GenerationRequest, Reuse
from services.router.guard import ModelVersion, QualityGuard
from services.router.reply import Done, ReplyEvent
from services.router.served_model import Models
from services.router.shadows import Shadows, ShadowSubject, composes

__all__ = ["GuardedRouter"]


class GuardedRouter:
    """Passes every event on at once; what is sampled is looked at behind the reply."""

    def __init__(
        self,
        answer: Callable[[GenerationRequest], AsyncGenerator[ReplyEvent]],
        models: Models,
        guard: QualityGuard,
        shadows: Shadows,
    ) -> None:
        self._answer = answer
        self._models = models
        self._guard = guard
        self._shadows = shadows

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply, of a request that composes nothing where its tag may not.

        Raises:
            PromptError: the request can never be served.
            HypicError: see `Router`.
        """
        tag = self._guard.tag_of(request.options.tag, request.namespace.tenant)
        self._follow()
        would_compose = request.options.reuse is Reuse.COMPOSE
        is_switched = would_compose and self._guard.is_exact(tag)
        async with aclosing(self._answer(_exactly(request) if is_switched else request)) as events:
            async for event in events:
                if would_compose and isinstance(event, Done):
                    event = replace(event, explanation=_say_why(event.explanation)) if is_switched else event
                    if self._is_worth_a_look(event.explanation) and self._guard.takes(tag):
                        self._shadows.add(ShadowSubject(request, tag, self._guard.version))
                yield event

    def _follow(self) -> None:
        try:
            self._guard.follow(ModelVersion.of(self._models.require().info))
        except UnavailableError:
            # The request waits for a worker, or fails, further in.
            return

    @staticmethod
    def _is_worth_a_look(explanation: Explanation) -> bool:
        return composes(explanation) or any(part.reason is Reason.QUALITY_GUARD for part in explanation.parts)


def _exactly(request: GenerationRequest) -> GenerationRequest:
    return replace(request, options=replace(request.options, reuse=Reuse.EXACT))


def _say_why(explanation: Explanation) -> Explanation:
    """The client did not ask for what it got."""
    parts = tuple(
        replace(part, reason=Reason.QUALITY_GUARD)
        if part.kind is PartKind.SEGMENT and part.reason == Reason.REUSE_EXACT
        else part
        for part in explanation.parts
    )
    return replace(explanation, parts=parts)
