"""The tables of attributes and sentences, read from the TOML files beside this module."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
KINDS = ("person", "place", "organisation", "device")


@dataclass(frozen=True, slots=True)
class Attribute:
    """How one attribute is valued, stated and asked for; empty fields mean "cannot"."""

    key: str
    value: str
    say: tuple[str, ...]
    ask: tuple[str, ...]
    reply: str = ""
    noun: str = ""
    compare: tuple[str, ...] = ()
    wins: str = ""


@dataclass(frozen=True, slots=True)
class Prose:
    """Word lists by value name and sentences by kind."""

    values: Mapping[str, tuple[str, ...]]
    pronoun: Mapping[str, tuple[str, ...]]
    filler: Mapping[str, tuple[str, ...]]
    titles: Mapping[str, tuple[str, ...]]
    system: Mapping[str, tuple[str, ...]]
    define: tuple[str, ...]


def _attribute(key: str, row: Mapping[str, Any]) -> Attribute:
    return Attribute(
        key=key,
        value=row.get("value", ""),
        say=tuple(row["say"]),
        ask=tuple(row["ask"]),
        reply=row.get("reply", ""),
        noun=row.get("noun", ""),
        compare=tuple(row.get("compare", ())),
        wins=row.get("wins", ""),
    )


def _attributes(table: Mapping[str, Any]) -> dict[str, Attribute]:
    return {key: _attribute(key, row) for key, row in table.items()}


def _lists(table: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {key: tuple(values) for key, values in table.items()}


_SCHEMA = tomllib.loads((_HERE / "schema.toml").read_text())
_PROSE = tomllib.loads((_HERE / "prose.toml").read_text())

ATTRIBUTES: Mapping[str, Mapping[str, Attribute]] = {kind: _attributes(_SCHEMA[kind]) for kind in KINDS}
NOTES: Mapping[str, Attribute] = _attributes(_PROSE["note"])
REGISTERS: Mapping[str, Attribute] = _attributes(_PROSE["register"])
CLASS = _attribute("class", _PROSE["class"])
PROSE = Prose(
    values=_lists(_PROSE["values"]),
    pronoun=_lists(_PROSE["pronoun"]),
    filler=_lists(_PROSE["filler"]),
    titles=_lists(_PROSE["titles"]),
    system=_lists(_PROSE["system"]),
    define=tuple(_PROSE["class"]["define"]),
)
