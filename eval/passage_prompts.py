"""Questions over passages from a file, as token ids of any chat model, by the router's own assembly."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.chat_prompts import ChatReader
from eval.checks import EvaluationError
from eval.prompts import EvalPrompt
from services.cli.one_prompt import describe_model
from services.router.domain.request import Document
from services.worker.adapters.served_model import read_served_model
from services.worker.settings import WorkerSettings

__all__ = ["PassageQuestion", "PassageReader", "QuestionFileError", "read_questions_file"]

_SYSTEM = "You answer questions from the documents. Give only the answer."
_SENTENCE_END = re.compile(r"(?<=[.?!]) ")


class QuestionFileError(EvaluationError):
    """The file of questions cannot be used; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class PassageQuestion:
    """`number` is the question's place in its file; answers are the acceptable ones."""

    number: int
    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    def holds_answer(self, text: str) -> bool:
        """Whether one of the answers stands in a text, whatever its case."""
        return any(answer.lower() in text.lower() for answer in self.answers)


def read_questions_file(path: Path) -> list[PassageQuestion]:
    """The questions whose answer stands in one of their passages.

    The file holds a list of `{"question", "answers": [...], "ctxs": [{"title", "text"}, ...]}`, the form in which the
    authors of CacheBlend (arXiv 2405.16444) publish their question sets.

    Raises:
        QuestionFileError: it is missing or has another form.
    """
    try:
        content = json.loads(path.read_text())
        questions = [_question(number, entry) for number, entry in enumerate(content)]
    except (OSError, ValueError) as error:
        raise QuestionFileError(f"{path}: not readable as JSON ({error})") from error
    except (KeyError, TypeError) as error:
        raise QuestionFileError(f"{path}: needs question, answers and ctxs with a text each ({error!r})") from error
    return [own for own in questions if any(map(own.holds_answer, own.passages))]


def _question(number: int, entry: dict[str, Any]) -> PassageQuestion:
    titled = [(str(passage.get("title") or ""), str(passage["text"])) for passage in entry["ctxs"]]
    passages = tuple(f"{title}\n{text}" if title else text for title, text in titled)
    return PassageQuestion(number, str(entry["question"]), tuple(map(str, entry["answers"])), passages)


class PassageReader(ChatReader):
    """Turns questions into ids as the router would, and ids back into text.

    Raises:
        CheckpointError: the checkpoint cannot be served, or nothing says where its replies end.
    """

    def __init__(self, checkpoint: Path, passages: int, passage_tokens: int) -> None:
        settings = WorkerSettings(checkpoint=checkpoint)
        # The right answers are names.
        super().__init__(checkpoint, describe_model(settings, read_served_model(settings)), answer_limit=16)
        self._passages = passages
        self._passage_tokens = passage_tokens

    def read(self, question: PassageQuestion) -> EvalPrompt:
        """The question with the first passage that holds the answer and the first of the others, in the file's order.

        Each passage is cut to whole sentences: those from its head, or where the answer stands further in, those up to it.

        Raises:
            QuestionFileError: every passage is shorter than what is worth composing.
        """
        gold = next(index for index, text in enumerate(question.passages) if question.holds_answer(text))
        others = [index for index in range(len(question.passages)) if index != gold]
        chosen = sorted([gold, *others[: self._passages - 1]])
        documents = [Document(self._cut(question, question.passages[index])) for index in chosen]
        prompt = self.assemble(_SYSTEM, question.question, documents)
        if prompt is None:
            raise QuestionFileError(
                f"question {question.number}: no passage is long enough for a segment; leave it out"
            )
        return replace(
            prompt,
            answer=(*self.encode(question.answers[0]), self.end_id),
            acceptable=question.answers,
            type="passages",
        )

    def _cut(self, question: PassageQuestion, passage: str) -> str:
        sentences = _SENTENCE_END.split(passage)
        head = list(self._fit(sentences))
        answered = next((index for index, text in enumerate(sentences) if question.holds_answer(text)), 0)
        if answered < len(head):
            return " ".join(head)
        return " ".join(reversed(list(self._fit(sentences[answered::-1]))))

    def _fit(self, sentences: Sequence[str]) -> Iterator[str]:
        """The first sentences that the limit holds, and at least one."""
        tokens = 0
        for index, sentence in enumerate(sentences):
            tokens += len(self.encode(f"{sentence} "))
            if index and tokens > self._passage_tokens:
                return
            yield sentence
