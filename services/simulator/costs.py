"""What work takes on one kind of worker with one model, as measured: the file, and the speeds that a router would know.

Sweeps follow the measured curve; the router's estimates are lines, as a router fits them to what it has seen.
"""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from services.router.domain.workers import CaptureSpeed, CombineSpeed, TransferSpeed, WorkerSpeeds
from services.simulator.errors import CostsError

__all__ = ["SHIPPED", "CaptureCosts", "CombineCosts", "Costs", "Curve", "StateCosts", "WayCosts", "read_costs"]

SHIPPED = Path(__file__).parent / "shipped"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by tokens: lines between measured points. Below the first one as there, beyond the last as the last line."""

    points: tuple[tuple[float, float], ...]

    def seconds(self, num_tokens: float) -> float:
        """Of a pass of so many tokens; 0 for none."""
        points = self.points
        if num_tokens <= points[0][0]:
            return points[0][1] if num_tokens else 0.0
        after = min(bisect_left(points, (num_tokens,)), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return low + (high - low) * (num_tokens - left) / (right - left)

    def line(self, upto: float) -> tuple[float, float]:
        """Seconds of a pass and of a token: least squares over the points up to so many tokens and the curve there."""
        known = [point for point in self.points if point[0] < upto] + [(upto, self.seconds(upto))]
        tokens, seconds = zip(*known, strict=True)
        middle, level = sum(tokens) / len(known), sum(seconds) / len(known)
        spread = sum((one - middle) ** 2 for one in tokens)
        slope = sum((one - middle) * (two - level) for one, two in known) / spread if spread else level / middle
        slope = min(max(slope, 0.0), level / middle)
        return level - slope * middle, slope


@dataclass(frozen=True, slots=True)
class CaptureCosts:
    """points: tokens of one pass and its seconds; pass_tokens: segments share a pass up to so many tokens; chunk_tokens: of
    one segment in one pass.
    """

    points: tuple[tuple[float, float], ...]
    pass_tokens: int
    chunk_tokens: int

    @property
    def curve(self) -> Curve:
        """The measured passes."""
        return Curve(self.points)


@dataclass(frozen=True, slots=True)
class CombineCosts:
    """Seconds of a pass, of each composed segment and of each live token; prompts share a pass up to sweep_tokens live ones."""

    pass_seconds: float
    segment_seconds: float
    token_seconds: float
    sweep_tokens: int


@dataclass(frozen=True, slots=True)
class StateCosts:
    """Bytes of a segment state, and of each token of its body; segments shorter than min_tokens are not composed.

    The seam window is a profile's: `min(max(seam_window, seam_share × length), seam_window_max)`.
    """

    segment_bytes: int
    token_bytes: int
    seam_window: int
    seam_share: float
    seam_window_max: int
    min_tokens: int

    def seam(self, num_tokens: int) -> int:
        """Live tokens of a composed segment."""
        return min(max(self.seam_window, math.ceil(self.seam_share * num_tokens)), self.seam_window_max)

    def size_bytes(self, num_tokens: int) -> int:
        """Of a segment's state."""
        return self.segment_bytes + self.token_bytes * max(num_tokens - self.seam(num_tokens), 0)


@dataclass(frozen=True, slots=True)
class WayCosts:
    """Of a state from one worker to another."""

    latency_seconds: float
    bytes_per_second: float

    def speed(self, num_pieces: int) -> TransferSpeed:
        """As the router knows it."""
        return TransferSpeed(self.latency_seconds, self.bytes_per_second, num_pieces)


@dataclass(frozen=True, slots=True)
class Costs:
    """One kind of worker. layers: pieces in which a state may travel; source: where the figures come from."""

    name: str
    source: str
    layers: int
    workers_per_host: int
    capture: CaptureCosts
    combine: CombineCosts
    state: StateCosts
    same_host: WayCosts
    other_host: WayCosts

    def capture_seconds(self, num_tokens: int) -> float:
        """Of one segment that is captured alone, chunk by chunk."""
        whole, rest = divmod(num_tokens, self.capture.chunk_tokens)
        curve = self.capture.curve
        return whole * curve.seconds(self.capture.chunk_tokens) + curve.seconds(rest)

    def combine_seconds(self, num_segments: int, live_tokens: int) -> float:
        """Of one prompt alone."""
        own = num_segments * self.combine.segment_seconds + live_tokens * self.combine.token_seconds
        return self.combine.pass_seconds + own

    def speeds(self, is_pipelined: bool) -> WorkerSpeeds:
        """What a router would have measured of such a worker."""
        pass_seconds, token_seconds = self.capture.curve.line(self.capture.pass_tokens)
        pieces = self.layers if is_pipelined else 1
        return WorkerSpeeds(
            CaptureSpeed(pass_seconds, token_seconds, self.capture.pass_tokens),
            CombineSpeed(self.combine.pass_seconds, self.combine.segment_seconds, self.combine.token_seconds),
            same_host=self.same_host.speed(pieces),
            other_host=self.other_host.speed(pieces),
        )


