"""Writes costs as the file that `hypic simulate` reads."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from services.simulator.costs import Costs

__all__ = ["costs_text", "write_costs"]


def costs_text(costs: Costs) -> str:
    """TOML; floats with six digits."""
    return "\n".join(_lines(costs)) + "\n"


def write_costs(path: Path, costs: Costs) -> None:
    """Write the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(costs_text(costs))


def _lines(costs: Costs) -> Iterator[str]:
    sections = []
    for field in fields(costs):
        value = getattr(costs, field.name)
        if is_dataclass(value):
            sections.append((field.name, value))
        else:
            yield f"{field.name} = {_number(value)}"
    for name, section in sections:
        yield f"\n[{name}]"
        for field in fields(section):
            yield f"{field.name} = {_number(getattr(section, field.name))}"


def _number(value: Any) -> str:  # noqa: ANN401 # a field of costs
    if isinstance(value, tuple):
        return "[" + ", ".join(_number(one) if isinstance(one, tuple) else f"{one:.6g}" for one in value) + "]"
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    return json.dumps(value, ensure_ascii=False)
