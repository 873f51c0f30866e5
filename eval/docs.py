"""Renders eval/results into the tables of docs/quality.md. With --check: fails when the page is out of date."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import ResultFile, read_results
from eval.budget import budget_table
from eval.calibrate.table import family_table
from eval.comparison import ALL_TYPES, differences_path
from eval.passage_table import passage_table
from eval.presets import Preset, settings_of
from eval.settings import Mode

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
RESULTS = ROOT / "eval" / "results" / "demo.json"
SWEEP = ROOT / "eval" / "results" / "demo_sweep.json"
PASSAGES = ROOT / "eval" / "results" / "smollm2.json"
FAILURES = ROOT / "eval" / "results" / "demo_failures.json"
BUDGET = ROOT / "eval" / "results" / "quality_budget.json"
CALIBRATED = (ROOT / "models" / "demo",)
ORACLE = ROOT / "eval" / "results" / "oracle.json"
_BLOCK = re.compile(r"(<!-- quality: (?P<table>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_STANDARD = "set standard"


class _Figures:
    """Rows of the result file by setting, group and metric."""

    def __init__(self, result: ResultFile) -> None:
        self.result = result
        # Rows of one figure, which stands for no setting, have no such names.
        named = [(row.measure.split(" / "), row.value) for row in result.rows if " / " in row.measure]
        self._values = {tuple(names): value for names, value in named}
        self.settings = list(dict.fromkeys(names[0] for names, _ in named))
        self.groups = list(dict.fromkeys(names[1] for names, _ in named))

    def text(self, setting: str, group: str, metric: str, digits: int = 1) -> str:
        value = self._values.get((setting, group, metric))
        return "" if value is None else f"{value:.{digits}f}"

    def loss(self, setting: str, group: str) -> str:
        """Points lost with the 95 % interval."""
        value = self.text(setting, group, "points lost", 2)
        if not value:
            return ""
        low, high = (self.text(setting, group, f"points lost, {end} end", 2) for end in ("low", "high"))
        return f"{value} [{low}, {high}]"

    def questions(self, setting: str, group: str) -> str:
        return self.text(setting, group, "questions", 0)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the tables are made from.

    sweep: an earlier run that asked more under some settings; oracle: of the comparison with `transformers`, and the
    questions that differ there; passages: of questions over passages, with the weights of another model.
    """

    figures: _Figures
    sweep: _Figures
    failures: Mapping[str, Any]
    oracle: ResultFile
    differences: Sequence[Mapping[str, Any]]
    passages: ResultFile

    def best(self, setting: str) -> _Figures:
        """The run that asked more standard questions under a setting."""
        counts = [float(own.questions(setting, _STANDARD) or 0) for own in (self.figures, self.sweep)]
        return self.sweep if counts[1] > counts[0] else self.figures


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]


