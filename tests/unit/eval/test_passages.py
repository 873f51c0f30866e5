"""Questions over passages: how a file becomes prompts, and outcomes become rows."""

import json
from pathlib import Path

import pytest

from eval.passage_prompts import PassageReader, QuestionFileError, read_questions_file
from eval.passages import passage_rows
from eval.scoring import Outcome, Scores
from services.router.adapters.tokenizer import TwoWayTokenizer

DEMO = Path("models/demo")
_FILLER = " ".join(f"the market of town number {number} opens at nine." for number in range(60))


def _write(path: Path, *entries: object) -> Path:
    path.write_text(json.dumps(entries))
    return path


def _entry(*passages: str) -> dict[str, object]:
    return {"question": "where?", "answers": ["Port Louis"], "ctxs": [{"title": "", "text": text} for text in passages]}


@pytest.fixture(scope="module")
def reader() -> PassageReader:
    return PassageReader(DEMO, passages=3, passage_tokens=100)


def _texts(documents: tuple[tuple[int, ...], ...]) -> list[str]:
    tokenizer = TwoWayTokenizer((DEMO / "tokenizer.json").read_bytes())
    return [tokenizer.new_detokenizer().push(ids).strip() for ids in documents]


def test_only_questions_whose_answer_stands_in_a_passage(tmp_path: Path) -> None:
    path = _write(tmp_path / "q.json", _entry("nothing here"), _entry("the capital is port louis."))
    assert [own.number for own in read_questions_file(path)] == [1]


@pytest.mark.parametrize("content", ["{", "[3]", '[{"question": "?", "answers": ["x"]}]', '[{"question": "?"}]'])
def test_a_malformed_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(QuestionFileError, match=r"bad\.json"):
        read_questions_file(tmp_path / "bad.json")
    with pytest.raises(QuestionFileError, match=r"missing\.json"):
        read_questions_file(tmp_path / "missing.json")


def test_passages_are_cut_to_sentences_and_keep_the_answer(reader: PassageReader, tmp_path: Path) -> None:
    """The gold passage stands last in the file and its answer far in: it is among the three, and its cut ends with it."""
    others = [f"passage {letter}. {_FILLER}" for letter in "abcd"]
    path = _write(tmp_path / "q.json", _entry(*others, f"gold. {_FILLER} the capital is Port Louis. {_FILLER}"))
    prompt = reader.read(read_questions_file(path)[0])
    texts = _texts(prompt.documents)
    assert [text[:9] for text in texts[:2]] == ["passage a", "passage b"]
    assert texts[2].endswith("the capital is Port Louis.")
    assert all(text.endswith(".") for text in texts)
    # The wrapper adds two tokens.
    assert all(80 < len(ids) <= 102 for ids in prompt.documents)


def test_a_prompt_is_the_routers(reader: PassageReader, tmp_path: Path) -> None:
    path = _write(tmp_path / "q.json", _entry(f"the capital is Port Louis. {_FILLER}"))
    prompt = reader.read(read_questions_file(path)[0])
    (closing,) = _texts((prompt.closing,))
    assert closing.startswith("where?")
    assert prompt.opening[-len(reader.start()) :] == reader.start()
    assert len(prompt.opening) > len(reader.start())
    assert prompt.answer[-1] == reader.end_id
    assert reader.text(prompt.answer) == "Port Louis"


def _outcome(question: int, setting: str, divergence: float, f1: float) -> Outcome:
    return Outcome(question, setting, Scores("x", f1 == 1.0, f1, divergence == 0.0, divergence, divergence / 2), 8, 80)


def test_losses_are_paired_and_have_intervals() -> None:
    outcomes = [_outcome(question, "off", 0.0, 1.0) for question in range(4)]
    outcomes += [
        _outcome(question, "compose", 0.25 * question, 1.0 - 0.25 * question) for question in reversed(range(4))
    ]
    values = {row.measure: row.value for row in passage_rows(outcomes)}
    assert values["compose / answer KL"] == pytest.approx(0.375)
    assert values["compose / first token KL"] == pytest.approx(0.1875)
    assert values["compose / answers changed"] == 75.0
    assert values["compose / token F1 lost"] == pytest.approx(37.5)
    assert values["compose / token F1 lost, low end"] < 37.5 < values["compose / token F1 lost, high end"]
    assert values["compose / exact match lost"] == 75.0
    assert values["off / token F1 lost, high end"] == 0.0
    assert values["compose / live share"] == 10.0
