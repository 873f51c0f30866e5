"""Renders result files into the tables of README and docs/benchmarks.md. With --check: fails when one is out of date."""

import argparse
import re
import sys
from pathlib import Path

from bench.results import ResultFile, read_results

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
_BLOCK = re.compile(r"(<!-- table: (?P<file>\S+)(?: rows: (?P<count>\d+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def render_table(result: ResultFile, count: int | None) -> str:
    """A Markdown table of the first `count` rows, or of all, with what they were measured on below it."""
    lines = ["| measure | value | reach |", "| --- | ---: | ---: |"]
    for row in result.rows[:count]:
        sign = "≥" if row.better == "higher" else "≤"
        reach = "" if row.reach is None else f"{sign} {row.reach:g} {row.unit}"
        lines.append(f"| {row.measure} | {row.value:.4g} {row.unit} | {reach} |")
    versions = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    lines.append(f"\n{result.device}; {result.date}; commit {result.commit}; {versions}. `{result.command}`\n")
    return "\n".join(lines)


def render_page(page: str) -> str:
    """The page with every table made anew from the result file that its marker names."""

    def fill(block: re.Match[str]) -> str:
        count = int(block["count"]) if block["count"] else None
        table = render_table(read_results(ROOT / block["file"]), count)
        return f"{block[1]}{table}{block[4]}"

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
