"""What fetching did for one prompt, told with its prefill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.worker.adapters.tiered_states import Fetched
from services.worker.engine.requests import PrefilledEvent, ServedPart, Serving

__all__ = ["PromptFetch"]


@dataclass(frozen=True, slots=True)
class PromptFetch:
    """parts: for every part of the request what became of its state, None where it was not to be fetched; seconds: in all;
    from_workers: by key, what came from other workers.
    """

    parts: Sequence[Fetched | None]
    seconds: float
    from_workers: Mapping[bytes, Fetched]

    def complete(self, event: PrefilledEvent) -> PrefilledEvent:
        """The event with the tiers that states came from, and the reasons why others did not."""
        parts = tuple(_complete(*own) for own in zip(event.parts, self.parts, strict=True))
        return replace(event, parts=parts)


def _complete(part: ServedPart, fetched: Fetched | None) -> ServedPart:
    if fetched is None:
        return part
    if part.serving is Serving.SEGMENT:
        # Behind a fetch that failed, a capture may have stored it after all.
        return replace(part, tier=fetched.tier or part.tier, source=fetched.source, fetch_seconds=fetched.seconds)
    return replace(part, reason=fetched.reason or part.reason)
