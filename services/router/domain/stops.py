"""Stop strings in a stream of text."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopFilter", "StopResult"]


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown, and the stop string that was met right after it; empty where none was."""

    text: str
    stop: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether the reply ends here."""
        return bool(self.stop)


class StopFilter:
    """Holds text back while it may be the beginning of a stop string, so that no part of one is shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Add text; the earliest stop string in it ends the reply."""
        held = self._held + text
        found = [(at, stop) for at, stop in ((held.find(stop), stop) for stop in self._stops) if at >= 0]
        if found:
            at, stop = min(found)
            self._held = ""
            return StopResult(held[:at], stop)
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return StopResult(held[: len(held) - keep])

    def flush(self) -> str:
        """What is still held back when the reply ends otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
