"""Rows, tables, failures and plot of one run."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from bench.results import Row, write_results
from eval.failures import find_flips, flip_rates
from eval.pack import NumberedPrompt
from eval.plot import draw_front
from eval.presets import DEFAULT_SETTING, PUBLISHED, PUBLISHED_UNPRIMED
from eval.question_sets import SetKind
from eval.records import RunRecord
from eval.runner import load_prompts
from eval.settings import Mode, Prime, Refresh, Selection, Setting
from eval.statistics import Summary, summarise
from services.worker.engine.seam import SeamWindow

__all__ = ["MAIN_GROUP", "write_report"]

# Settings were asked different numbers of questions of the sets, so that only figures within one set compare.
MAIN_GROUP = f"set {SetKind.STANDARD}"
_FLIPS_KEPT = 60
# Fewer say nothing: a run whose time ran out leaves such behind.
_MIN_QUESTIONS = 30
# Fewer are no ground to call one setting the best of many.
_MIN_QUESTIONS_OF_BEST = 1000


def write_report(record: RunRecord, checkpoint: Path, stem: Path) -> str:
    """Write `stem`.json (rows), _failures.json, .md and .png; returns the tables."""
    prompts = {own.number: own for own in load_prompts(checkpoint, record.sets)}
    asked = {own.question for own in record.outcomes}
    groups = _groups(record, [prompts[number] for number in asked])
    summaries = [own for own in summarise(record.outcomes, groups) if own.questions >= _MIN_QUESTIONS]
    stem.parent.mkdir(parents=True, exist_ok=True)
    rows = [*decisive_rows(summaries), *(row for own in summaries for row in _rows(own))]
    path = stem.with_suffix(".json")
    written = write_results(path, record.command, record.device, rows)
    content = asdict(replace(written, date=record.date, versions=record.versions))
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    _write_failures(record, prompts, stem.with_name(f"{stem.name}_failures.json"))
    tables = render_tables(summaries, tuple(groups))
    stem.with_suffix(".md").write_text(tables)
    draw_front([own for own in summaries if own.group == MAIN_GROUP], stem.with_suffix(".png"))
    return tables


def _groups(record: RunRecord, prompts: Sequence[NumberedPrompt]) -> dict[str, Collection[int]]:
    """Each set, and each type of question on the standard set."""
    groups: dict[str, set[int]] = {f"set {chosen.kind}": set(chosen.numbers) for chosen in record.sets}
    types: dict[str, set[int]] = {}
    for own in prompts:
        if own.number in groups[MAIN_GROUP]:
            types.setdefault(f"type {own.prompt.type}", set()).add(own.number)
    return {name: frozenset(numbers) for name, numbers in [*sorted(groups.items()), *sorted(types.items())]}


def decisive_rows(summaries: Sequence[Summary]) -> list[Row]:
    """What is aimed at: the loss beside that of the published method, by live share, and the default's on long documents."""
    asked = [own for own in summaries if own.group == MAIN_GROUP and own.questions >= _MIN_QUESTIONS_OF_BEST]
    standard = {own.setting: own for own in asked}
    published = standard.get(PUBLISHED.name)
    if published is None or published.loss.value <= 0:
        return []
    rows = [Row("L0, points lost by the published method", round(published.loss.value, 3), "points", None, "lower")]
    for share, reach in ((0.3, 0.25), (0.15, 0.6)):
        losses = [own.loss.value for own in standard.values() if own.live_share <= share]
        ratio = round(min(losses) / published.loss.value, 3)
        rows.append(Row(f"least loss at up to {share:.0%} live, over L0", ratio, "", reach, "lower"))
    for own in summaries:
        if own.setting == DEFAULT_SETTING.name and own.group == f"set {SetKind.LONG}":
            rows.append(
                Row(
                    "points lost by the default on documents of 400 tokens and more",
                    round(own.loss.value, 3),
                    "points",
                    1.0,
                    "lower",
                )
            )
    return rows


