"""Transfers between virtual workers: each has one way out and one way in, whose rate is shared by what is on it."""

from dataclasses import dataclass, field

from services.router.domain.workers import TransferSpeed

__all__ = ["Link", "Window", "transfer"]


@dataclass(frozen=True, slots=True)
class Window:
    """When the first and the last layer of a state are there, in seconds of the simulation; layers between them evenly."""

    first: float
    last: float


@dataclass(slots=True)
class _Way:
    """One direction. free_at: when all that was sent could be through; ends: of transfers that are on it."""

    free_at: float = 0.0
    ends: list[float] = field(default_factory=list)

    def num_active(self, now: float) -> int:
        """Transfers that share it."""
        self.ends = [end for end in self.ends if end > now]
        return len(self.ends)


@dataclass(slots=True)
class Link:
    """A worker's two ways."""

    out: _Way = field(default_factory=_Way)
    into: _Way = field(default_factory=_Way)


def transfer(source: Link, target: Link, speed: TransferSpeed, computed: Window, num_bytes: int) -> Window:
    """Send a state, in one piece when it is whole, or layer by layer as it is computed.

    Whole states go one after the other. Layers of several states share the way; what waits for a layer leaves it to others.
    """
    ways = source.out, target.into
    sending = num_bytes / speed.bytes_per_second
    is_streamed = speed.num_pieces > 1
    ready = computed.first if is_streamed else computed.last
    through = max(ready, *(way.free_at for way in ways)) + sending
    first = last = through
    if is_streamed:
        piece = sending / speed.num_pieces * (1 + max(way.num_active(ready) for way in ways))
        last = max(through, computed.last + piece)
        first = min(ready + piece, last)
    for way in ways:
        way.free_at = through
        way.ends.append(last)
    return Window(first + speed.latency_seconds, last + speed.latency_seconds)