def read_costs(path: Path, changes: Sequence[str] = ()) -> Costs:
    """The costs of a file, with `section.name=number` in place of what it says.

    Raises:
        CostsError: the file or a change is none.
    """
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise CostsError(f"{path}: {error.strerror or error}; shipped ones are {', '.join(shipped_names())}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CostsError(f"{path}: is no TOML: {error}") from error
    for change in changes:
        _apply(content, change)
    return _build(Costs, content, str(path), "")


def shipped_names() -> list[str]:
    """Names of the files that come along."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def _apply(content: dict[str, Any], change: str) -> None:
    name, _, number = change.partition("=")
    *sections, field = name.split(".")
    place: Any = content
    for section in sections:
        place = place.get(section) if isinstance(place, dict) else None
    if not isinstance(place, dict) or not isinstance(place.get(field), int | float):
        raise CostsError(f"--cost {change!r}: the file has no number {name!r}; write section.name=number")
    try:
        place[field] = type(place[field])(number)
    except ValueError as error:
        raise CostsError(f"--cost {change!r}: {number!r} is no {type(place[field]).__name__}") from error


def _build(kind: type[_T], content: Mapping[str, Any], path: str, within: str) -> _T:
    """A dataclass of plain fields and further ones."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type] # kinds are dataclasses
    if unknown := sorted(set(content) - set(names)):
        raise CostsError(f"{path}: {within}{unknown[0]} is unknown; {within or 'the file'} has {', '.join(names)}")
    values: dict[str, Any] = {}
    for name in names:
        if name not in content:
            raise CostsError(f"{path}: {within}{name} is missing; the shipped files show what it means")
        values[name] = _value(hints[name], content[name], path, f"{within}{name}")
    return kind(**values)


def _value(kind: Any, found: Any, path: str, name: str) -> Any:  # noqa: ANN401 # any field's value
    if is_dataclass(kind):
        if not isinstance(found, dict):
            raise CostsError(f"{path}: {name} must be a section [{name}]")
        return _build(kind, found, path, f"{name}.")  # type: ignore[arg-type] # a class, not an instance
    if kind is str and isinstance(found, str):
        return found
    if kind is int and isinstance(found, int) and not isinstance(found, bool):
        least = 0 if name.startswith("state.") else 1
        if found >= least:
            return found
        raise CostsError(f"{path}: {name} is {found}; it must be at least {least}")
    if kind is float and _is_number(found):
        if found > 0 or (found == 0 and name.endswith(("_seconds", "_share"))):
            return float(found)
        raise CostsError(f"{path}: {name} is {found}; it must be positive")
    if kind not in (str, int, float):
        return _points(found, path, name)
    raise CostsError(f"{path}: {name} is {found!r}; it must be a {kind.__name__}")


def _points(found: Any, path: str, name: str) -> tuple[tuple[float, float], ...]:  # noqa: ANN401
    is_list = isinstance(found, list) and all(isinstance(one, list) and len(one) == 2 for one in found)
    if not is_list or len(found) < 2 or not all(_is_number(number) and number > 0 for one in found for number in one):
        raise CostsError(f"{path}: {name} must be at least two pairs [tokens, seconds] of positive numbers")
    points = tuple((float(tokens), float(seconds)) for tokens, seconds in found)
    for before, after in pairwise(points):
        if before[0] >= after[0] or before[1] > after[1]:
            raise CostsError(f"{path}: {name} must rise in tokens and not fall in seconds; see {list(after)}")
    return points


def _is_number(found: Any) -> bool:  # noqa: ANN401
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
