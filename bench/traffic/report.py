"""What was measured, as rows, as files and as a table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from bench.results import Row, merge_results
from bench.traffic.bodies import Mode
from bench.traffic.levels import Level
from bench.traffic.measure import CellResult
from bench.traffic.search import Bracket

__all__ = ["Origin", "rows_of", "table_of", "write_files"]

# Of the mean over workloads with long segments at a promise of a second, and of peak tokens a second.
_REACH_RATE, _REACH_TOKENS = 2.0, 1.5
_AIMED_PROMISE = 1.0

Origin = tuple[str, str]


def write_files(folder: Path, origin: Origin, results: Sequence[CellResult], facts: Mapping[str, Any]) -> None:
    """traffic.json: rows, a subject a workload; levels.json: all levels; requests.jsonl: every request.

    origin: the command and the device.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command, device = origin
    for name in dict.fromkeys(own.cell.workload.name for own in results):
        rows = list(rows_of([own for own in results if own.cell.workload.name == name]))
        if rows:
            merge_results(folder / "traffic.json", command, device, name, rows)
    content = {**facts, "cells": [_cell(own) for own in results]}
    (folder / "levels.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    with (folder / "requests.jsonl").open("w") as file:
        for own in results:
            for level, records in zip(own.levels, own.records, strict=True):
                for record in records:
                    place = {"workload": own.cell.workload.name, "mode": own.cell.mode, "rate": round(level.rate, 4)}
                    file.write(json.dumps(place | _short(asdict(record))) + "\n")


def rows_of(results: Sequence[CellResult]) -> Iterator[Row]:
    """Of one workload: rates that keep promises, their ratios, and what the highest of them was made of."""
    by_mode = {own.cell.mode: own for own in results}
    for promise in dict.fromkeys(bracket.promise for own in results for bracket in own.brackets):
        found = {mode: _bracket(own, promise) for mode, own in by_mode.items()}
        exact, compose = found.get(Mode.EXACT), found.get(Mode.COMPOSE)
        name = f"TTFT p95 ≤ {promise:g} s"
        if exact and compose and exact.held and compose.held:
            reach = _REACH_RATE if promise == _AIMED_PROMISE else None
            yield Row(f"requests a second at {name}, compose over exact", compose.held / exact.held, "×", reach)
        for mode, bracket in found.items():
            if bracket is not None:
                yield Row(f"requests a second at {name}, {mode} ({_bounds(bracket)})", bracket.held, "1/s")
    peaks = {mode: _peak(own.levels) for mode, own in by_mode.items() if own.levels}
    if peaks.get(Mode.EXACT) and Mode.COMPOSE in peaks:
        ratio = peaks[Mode.COMPOSE] / peaks[Mode.EXACT]
        yield Row("peak tokens a second, compose over exact", ratio, "×", _REACH_TOKENS)
    for mode, peak in peaks.items():
        yield Row(f"peak tokens a second, prompts and replies, {mode}", peak, "1/s")
    for mode, own in by_mode.items():
        yield from _shares(own, mode)


def _shares(result: CellResult, mode: Mode) -> Iterator[Row]:
    """Of all levels together, what was computed; of the quietest one, what a request takes alone."""
    tokens = {kind: sum(level.tokens[kind] for level in result.levels) for kind in ("prefix", "hit", "cold", "live")}
    total = sum(tokens.values())
    if not total:
        return
    yield Row(f"cold tokens, {mode}", 100 * tokens["cold"] / total, "%", better="lower")
    yield Row(f"reused tokens, {mode}", 100 * (tokens["prefix"] + tokens["hit"]) / total, "%")
    quietest = min(result.levels, key=lambda level: level.rate)
    yield Row(f"TTFT p50 at {quietest.rate:.3g} a second, {mode}", quietest.first_token_p50, "s", better="lower")
    held = [level.metrics.get("state_bytes", 0.0) + level.metrics.get("tier_bytes", 0.0) for level in result.levels]
    yield Row(f"bytes of stored states, most, {mode}", max(held) / 2**30, "GiB", better="lower")


def table_of(results: Sequence[CellResult]) -> Table:
    """A line a workload and mode."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    promises = list(dict.fromkeys(bracket.promise for own in results for bracket in own.brackets))
    columns = [*(f"≤ {promise:g} s" for promise in promises), "tokens/s", "reused", "cold", "levels"]
    table.add_column("workload, requests a second", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for own in results:
        if not own.levels:
            table.add_row(own.cell.workload.name, own.cell.mode, *["–"] * len(columns))
            continue
        tokens = {kind: sum(level.tokens[kind] for level in own.levels) for kind in own.levels[0].tokens}
        total = sum(tokens.values()) or 1
        held = [_cell_text(_bracket(own, promise)) for promise in promises]
        reused = f"{(tokens['prefix'] + tokens['hit']) / total:.0%}"
        cold = f"{tokens['cold'] / total:.0%}"
        name, mode = own.cell.workload.name, str(own.cell.mode)
        table.add_row(name, mode, *held, f"{_peak(own.levels):.0f}", reused, cold, str(len(own.levels)))
    return table


def _cell(result: CellResult) -> dict[str, Any]:
    return {
        "workload": result.cell.workload.name,
        "mode": result.cell.mode,
        "ended": result.ended,
        "filled": result.filled,
        "fill_seconds": result.fill_seconds,
        "start_rate": result.start_rate,
        "forgotten_bytes": result.forgotten_bytes,
        "brackets": [asdict(bracket) for bracket in result.brackets],
        "levels": [level.as_json() for level in result.levels],
    }


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """A file of thousands has no room for every gap and reply."""
    gaps = sorted(record.pop("gaps"))
    record.pop("reply")
    record["gap_p50"] = gaps[len(gaps) // 2] if gaps else None
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in record.items()}


def _bracket(result: CellResult, promise: float) -> Bracket | None:
    return next((own for own in result.brackets if own.promise == promise), None)


def _bounds(bracket: Bracket) -> str:
    if bracket.failed is None:
        return "no higher one was tried"
    return f"not at {bracket.failed:.3g}"


def _cell_text(bracket: Bracket | None) -> str:
    if bracket is None:
        return "–"
    return f"{bracket.held:.3g}" + ("" if bracket.is_closed else "+")


def _peak(levels: Sequence[Level]) -> float:
    return max(level.prompt_tokens_per_second + level.answer_tokens_per_second for level in levels)
