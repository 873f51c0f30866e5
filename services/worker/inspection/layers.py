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
    """Kinds of token mixers in order: `6 times (3 × gated delta, 1 × grouped attention), then 1 × gated delta`."""
    kinds = [_kind(layer.mixer) for layer in spec.layers]
    return min((_as_repeated(kinds, size) for size in range(1, len(kinds) + 1)), key=len)


def _as_repeated(kinds: Sequence[str], size: int) -> str:
    """The first `size` kinds as often as they repeat, then the rest."""
    times = 1
    while kinds[size * times : size * (times + 1)] == kinds[:size]:
        times += 1
    repeated, rest = kinds[: size * times], kinds[size * times :]
    has_unit = times > 1 and len(set(repeated)) > 1
    words = f"{times} times ({_runs(kinds[:size])})" if has_unit else _runs(repeated)
    return f"{words}, then {_runs(rest)}" if rest else words


def _runs(kinds: Sequence[str]) -> str:
    return ", ".join(f"{len(list(run))} × {kind}" for kind, run in groupby(kinds))


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
