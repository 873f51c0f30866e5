"""The one form of every result file, of benchmarks and of evaluations alike."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

__all__ = ["ResultFile", "Row", "Source", "cpu_device", "merge_results", "of_subject", "read_results", "write_results"]

_ROOT = Path(__file__).resolve().parent.parent
# What measuring itself writes: one subject's rows make no other's dirty.
_WRITTEN = (":!bench/results", ":!eval/results", ":!docs", ":!README.md")
_VERSIONED = ("torch", "transformers", "triton", "grpcio", "fastapi")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. reach: the figure aimed at, None where there is none; better: which direction is good."""

    measure: str
    value: float
    unit: str
    reach: float | None = None
    better: Literal["higher", "lower"] = "higher"


@dataclass(frozen=True, slots=True)
class Source:
    """Where the rows of one subject come from."""

    commit: str
    date: str
    command: str


@dataclass(frozen=True, slots=True)
class ResultFile:
    """Rows with what they were measured on. sources: by subject, where a file has several; commit and command name all."""

    commit: str
    device: str
    date: str
    versions: dict[str, str]
    command: str
    rows: tuple[Row, ...]
    sources: dict[str, Source] = field(default_factory=dict)


def cpu_device() -> str:
    """This machine, for measurements on its CPU."""
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def write_results(path: Path, command: str, device: str, rows: Iterable[Row]) -> ResultFile:
    """Write rows with the present commit, date and library versions; returns what was written."""
    result = ResultFile(
        commit=_commit(),
        device=device,
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        versions=_versions(),
        command=command,
        rows=tuple(rows),
    )
    _write(path, result)
    return result


def merge_results(path: Path, command: str, device: str, subject: str, rows: Iterable[Row]) -> ResultFile:
    """Write rows of one subject, named `subject: measure`, in place of those that the file has of it; returns what stands there.

    Commit and command name all that the file's rows come from, unless it is of another device, when nothing of it stays.
    """
    own = [replace(row, measure=f"{subject}: {row.measure}") for row in rows]
    before = read_results(path) if path.exists() else None
    if before is not None and before.device != device:
        before = None
    kept = [] if before is None else [row for row in before.rows if not row.measure.startswith(f"{subject}: ")]
    result = write_results(path, command, device, [*kept, *own])
    sources = {} if before is None else _sources_of(before, kept)
    sources[subject] = Source(result.commit, result.date, command)
    result = replace(
        result,
        commit=_joined((source.commit for source in sources.values()), ", "),
        command=_joined((source.command for source in sources.values()), "; "),
        sources=sources,
    )
    _write(path, result)
    return result


def of_subject(result: ResultFile, subject: str) -> ResultFile:
    """The rows of one subject, without its name, and where they come from."""
    prefix = f"{subject}: "
    rows = tuple(
        replace(row, measure=row.measure.removeprefix(prefix)) for row in result.rows if row.measure.startswith(prefix)
    )
    source = result.sources.get(subject, Source(result.commit, result.date, result.command))
    return replace(result, rows=rows, commit=source.commit, date=source.date, command=source.command, sources={})


def _sources_of(before: ResultFile, kept: Iterable[Row]) -> dict[str, Source]:
    """Of the subjects that stay, in their order; all that the file names, where it does not tell them apart."""
    unknown = Source(before.commit, before.date, before.command)
    subjects = dict.fromkeys(row.measure.partition(": ")[0] for row in kept)
    return {subject: before.sources.get(subject, unknown) for subject in subjects}


def _joined(parts: Iterable[str], between: str) -> str:
    return between.join(dict.fromkeys(parts))


def _write(path: Path, result: ResultFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = asdict(result)
    if not result.sources:
        del content["sources"]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_results(path: Path) -> ResultFile:
    """The content of a result file."""
    content = json.loads(path.read_text())
    rows = tuple(Row(**row) for row in content.pop("rows"))
    sources = {subject: Source(**source) for subject, source in content.pop("sources", {}).items()}
    return ResultFile(rows=rows, sources=sources, **content)


def _commit() -> str:
    """The present commit, `-dirty` where anything differs from it that could change a figure."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
