"""The example of a prompts file: what the demo model's users would ask, from the evaluation's questions, without their answers.

python -m eval.calibrate.example > demo/prompts.jsonl
"""

import json
from collections.abc import Iterator
from itertools import islice

from eval.question_sets import QuestionSet, SetKind, read_questions
from train.data import Question

__all__ = ["example_lines"]

# No seed of training or evaluation.
_SEED = 77
_COUNT = 64
# Of all documents of a prompt, so that a processor asks a prompt under all settings in some seconds.
_MOST_CHARACTERS = 2_800


def example_lines() -> Iterator[str]:
    """One prompt a line; the standard questions with the fewest words in their documents."""
    short = (own for own in read_questions(QuestionSet(SetKind.STANDARD, 100 * _COUNT, _SEED)) if _is_short(own))
    for question in islice(short, _COUNT):
        documents = [{"title": own.title, "text": own.text} for own in question.documents]
        content = {"documents": documents, "question": question.question}
        if question.system:
            content = {"system": question.system} | content
        yield json.dumps(content, ensure_ascii=False)


def _is_short(question: Question) -> bool:
    return sum(len(own.text) for own in question.documents) <= _MOST_CHARACTERS


def main() -> None:
    """Print them."""
    for line in example_lines():
        print(line)


if __name__ == "__main__":
    main()
