"""Renders result files into the tables of README and docs/benchmarks.md. With --check: fails when one is out of date.

A marker names its file, of which `subject:` it shows the rows where measures are named `subject: measure`, and either how
many `rows:` are shown or what the table has one line `for:`, where measures are named `line / column`.
"""

import argparse
import re
import sys
from pathlib import Path

from bench.results import ResultFile, Row, of_subject, read_results

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "benchmarks.md",
    ROOT / "docs" / "operations.md",
    ROOT / "docs" / "vllm.md",
)
_BLOCK = re.compile(
    r"(?P<head><!-- table: (?P<file>\S+)(?: subject: (?P<subject>\w+))?(?: rows: (?P<count>\d+)| for: (?P<line>\w+))? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def render_table(result: ResultFile, count: int | None) -> str:
    """A Markdown table of the first `count` rows, or of all, with what they were measured on below it."""
    lines = ["| measure | value | reach |", "| --- | ---: | ---: |"]
    for row in result.rows[:count]:
        reach = "" if row.reach is None else f"{_reach(row)} {row.unit}"
        lines.append(f"| {row.measure} | {row.value:.4g} {row.unit} | {reach} |")
    return "\n".join([*lines, _origin(result)])


def render_lines(result: ResultFile, name: str) -> str:
    """A Markdown table of rows whose measures are named `line / column`, or `line / column (detail)`; units are left out."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, str] = {}
    for row in result.rows:
        line, _, measure = row.measure.partition(" / ")
        column, _, detail = measure.partition(" (")
        columns[column] = column if row.reach is None else f"{column} ({_reach(row)})"
        cells.setdefault(line, {})[column] = _short(row.value) + (f" ({detail}" if detail else "")
    lines = [f"| {name} | {' | '.join(columns.values())} |", f"| --- |{' ---: |' * len(columns)}"]
    for line, values in cells.items():
        lines.append(f"| {line} | {' | '.join(values.get(column, '') for column in columns)} |")
    return "\n".join([*lines, _origin(result)])


def _short(value: float) -> str:
    """Two digits; three of what is large."""
    return f"{value:.3g}" if abs(value) >= 10 else f"{value:.2g}"


def _reach(row: Row) -> str:
    return f"{'≥' if row.better == 'higher' else '≤'} {row.reach:g}"


def _origin(result: ResultFile) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    return f"\n{result.device}; {result.date}; commit {result.commit}; {versions}. `{result.command}`\n"


def render_page(page: str) -> str:
    """The page with every table made anew from the result file that its marker names."""

    def fill(block: re.Match[str]) -> str:
        path = ROOT / block["file"]
        result = read_results(path) if path.exists() else None
        if result is not None and block["subject"]:
            result = of_subject(result, block["subject"])
        if result is None or not result.rows:
            return f"{block['head']}Not measured yet.\n{block['end']}"
        count = int(block["count"]) if block["count"] else None
        table = render_lines(result, block["line"]) if block["line"] else render_table(result, count)
        return f"{block['head']}{table}{block['end']}"

    return _BLOCK.sub(fill, page)


def main() -> None:
    """Parse the arguments and render or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for path in PAGES:
        page = path.read_text()
        rendered = render_page(page)
        if not arguments.check:
            path.write_text(rendered)
        elif page != rendered:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run `python -m bench.docs`")


if __name__ == "__main__":
    main()
