"""The comparison with `transformers`: equal where the engine is right, and told where it is not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.results import read_results
from eval.comparison import Comparison, Difference, differences_path, write_comparison
from eval.oracle import Oracle, OracleOptions, compare, compare_answers
from eval.pack import NumberedPrompt
from eval.plans import SEED
from eval.prompts import PromptReader
from eval.question_sets import QuestionSet, SetKind
from eval.runner import load_prompts
from eval.scoring import Reference

CHECKPOINT = Path(__file__).resolve().parents[3] / "models" / "demo"
# The shortest prompts that there are.
QUESTIONS = QuestionSet(SetKind.PASSAGES, 2, SEED)


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    return PromptReader(CHECKPOINT)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(CHECKPOINT, "cpu")


@pytest.fixture(scope="module")
def prompts() -> list[NumberedPrompt]:
    return list(load_prompts(CHECKPOINT, [QUESTIONS]))


@pytest.fixture(scope="module")
def references(oracle: Oracle, prompts: Sequence[NumberedPrompt]) -> list[Reference]:
    """What an engine would say that computes just as the oracle does."""
    answers = [own.prompt.answer for own in prompts]
    found = oracle.log_probs([own.prompt.token_ids for own in prompts], answers)
    return [Reference(answer, log_probs) for answer, log_probs in zip(answers, found, strict=True)]


def test_the_engine_answers_as_transformers() -> None:
    found = compare_answers(OracleOptions(CHECKPOINT, "cpu", QUESTIONS, pack_prompts=2, workers=1))
    assert [own.question for own in found] == list(QUESTIONS.numbers)
    for own in found:
        assert own.difference is None
        assert own.engine_answer == own.oracle_answer
        assert own.engine_exact
        assert own.oracle_exact
        assert 0 < own.deviation < 1e-3


def test_another_token_is_found_and_the_oracle_goes_its_own_way(
    reader: PromptReader, oracle: Oracle, prompts: Sequence[NumberedPrompt], references: Sequence[Reference]
) -> None:
    right, wrong = references[0], references[1]
    # Behind the last word only the full stop and the end are left: the oracle's own way is short.
    place = len(wrong.answer) - 3
    other = int(wrong.log_probs[place].topk(2).indices[1])
    log_probs = wrong.log_probs.clone()
    log_probs[place, other] = log_probs[place].max() + 0.5
    answer = (*wrong.answer[:place], other, *wrong.answer[place + 1 :])
    equal, differing = compare(reader, oracle, prompts, [right, Reference(answer, log_probs)])
    assert equal.difference is None
    assert equal.deviation < 1e-4
    assert differing.difference is not None
    assert differing.difference.place == place
    assert differing.difference.engine_margin == pytest.approx(0.5, abs=1e-4)
    assert differing.difference.oracle_margin > 0
    assert differing.oracle_answer == reader.text(wrong.answer)
    assert differing.oracle_exact
    assert not differing.engine_exact
    assert differing.deviation >= 0.5


def test_rows_count_by_type(tmp_path: Path) -> None:
    equal = Comparison(1, "override", "4", "4", True, True, 1e-5, None)
    differing = replace(equal, question=2, engine_answer="5", engine_exact=False, difference=Difference(0, 0.1, 0.2))
    path = tmp_path / "oracle.json"
    line = write_comparison(path, "command", "device", [equal, differing, replace(equal, question=3, type="edge_fact")])
    assert line.startswith("2 of 3 answers are equal")
    values = {row.measure: row.value for row in read_results(path).rows}
    assert values["all / equal answers"] == 2
    assert values["override / exact match, engine"] == 50
    assert values["override / exact match, transformers"] == 100
    assert values["edge_fact / equal answers"] == values["edge_fact / questions"] == 1
    (told,) = json.loads(differences_path(path).read_text())
    assert told["question"] == 2
    assert told["difference"] == {"place": 0, "engine_margin": 0.1, "oracle_margin": 0.2}
