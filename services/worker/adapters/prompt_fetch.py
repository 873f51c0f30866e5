"""What fetching did for one prompt, told with its prefill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from services.worker.adapters.transfers import Fetched
from services.worker.engine.admission import ARRIVING_TIER
from services.worker.engine.requests import GenerateRequest, PrefilledEvent, PromptPart, ServedPart, Serving

__all__ = ["PromptFetch"]


@dataclass(frozen=True, slots=True)
class PromptFetch:
    """planned: of states that could be brought from elsewhere, why each is not to be; empty where it is."""

    planned: Mapping[bytes, str]

    def mark(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the parts marked whose states are to be brought."""
        return replace(request, parts=tuple(self._mark(part) for part in request.parts))

    def complete(
        self, event: PrefilledEvent, request: GenerateRequest, describe: Callable[[bytes], Fetched | None]
    ) -> PrefilledEvent:
        """The event with whence states came, and the reasons why others did not."""
        keys = [part.key for part in request.parts]
        parts = tuple(self._complete(part, key, describe) for part, key in zip(event.parts, keys, strict=True))
        return replace(event, parts=parts)

    def _mark(self, part: PromptPart) -> PromptPart:
        is_fetched = part.serving is Serving.SEGMENT and self.planned.get(part.key) == ""
        return replace(part, is_fetched=is_fetched)

    def _complete(self, part: ServedPart, key: bytes, describe: Callable[[bytes], Fetched | None]) -> ServedPart:
        if part.tier == ARRIVING_TIER:
            fetched = describe(key) or Fetched()
            return replace(part, tier=fetched.tier, source=fetched.source, fetch_seconds=fetched.seconds)
        if part.serving is Serving.LIVE and part.reason and self.planned.get(key):
            return replace(part, reason=self.planned[key])
        return part
