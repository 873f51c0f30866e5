"""The raw outcomes of a run as a compressed file, so that tables can be made elsewhere."""

import gzip
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.checks import EvaluationError
from eval.question_sets import QuestionSet, SetKind
from eval.scoring import Outcome, Scores

__all__ = ["RunRecord", "describe_run", "merge_records", "read_record", "write_record"]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Where, when and how a run was made, and its outcomes. seconds: wall time of the whole run."""

    device: str
    date: str
    versions: dict[str, str]
    command: str
    seconds: float
    sets: tuple[QuestionSet, ...]
    outcomes: tuple[Outcome, ...]


def describe_run(
    device: str, command: str, seconds: float, sets: Sequence[QuestionSet], outcomes: Sequence[Outcome]
) -> RunRecord:
    """A record of a run that ended just now."""
    versions = {"python": platform.python_version(), "torch": version("torch")}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return RunRecord(device, date, versions, command, seconds, tuple(sets), tuple(outcomes))


def write_record(path: Path, record: RunRecord) -> None:
    """Store a record; settings are written once, one row an outcome."""
    settings = list(dict.fromkeys(own.setting for own in record.outcomes))
    index = {setting: place for place, setting in enumerate(settings)}
    rows = [
        [
            own.question,
            index[own.setting],
            own.live_tokens,
            own.document_tokens,
            int(own.scores.exact),
            round(own.scores.f1, 4),
            int(own.scores.agrees),
            round(own.scores.divergence, 6),
            own.scores.answer,
            round(own.scores.first_divergence, 6),
            round(own.run_share, 6),
        ]
        for own in record.outcomes
    ]
    content = {
        "device": record.device,
        "date": record.date,
        "versions": record.versions,
        "command": record.command,
        "seconds": record.seconds,
        "sets": [asdict(chosen) for chosen in record.sets],
        "settings": settings,
        "outcomes": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(content, file)


def read_record(path: Path) -> RunRecord:
    """The content of a record file.

    Raises:
        EvaluationError: it is missing, damaged, or no record.
    """
    try:
        with gzip.open(path, "rt") as file:
            return _parse(json.load(file))
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise EvaluationError(f"{path}: not readable as a record of `hypic eval run` ({error})") from error


def _parse(content: dict[str, Any]) -> RunRecord:
    settings = content["settings"]
    outcomes = tuple(
        Outcome(
            question=row[0],
            setting=settings[row[1]],
            scores=Scores(row[8], bool(row[4]), row[5], bool(row[6]), row[7], row[9]),
            live_tokens=row[2],
            document_tokens=row[3],
            run_share=row[10],
        )
        for row in content["outcomes"]
    )
    sets = tuple(QuestionSet(SetKind(own["kind"]), own["count"], own["seed"]) for own in content["sets"])
    return RunRecord(
        content["device"], content["date"], content["versions"], content["command"], content["seconds"], sets, outcomes
    )


def merge_records(records: Sequence[RunRecord]) -> RunRecord:
    """Several runs of one checkpoint as one; of an outcome that several hold, the first counts.

    Raises:
        EvaluationError: the runs asked different questions under the same numbers.
    """
    first = records[0]
    sets: dict[SetKind, QuestionSet] = {}
    for chosen in sorted((own for record in records for own in record.sets), key=lambda own: own.count):
        if chosen.kind in sets and sets[chosen.kind].seed != chosen.seed:
            raise EvaluationError(f"the runs' {chosen.kind} questions come from different seeds")
        sets[chosen.kind] = chosen
    unique = {(own.question, own.setting): own for record in reversed(records) for own in record.outcomes}
    return RunRecord(
        device=first.device,
        date=max(record.date for record in records),
        versions=first.versions,
        command=" && ".join(record.command for record in records),
        seconds=sum(record.seconds for record in records),
        sets=tuple(sets.values()),
        outcomes=tuple(sorted(unique.values(), key=lambda own: own.question)),
    )
