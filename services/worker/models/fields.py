"""Typed access to a `config.json`, with errors that name the field."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.worker.models.errors import CheckpointError

__all__ = ["ConfigFields", "RecordedConfig"]

# What is written into messages and tensors fits an int32; what is looped over ends soon.
_LARGEST, _MOST_COUNTED = (1 << 31) - 1, 10_000


class RecordedConfig(Mapping[str, Any]):
    """A config that notes which of its fields were looked at, in sections inside it too, as dotted names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._sections = {name: RecordedConfig(value) for name, value in config.items() if isinstance(value, Mapping)}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 # any JSON value
        value = self._config[name]
        self._read.add(name)
        return self._sections.get(name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def unread(self) -> list[str]:
        """Fields that nobody looked at; of a section that was looked at, those inside it."""
        names: list[str] = []
        for name in self._config:
            if name not in self._read:
                names.append(name)
            elif name in self._sections:
                names += [f"{name}.{inner}" for inner in self._sections[name].unread()]
        return names


class ConfigFields:
    """The fields of a config, or of one of its sections."""

    def __init__(self, config: Mapping[str, Any], section: str = "") -> None:
        self._config = config
        self._section = f"{section}." if section else ""

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._config.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, not {value!r}")
        return self._at_most(name, value, _LARGEST)

    def few(self, name: str) -> int:
        """A positive integer that counts layers, heads or experts.

        Raises:
            CheckpointError: it is missing, something else, or more than any model has.
        """
        return self._at_most(name, self.integer(name), _MOST_COUNTED)

    def count(self, name: str) -> int:
        """An integer that may be 0.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self._config.get(name)
        if value == 0 and not isinstance(value, bool):
            return 0
        return self.integer(name)

    def optional_integer(self, name: str) -> int | None:
        """A positive integer, None where it is missing or null.

        Raises:
            CheckpointError: it is something else.
        """
        return None if self._config.get(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; JSON files may hold others.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        value = self._config.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
            raise self.error(name, f"must be a finite number, not {value!r}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            CheckpointError: it is missing without a default, or something else.
        """
        value = self.number(name, default)
        if value <= 0.0:
            raise self.error(name, f"must be positive, not {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def section(self, name: str) -> "ConfigFields":
        """An object inside; empty where it is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._config.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {value!r}")
        return ConfigFields(value or {}, self._section + name)

    def rope(self) -> "ConfigFields":
        """The section `rope_parameters`, or `rope_scaling`, its name before transformers 5; empty without either.

        Raises:
            CheckpointError: it is no object.
        """
        return self.section("rope_parameters" if self.has("rope_parameters") else "rope_scaling")

    def layers(self, name: str, count: int) -> frozenset[int]:
        """Indices of some of `count` layers; none where the field is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._config.get(name) or []
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < count for item in value):
            raise self.error(name, f"must list indices of the {count} layers, not {value!r}")
        return frozenset(value)

    def names(self, name: str, length: int) -> list[str] | None:
        """A list of `length` strings, None where it is missing.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            raise self.error(name, f"must list {length} layers")
        return [str(item) for item in value]

    def integers(self, name: str) -> list[int]:
        """A list of integers.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self._config.get(name)
        if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            raise self.error(name, f"must be a list of integers, not {value!r}")
        return value

    def choice(self, name: str, supported: Sequence[Any], default: Any, remedy: str = "") -> Any:  # noqa: ANN401 # any JSON value
        """One of the supported values; the remedy ends the error's line.

        Raises:
            CheckpointError: it is another.
        """
        value = self._config.get(name, default)
        value = default if value is None else value
        if value not in supported:
            known = " or ".join(repr(item) for item in supported)
            raise self.error(name, f"is {value!r}, which is not supported; {known} is{remedy and '; '}{remedy}")
        return value

    def check_groups(self, heads: str, shared_heads: str) -> None:
        """Every shared head serves the same number of heads; without the second field every head stands alone.

        Raises:
            CheckpointError: it does not.
        """
        if self.few(heads) % self.integer(shared_heads, self.integer(heads)):
            raise self.error(heads, f"must be a multiple of {shared_heads}")

    def _at_most(self, name: str, value: int, most: int) -> int:
        if value > most:
            raise self.error(name, f"must be at most {most}, not {value}; download config.json again")
        return value

    def error(self, name: str, fault: str) -> CheckpointError:
        """An error that names a field."""
        return CheckpointError(f"config.json: {self._section}{name} {fault}")
