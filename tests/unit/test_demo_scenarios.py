"""What `make demo` asks each model: answers stand in the documents, and the revision changes one of them."""

import json

import pytest

from demo.scenario import FOLDER, QUESTIONS, load_scenario


@pytest.mark.parametrize("model", sorted(QUESTIONS))
def test_the_documents_hold_what_is_asked(model: str) -> None:
    scenario = load_scenario(model)
    ids = [document.id for document in scenario.documents]
    assert len(set(ids)) == len(ids)
    (original,) = [document for document in scenario.documents if document.id == scenario.revised.id]
    _, new_answer = scenario.revised_question
    assert new_answer in scenario.revised.text
    assert new_answer not in original.text
    assert scenario.revised.title == original.title
    requests = list(scenario.requests())
    assert {request.reuse for request in requests} == {"compose", "exact", "off"}
    assert len({request.documents for request in requests}) > 3


def test_the_demo_models_answers_are_held_to_the_word() -> None:
    (demo, *_), (real, *_) = (list(load_scenario(model).requests()) for model in ("demo", "smollm2"))
    assert demo.is_right(demo.answer)
    assert not demo.is_right(f"{demo.answer}.")
    assert real.is_right(f"It is {real.answer}.")
    assert not real.is_right("It is not said.")


def test_answers_of_the_real_model_are_words_of_the_documents() -> None:
    """Its replies are sentences, and right where the answer stands in them: no other document may bring it there."""
    scenario = load_scenario("smollm2")
    texts = [document.text for document in scenario.documents]
    for question, answer in scenario.questions:
        assert sum(answer in text for text in texts) == 1, question


def test_every_text_file_is_used() -> None:
    named = set()
    for file in QUESTIONS.values():
        content = json.loads((FOLDER / file).read_text())
        named |= {entry["file"] for entry in content["documents"]} | {content["revision"]["file"]}
    assert named == {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.txt")}
