"""What became of many requests."""

import json
from collections import Counter
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from bench.results import Row

__all__ = ["Tally", "check_envelope"]

_FIELDS: dict[str, tuple[type, ...]] = {
    "message": (str,),
    "type": (str,),
    "param": (str, type(None)),
    "code": (str, type(None)),
}
_KEPT = 5


def check_envelope(body: object) -> bool:
    """Whether this is OpenAI's error object, or Anthropic's."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return False
    if isinstance(body, dict) and body.get("type") == "error":
        return all(isinstance(error.get(name), str) for name in ("type", "message"))
    return set(error) == set(_FIELDS) and all(isinstance(error[name], kind) for name, kind in _FIELDS.items())


@dataclass(slots=True)
class Tally:
    """Counts of answers; faults keep a few requests of each kind. Safe to use from several threads."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def take(self, status: int, content: bytes, request: str) -> None:
        """An answer, and the request as a person would repeat it."""
        with self._lock:
            self.statuses[status] += 1
        if status >= 500:
            self.add_fault("5xx", f"{status} {request}")
        if status >= 400 and not check_envelope(_json(content)):
            self.add_fault("outside the envelope", f"{status} {content[:200]!r} {request}")

    def add_fault(self, kind: str, request: str) -> None:
        """Something that must not be."""
        with self._lock:
            self.faults[kind] += 1
            kept = self.examples.setdefault(kind, [])
            if len(kept) < _KEPT:
                kept.append(request)

    def rows(self) -> list[Row]:
        """Figures for a result file."""
        total = sum(self.statuses.values()) + self.faults["hang"]
        kinds = (
            ("answers with 5xx", "5xx"),
            ("answers that did not come in 60 s", "hang"),
            ("errors outside the envelope", "outside the envelope"),
            ("answers that the OpenAPI document does not describe", "not described"),
        )
        return [
            Row("requests sent", total, "requests", 10_000),
            Row("of them served", self.statuses[200], "requests"),
            *(Row(measure, self.faults[kind], "answers", 0, "lower") for measure, kind in kinds),
        ]


def _json(content: bytes) -> Any:  # noqa: ANN401 # JSON
    try:
        return json.loads(content)
    except ValueError:
        return None
