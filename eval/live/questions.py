"""A file of questions for a live endpoint."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eval.live.errors import LiveEvaluationError

__all__ = ["LiveQuestion", "is_accepted", "normalise", "read_live_questions"]

_FIELDS = ("question", "answers", "documents", "ctxs", "system", "id")


@dataclass(frozen=True, slots=True)
class LiveQuestion:
    """documents: as the API takes them; answers: the acceptable ones, none where only the two replies are compared."""

    id: str
    question: str
    documents: tuple[dict[str, str], ...]
    answers: tuple[str, ...] = ()
    system: str = ""


def is_accepted(reply: str, answers: tuple[str, ...], *, contained: bool) -> bool:
    """Whether a reply is one of the answers, or holds one; case, spaces and a full stop at the end do not count."""
    text = normalise(reply)
    wanted = [normalise(own) for own in answers]
    return any(own in text for own in wanted) if contained else text in wanted


def normalise(text: str) -> str:
    """Lower case, no full stop at the end, single spaces."""
    return " ".join(text.lower().split()).rstrip(".")


def read_live_questions(path: Path) -> list[LiveQuestion]:
    """JSON lines, one question each, or one JSON list of them; see docs/quality.md.

    Raises:
        LiveEvaluationError: the file is missing, empty or malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LiveEvaluationError(f"{path}: not readable ({error})") from error
    found = [_question(place, index, entry) for index, (place, entry) in enumerate(_entries(path, text))]
    if not found:
        raise LiveEvaluationError(f"{path}: holds no question; write one JSON object a line")
    if len({own.id for own in found}) < len(found):
        raise LiveEvaluationError(f"{path}: two questions have one id; give each its own")
    return found


def _entries(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Every entry with its place, for messages."""
    whole = text.lstrip().startswith("[")
    lines = [(f"{path}", text)] if whole else [(f"{path}:{n}", own) for n, own in enumerate(text.splitlines(), 1)]
    for place, line in lines:
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise LiveEvaluationError(f"{place}: no JSON ({error}); write one object a line") from error
        if whole:
            yield from ((f"{place}, entry {number}", own) for number, own in enumerate(content))
        else:
            yield place, content


def _question(place: str, index: int, entry: object) -> LiveQuestion:
    if not isinstance(entry, dict):
        raise LiveEvaluationError(f"{place}: must be an object with question and documents")
    if unknown := entry.keys() - set(_FIELDS):
        raise LiveEvaluationError(f"{place}: unknown field {min(unknown)}; known are {', '.join(_FIELDS)}")
    documents = entry.get("documents", entry.get("ctxs"))
    if not isinstance(documents, list) or not documents:
        raise LiveEvaluationError(f"{place}: documents must be a list with at least one; without, nothing is reused")
    answers = entry.get("answers", [])
    if not isinstance(answers, list) or not all(isinstance(own, str) and own.strip() for own in answers):
        raise LiveEvaluationError(f"{place}: answers must be a list of texts; leave it out where none is known")
    return LiveQuestion(
        id=str(entry.get("id", index)),
        question=_text(place, entry, "question"),
        documents=tuple(_document(f"{place}: documents[{number}]", own) for number, own in enumerate(documents)),
        answers=tuple(answers),
        system=_text(place, entry, "system") if "system" in entry else "",
    )


def _document(place: str, entry: object) -> dict[str, str]:
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, dict):
        raise LiveEvaluationError(f"{place}: must be a text or an object with a text")
    found = {"text": _text(place, entry, "text")}
    if entry.get("title"):
        found["title"] = _text(place, entry, "title")
    return found


def _text(place: str, entry: Mapping[str, object], field: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not value.strip():
        raise LiveEvaluationError(f"{place}: {field} must be a text")
    return value
