"""The same questions to both engines over the same states, with the documents in ever new orders."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.results import Row
from bench.vllm.server import MODEL
from bench.vllm.stack import Pair, post
from eval.live.questions import normalise
from train.data import Question, QuestionType, questions

__all__ = ["Answers", "answer_rows", "ask_all"]

# Of these the answer does not depend on the order of the documents.
_TYPES = (
    QuestionType.ONE_FACT,
    QuestionType.TWO_DOCUMENTS,
    QuestionType.COMPARISON,
    QuestionType.DEFINITION,
    QuestionType.EDGE_FACT,
    QuestionType.UNANSWERABLE,
)
# Two neighbours among bf16 numbers of the size of a logit differ by so much, in units of the natural logarithm.
_NOISE = 0.125


@dataclass(slots=True)
class Answers:
    """Counts over all prompts. differing: those whose first tokens are not equal, and how far apart our engine held the two."""

    questions: int = 0
    asked: int = 0
    first_equal: int = 0
    whole_equal: int = 0
    right_own: int = 0
    right_theirs: int = 0
    from_state: int = 0
    hits: int = 0
    segments: int = 0
    differing: list[str] = field(default_factory=list)
    beyond_noise: int = 0


def ask_all(pair: Pair, scenes: int, orders: int, seed: int = 20261) -> Answers:
    """`orders` prompts of each of so many questions: the documents as they are, then shuffled."""
    answers = Answers()
    for number, question in enumerate(questions(seed, scenes, types=_TYPES, factbook_share=0.0)):
        answers.questions += 1
        for order in range(orders):
            documents = list(question.documents)
            if order:
                random.Random(f"{seed}/{number}/{order}").shuffle(documents)
            _ask(pair, question, _body(question, documents), f"question {number}, order {order}", answers)
    return answers


def _body(question: Question, documents: list[Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": question.system}] if question.system else []
    return {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
        "documents": [{"title": each.title, "text": each.text} for each in documents],
        "messages": [*messages, {"role": "user", "content": question.question}],
        "hypic": {"explain": True},
    }


def _ask(pair: Pair, question: Question, body: dict[str, Any], name: str, answers: Answers) -> None:
    own, theirs = (post(f"{url}/v1/chat/completions", body) for url in (pair.own, pair.theirs))
    answers.asked += 1
    answers.from_state += theirs["hypic"]["decode"]["began_from"] == "state"
    segments = [part for part in theirs["hypic"]["parts"] if part["kind"] == "segment"]
    answers.segments += len(segments)
    answers.hits += sum(part["served"] == "hit" for part in segments)
    texts = [reply["choices"][0]["message"]["content"] for reply in (own, theirs)]
    accepted = {normalise(each) for each in question.acceptable}
    answers.right_own += normalise(texts[0]) in accepted
    answers.right_theirs += normalise(texts[1]) in accepted
    answers.whole_equal += texts[0] == texts[1]
    first, other = (reply["choices"][0]["logprobs"]["content"][0] for reply in (own, theirs))
    if first["token"] == other["token"]:
        answers.first_equal += 1
        return
    best, second = (each["logprob"] for each in first["top_logprobs"])
    answers.beyond_noise += best - second > _NOISE
    answers.differing.append(f"{name}: {first['token']!r} and {other['token']!r}, {best - second:.3f} apart")


def answer_rows(answers: Answers) -> Iterator[Row]:
    """What is aimed at first."""
    asked = answers.asked
    yield Row("questions, each over documents of its own", answers.questions, "", 200.0)
    yield Row("prompts: each question with its documents as they come, then in other orders", asked, "")
    yield Row("first tokens equal to our own engine's", answers.first_equal, "", float(asked))
    yield Row("first tokens that differ though the two likeliest are further apart than bf16 tells", answers.beyond_noise, "",
              0.0, better="lower")  # fmt: skip
    yield Row("whole replies equal to our own engine's", answers.whole_equal, "")
    yield Row("right answers, decoded by vLLM", 100 * answers.right_theirs / asked, "%")
    yield Row("right answers, decoded by our own engine", 100 * answers.right_own / asked, "%")
    yield Row("replies that vLLM began from the composed state", 100 * answers.from_state / asked, "%", 100.0)
    yield Row("segments served from stored states", 100 * answers.hits / answers.segments, "%")
