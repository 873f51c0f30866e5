"""A model's layers in words: what kinds there are, how often, in which order."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from services.worker.models.spec import ModelSpec

__all__ = ["BlockGroup", "feed_forward_groups", "mixer_groups", "mixer_pattern"]


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks of one shape: what they are, how many layers have one, and the shape's fields."""

    kind: str
    num_layers: int
    shape: Mapping[str, int | float | str]


def mixer_groups(spec: ModelSpec) -> tuple[BlockGroup, ...]:
    """The token mixers."""
    return _groups(layer.mixer for layer in spec.layers)


def feed_forward_groups(spec: ModelSpec) -> tuple[BlockGroup, ...]:
    """The feed-forward blocks."""
    return _groups(layer.feed_forward for layer in spec.layers)


def mixer_pattern(spec: ModelSpec) -> str:
    """Kinds of token mixers in order: `3 × gated delta, 1 × grouped attention; 6 times`."""
    kinds = [_kind(layer.mixer) for layer in spec.layers]
    period = next(size for size in range(1, len(kinds) + 1) if _repeats(kinds, size))
    unit = ", ".join(f"{len(list(run))} × {kind}" for kind, run in groupby(kinds[:period]))
    repetitions = len(kinds) // period
    return unit if repetitions == 1 else f"{unit}; {repetitions} times"


def _repeats(kinds: Sequence[str], size: int) -> bool:
    return len(kinds) % size == 0 and list(kinds[:size]) * (len(kinds) // size) == list(kinds)


def _groups(shapes: Iterable[object]) -> tuple[BlockGroup, ...]:
    """Fields that are lists, such as a layer's own decays, do not tell blocks apart."""
    counted = Counter((_kind(shape), tuple(_scalars(asdict(shape)))) for shape in shapes)  # type: ignore[call-overload] # every shape is a dataclass
    return tuple(BlockGroup(kind, number, dict(fields)) for (kind, fields), number in counted.items())


def _kind(shape: object) -> str:
    """`GatedDeltaShape` is a gated delta."""
    words = re.findall(r"[A-Z][a-z]*", type(shape).__name__.removesuffix("Shape"))
    return " ".join(words).lower()


def _scalars(fields: Mapping[str, Any]) -> Iterable[tuple[str, int | float | str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _scalars(value)
        elif isinstance(value, int | float | str):
            yield name, value