def _decisive(stored: _Stored) -> list[str]:
    """What the choice of the default rests on, as far as it is measured."""
    lines = _head(
        "setting", "live", "points lost, standard", "n", "live", "points lost, documents of ≥ 400 tokens", "n"
    )
    for own in dict.fromkeys((*settings_of(Preset.CONFIRM), *settings_of(Preset.REFRESH))):
        figures = stored.best(own.name)
        if not figures.questions(own.name, _STANDARD):
            continue
        cells = [own.name]
        for group in (_STANDARD, "set long"):
            live = figures.text(own.name, group, "live share")
            cells += [f"{live} %", figures.loss(own.name, group), figures.questions(own.name, group)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reference(stored: _Stored) -> list[str]:
    """Full recompute by type."""
    figures = stored.figures
    reaches = {row.measure: row.reach for row in figures.result.rows}
    lines = _head("type", "exact match", "reach")
    for group in figures.groups:
        metric = f"{Mode.OFF} / {group} / exact match"
        reach = reaches.get(metric)
        bar = "" if reach is None else f"≥ {reach:g} %"
        lines.append(f"| {group} | {figures.text(str(Mode.OFF), group, 'exact match')} % | {bar} |")
    return lines


def _settings(stored: _Stored) -> list[str]:
    """Every setting on the standard set."""
    lines = _head("setting", "live", "exact", "F1", "agreement", "KL", "points lost", "n")
    for own in dict.fromkeys((*stored.figures.settings, *stored.sweep.settings)):
        figures = stored.best(own)
        if not figures.questions(own, _STANDARD):
            continue
        cells = [own, f"{figures.text(own, _STANDARD, 'live share')} %"]
        cells += [figures.text(own, _STANDARD, metric) for metric in ("exact match", "token F1", "agreement")]
        cells += [figures.text(own, _STANDARD, "divergence", 4), figures.loss(own, _STANDARD)]
        lines.append(f"| {' | '.join([*cells, figures.questions(own, _STANDARD)])} |")
    return lines


def _by_group(stored: _Stored) -> list[str]:
    """Points lost by set, and by type on the standard set."""
    figures = stored.figures
    lines = _head("setting", *(group.split(" ", 1)[1] for group in figures.groups))
    for own in figures.settings:
        cells = [figures.text(own, group, "points lost") for group in figures.groups]
        lines.append(f"| {' | '.join([own, *cells])} |")
    return lines


def _flip_rates(stored: _Stored) -> list[str]:
    """Broken answers by where the evidence stands."""
    failures = stored.failures
    watched = list(failures["directions"])
    lines = _head("relation", "bin", *watched)
    keys = dict.fromkeys((rate["relation"], rate["bin"]) for rate in failures["rates"])
    shares = {
        (rate["relation"], rate["bin"], rate["setting"]): f"{100 * rate['broken_share']:.1f} % of {rate['questions']}"
        for rate in failures["rates"]
    }
    for relation, name in keys:
        cells = [shares.get((relation, name, setting), "") for setting in watched]
        lines.append(f"| {relation} | {' | '.join([name, *cells])} |")
    for direction in ("broken", "mended"):
        cells = [str(failures["directions"][setting][direction]) for setting in watched]
        lines.append(f"| answers {direction} | | {' | '.join(cells)} |")
    return lines


def _oracle(stored: _Stored) -> list[str]:
    """How often the engine's full recompute and `transformers` give the same tokens, and where they do not."""
    result = stored.oracle
    values = {row.measure: row.value for row in result.rows}
    versions = f"torch {result.versions['torch']}, `transformers` {result.versions['transformers']}"
    lines = [
        f"{values[f'{ALL_TYPES} / equal answers']:.0f} of {values[f'{ALL_TYPES} / questions']:.0f} answers are equal,"
        f" token for token; no log-probability on the way differs by more than {values['largest deviation']:.1e} nats.",
        f"{result.device}; {result.date}; {versions}; `{result.command}`",
        "",
        *_head("type", "questions", "equal answers", "exact match, engine", "exact match, `transformers`"),
    ]
    for name in dict.fromkeys(row.measure.split(" / ")[0] for row in result.rows if " / " in row.measure):
        counts = [f"{values[f'{name} / {metric}']:.0f}" for metric in ("questions", "equal answers")]
        shares = [f"{values[f'{name} / exact match, {side}']:.1f} %" for side in ("engine", "transformers")]
        lines.append(f"| {' | '.join([name, *counts, *shares])} |")
    if stored.differences:
        lines += ["", *_head("differing question", "type", "engine", "by nats", "`transformers`", "by nats")]
    for own in stored.differences:
        margins = [f"{own['difference'][f'{side}_margin']:.1e}" for side in ("engine", "oracle")]
        answers = [own["engine_answer"], margins[0], own["oracle_answer"], margins[1]]
        lines.append(f"| {' | '.join([str(own['question']), own['type'], *answers])} |")
    return lines


_TABLES: Mapping[str, Callable[[_Stored], list[str]]] = {
    "decisive": _decisive,
    "reference": _reference,
    "settings": _settings,
    "by_group": _by_group,
    "flip_rates": _flip_rates,
    "oracle": _oracle,
    "budget": lambda _: budget_table(read_results(BUDGET)),
    "passages": lambda stored: passage_table(stored.passages),
    "families": lambda _: family_table(CALIBRATED),
}


def render_page(page: str) -> str:
    """The page with every marked table made anew."""
    stored = _Stored(
        figures=_Figures(read_results(RESULTS)),
        sweep=_Figures(read_results(SWEEP)),
        failures=json.loads(FAILURES.read_text()),
        oracle=read_results(ORACLE),
        differences=json.loads(differences_path(ORACLE).read_text()),
        passages=read_results(PASSAGES),
    )

    def fill(block: re.Match[str]) -> str:
        lines = _TABLES[block["table"]](stored)
        return f"{block[1]}{chr(10).join(lines)}\n{block[3]}"

    return _BLOCK.sub(fill, page)


def main() -> None:
    """Parse the arguments and render or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    rendered = render_page(page)
    if not arguments.check:
        PAGE.write_text(rendered)
    elif page != rendered:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: run `python -m eval.docs`")


if __name__ == "__main__":
    main()