def _rows(own: Summary) -> list[Row]:
    name = f"{own.setting} / {own.group}"
    rows = [
        Row(f"{name} / exact match", round(100 * own.exact, 3), "%", _reach(own), "higher"),
        Row(f"{name} / points lost", round(own.loss.value, 3), "points", None, "lower"),
    ]
    if own.group.startswith("type "):
        return rows
    return [
        *rows,
        Row(f"{name} / points lost, low end", round(own.loss.low, 3), "points", None, "lower"),
        Row(f"{name} / points lost, high end", round(own.loss.high, 3), "points", None, "lower"),
        Row(f"{name} / token F1", round(100 * own.f1, 3), "%", None, "higher"),
        Row(f"{name} / agreement", round(100 * own.agreement, 3), "%", None, "higher"),
        Row(f"{name} / divergence", round(own.divergence, 6), "nats/token", None, "lower"),
        Row(f"{name} / live share", round(100 * own.live_share, 3), "%", None, "lower"),
        Row(f"{name} / questions", own.questions, "questions", None, "higher"),
    ]


def _reach(own: Summary) -> float | None:
    reaches = {"type one_fact": 95.0, "type two_documents": 80.0}
    return reaches.get(own.group) if own.setting == Mode.OFF else None


def render_tables(summaries: Sequence[Summary], groups: Sequence[str]) -> str:
    """One table of all settings on the standard set, one of points lost by set and type."""
    columns = ("setting", "live", "exact", "F1", "agreement", "KL", "points lost", "n")
    head = f"| {' | '.join(columns)} |\n| --- |{' ---: |' * (len(columns) - 1)}\n"
    overall = head + "\n".join(_line(own) for own in summaries if own.group == MAIN_GROUP)
    others = [group for group in groups if group != MAIN_GROUP]
    names = " | ".join(group.split(" ", 1)[1] for group in others)
    by_group = f"| setting | {names} |\n| --- |{' ---: |' * len(others)}\n"
    lost = {(own.setting, own.group): f"{own.loss.value:.1f}" for own in summaries}
    for setting in dict.fromkeys(own.setting for own in summaries):
        by_group += f"| {setting} | " + " | ".join(lost.get((setting, group), "") for group in others) + " |\n"
    return f"{overall}\n\nPoints lost by set and by type:\n\n{by_group}"


def _line(own: Summary) -> str:
    loss = f"{own.loss.value:.2f} [{own.loss.low:.2f}, {own.loss.high:.2f}]"
    figures = f"{100 * own.live_share:.1f} % | {100 * own.exact:.1f} | {100 * own.f1:.1f} | {100 * own.agreement:.1f}"
    return f"| {own.setting} | {figures} | {own.divergence:.4f} | {loss} | {own.questions} |"


def _write_failures(record: RunRecord, prompts: Mapping[int, NumberedPrompt], path: Path) -> None:
    """Flip rates by where the evidence stands, and some flips of each of the settings that matter most."""
    asked = {own.setting for own in record.outcomes}
    refreshed = Setting(Mode.COMPOSE, Prime.START, SeamWindow(8), refresh=Refresh(Selection.BOTH, 0.3))
    watched = [own.name for own in (PUBLISHED_UNPRIMED, PUBLISHED, DEFAULT_SETTING, refreshed) if own.name in asked]
    flips = find_flips(record.outcomes, prompts, watched)
    kept = [flip for name in watched for flip in [own for own in flips if own.setting == name][:_FLIPS_KEPT]]
    directions = {
        name: {
            "broken": sum(own.broken for own in flips if own.setting == name),
            "mended": sum(not own.broken for own in flips if own.setting == name),
        }
        for name in watched
    }
    rates = [asdict(rate) for rate in flip_rates(record.outcomes, prompts, watched)]
    content = {"directions": directions, "rates": rates, "flips": [asdict(flip) for flip in kept]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
