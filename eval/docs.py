"""Renders eval/results into the tables of docs/quality.md. With --check: fails when the page is out of date."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.results import ResultFile, read_results
from eval.presets import Preset, settings_of
from eval.settings import Mode

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
RESULTS = ROOT / "eval" / "results" / "demo.json"
FAILURES = ROOT / "eval" / "results" / "demo_failures.json"
_BLOCK = re.compile(r"(<!-- quality: (?P<table>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_STANDARD = "set standard"


class _Figures:
    """Rows of the result file by setting, group and metric."""

    def __init__(self, result: ResultFile) -> None:
        self.result = result
        self._values = {tuple(row.measure.split(" / ")): row.value for row in result.rows}
        self.settings = list(dict.fromkeys(row.measure.split(" / ")[0] for row in result.rows))
        self.groups = list(dict.fromkeys(row.measure.split(" / ")[1] for row in result.rows))

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


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]


def _decisive(figures: _Figures, failures: Mapping[str, Any]) -> list[str]:
    """What the choice of the default rests on, as far as it is measured."""
    lines = _head(
        "setting", "live", "points lost, standard", "n", "live", "points lost, documents of ≥ 400 tokens", "n"
    )
    for own in settings_of(Preset.CONFIRM):
        if not figures.questions(own.name, _STANDARD):
            continue
        cells = [own.name]
        for group in (_STANDARD, "set long"):
            live = figures.text(own.name, group, "live share")
            cells += [f"{live} %", figures.loss(own.name, group), figures.questions(own.name, group)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reference(figures: _Figures, failures: Mapping[str, Any]) -> list[str]:
    """Full recompute by type."""
    reaches = {row.measure: row.reach for row in figures.result.rows}
    lines = _head("type", "exact match", "reach")
    for group in figures.groups:
        metric = f"{Mode.OFF} / {group} / exact match"
        reach = reaches.get(metric)
        bar = "" if reach is None else f"≥ {reach:g} %"
        lines.append(f"| {group} | {figures.text(str(Mode.OFF), group, 'exact match')} % | {bar} |")
    return lines


def _settings(figures: _Figures, failures: Mapping[str, Any]) -> list[str]:
    """Every setting on the standard set, in order of loss."""
    lines = _head("setting", "live", "exact", "F1", "agreement", "KL", "points lost", "n")
    for own in figures.settings:
        if not figures.questions(own, _STANDARD):
            continue
        cells = [own, f"{figures.text(own, _STANDARD, 'live share')} %"]
        cells += [figures.text(own, _STANDARD, metric) for metric in ("exact match", "token F1", "agreement")]
        cells += [figures.text(own, _STANDARD, "divergence", 4), figures.loss(own, _STANDARD)]
        lines.append(f"| {' | '.join([*cells, figures.questions(own, _STANDARD)])} |")
    return lines


def _by_group(figures: _Figures, failures: Mapping[str, Any]) -> list[str]:
    """Points lost by set, and by type on the standard set."""
    lines = _head("setting", *(group.split(" ", 1)[1] for group in figures.groups))
    for own in figures.settings:
        cells = [figures.text(own, group, "points lost") for group in figures.groups]
        lines.append(f"| {' | '.join([own, *cells])} |")
    return lines


def _flip_rates(figures: _Figures, failures: Mapping[str, Any]) -> list[str]:
    """Broken answers by where the evidence stands."""
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


_TABLES: Mapping[str, Callable[[_Figures, Mapping[str, Any]], list[str]]] = {
    "decisive": _decisive,
    "reference": _reference,
    "settings": _settings,
    "by_group": _by_group,
    "flip_rates": _flip_rates,
}


def render_page(page: str) -> str:
    """The page with every marked table made anew."""
    figures = _Figures(read_results(RESULTS))
    failures = json.loads(FAILURES.read_text())

    def fill(block: re.Match[str]) -> str:
        lines = _TABLES[block["table"]](figures, failures)
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
