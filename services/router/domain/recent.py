"""The requests that were answered last, for an administrator's eyes: counts, times and ids, and no text."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.router.domain.explain import Explanation, PartExplanation, Seconds, Usage

__all__ = ["RecentRequests", "RequestRecord", "RequestSubject"]

# A strip of more parts than this could not be read.
_MAX_PARTS = 256


@dataclass(frozen=True, slots=True)
class RequestSubject:
    """Whose request it was, under the id that the client has seen."""

    request_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that has ended, `ended_at` seconds since the Unix epoch. outcome: how its reply ended, or an error's code.

    parts: the first ones; `num_more_parts` are left out. What stands behind `has_failed` is there where it has not.
    """

    subject: RequestSubject
    ended_at: float
    outcome: str
    has_failed: bool = False
    worker: str = ""
    usage: Usage | None = None
    stages: Seconds | None = None
    parts: tuple[PartExplanation, ...] = ()
    num_more_parts: int = 0


class RecentRequests:
    """The last so many; 0 keeps none."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.time) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=capacity)
        self._clock = clock

    def newest_first(self) -> tuple[RequestRecord, ...]:
        """What is kept."""
        return tuple(reversed(self._records))

    def add_answered(self, subject: RequestSubject, reason: str, usage: Usage, explanation: Explanation) -> None:
        """A reply has ended well."""
        self._records.append(
            RequestRecord(
                subject=subject,
                ended_at=self._clock(),
                outcome=reason,
                worker=explanation.placing.worker,
                usage=usage,
                stages=explanation.seconds,
                parts=tuple(map(_without_text, explanation.parts[:_MAX_PARTS])),
                num_more_parts=max(0, len(explanation.parts) - _MAX_PARTS),
            )
        )

    def add_failed(self, subject: RequestSubject, code: str) -> None:
        """A request has failed, before or inside its reply."""
        self._records.append(RequestRecord(subject, self._clock(), code, has_failed=True))


def _without_text(part: PartExplanation) -> PartExplanation:
    if not part.title:
        return part
    # Written out: `replace` takes several times as long, for each part of each request.
    return PartExplanation(
        part.kind,
        part.document_id,
        "",
        part.tokens,
        part.planned,
        part.served,
        part.live_tokens,
        part.captured_tokens,
        part.reused_tokens,
        part.tier,
        part.reason,
        part.capture,
        part.fetch,
        part.refreshed_tokens,
    )
