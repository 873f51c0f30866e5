"""What a calibration has measured, prompt by prompt, in a file that a later run goes on with."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eval.checks import EvaluationError
from eval.scoring import Outcome, Scores

__all__ = ["Identity", "OutcomeFile"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same for outcomes to be of one calibration."""

    revision: str
    profile_digest: str
    prompts: str
    system: str
    tokens: int
    device: str


class OutcomeFile:
    """JSON lines: the identity, then the outcomes of one prompt each. A line that was cut off by a kill is measured again.

    Raises:
        EvaluationError: the file is of another calibration, or none of ours.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path = path
        self._outcomes: list[Outcome] = []
        if path.exists():
            self._read(identity)
        else:
            path.write_text(_line(asdict(identity)), encoding="utf-8")

    def of(self, number: int, settings: Sequence[str]) -> list[Outcome]:
        """A prompt's outcomes under these settings and in full; empty unless all are there."""
        own = [outcome for outcome in self._outcomes if outcome.question == number]
        found = {outcome.setting: outcome for outcome in own if outcome.setting in settings}
        return list(found.values()) if len(found) == len(settings) else []

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep a prompt's outcomes."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line([asdict(own) for own in outcomes]))
        self._outcomes += outcomes

    def _read(self, identity: Identity) -> None:
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            first, *lines = (json.loads(line) for line in whole.splitlines())
            known = Identity(**first)
            self._outcomes = [_outcome(each) for line in lines for each in line]
        except (ValueError, TypeError, KeyError) as error:
            raise EvaluationError(f"{self._path}: not readable as outcomes ({error}); delete it") from error
        differing = [name for name, value in asdict(identity).items() if getattr(known, name) != value]
        if differing:
            raise EvaluationError(
                f"{self._path}: holds another calibration, of other {', '.join(differing)}; delete it, or give another --out"
            )
        if whole != content:
            self._path.write_bytes(whole)


def _line(content: object) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


def _outcome(content: dict[str, Any]) -> Outcome:
    return Outcome(**(content | {"scores": Scores(**content["scores"])}))
