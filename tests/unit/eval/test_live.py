"""Questions for a live endpoint, and what pairs of replies say."""

import json
from math import comb
from pathlib import Path

import pytest

from eval.live.errors import LiveEvaluationError
from eval.live.paired import Pair, compare_pairs, paired_interval, share_bounds
from eval.live.questions import is_accepted, read_live_questions


def _pair(number: int, off: str, compose: str, answer: str | None = "yes") -> Pair:
    rights = [None, None] if answer is None else [off == answer, compose == answer]
    return Pair(str(number), "?", off, compose, rights[0], rights[1], 40, 50)


def _tail(count: int, share: float, hits: range) -> float:
    return sum(comb(count, own) * share**own * (1 - share) ** (count - own) for own in hits)


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (0, 40), (3, 40), (20, 40), (39, 40), (40, 40)])
def test_bounds_leave_just_so_much_outside(hits: int, count: int) -> None:
    """The definition: at the bounds, what was seen or anything further out has a probability of 1.25 %."""
    low, high = share_bounds(hits, count)
    assert low == 0.0 if hits == 0 else _tail(count, low, range(hits, count + 1)) == pytest.approx(0.0125)
    assert high == 1.0 if hits == count else _tail(count, high, range(hits + 1)) == pytest.approx(0.0125)


def test_an_interval_of_many_questions_is_finite_and_holds_the_loss() -> None:
    low, high = paired_interval(300, 60, 4_400)
    assert low < 100 * 240 / 4_400 < high
    assert high - low < 5


def test_no_flip_leaves_room_for_a_loss() -> None:
    low, high = paired_interval(0, 0, 40)
    assert low == -high < 0


def test_pairs_are_counted_by_direction() -> None:
    pairs = [_pair(1, "yes", "yes"), _pair(2, "yes", "no"), _pair(3, "no", "yes"), _pair(4, "no", "nay")]
    result = compare_pairs([*pairs, _pair(5, "a", "b", None)])
    assert (result.questions, result.judged, result.changed, result.broken, result.mended) == (5, 4, 4, 1, 1)
    assert (result.off_right, result.compose_right, result.loss) == (50.0, 50.0, 0.0)
    assert [flip.direction for flip in result.flips] == ["broken", "mended", "changed", "changed"]
    assert result.composed_share == 80.0


def test_without_answers_only_changes_count() -> None:
    result = compare_pairs([_pair(1, "a", "b", None)])
    assert (result.changed, result.loss, result.loss_low) == (1, None, None)


def test_replies_are_judged() -> None:
    assert is_accepted(" In  1903. ", ("in 1903",), contained=False)
    assert not is_accepted("It was in 1903.", ("in 1903",), contained=False)
    assert is_accepted("It was in 1903.", ("1850", "in 1903"), contained=True)


def test_both_forms_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"question": "a?", "documents": ["one"]}\n\n{"id": 7, "question": "b?", "documents": [{"text": "x"}]}\n'
    )
    assert [(own.id, own.documents) for own in read_live_questions(lines)] == [
        ("0", ({"text": "one"},)),
        ("7", ({"text": "x"},)),
    ]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([{"question": "a?", "answers": ["b"], "ctxs": [{"title": "T", "text": "x"}]}]))
    assert read_live_questions(listed)[0].documents == ({"text": "x", "title": "T"},)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no question"),
        ("{", "file:1: no JSON"),
        ("3", "file:1: must be an object"),
        ('{"question": "a?"}', "documents must be a list"),
        ('{"question": "", "documents": ["x"]}', "question must be a text"),
        ('{"question": "a?", "documents": [3]}', r"documents\[0\]: must be a text or"),
        ('{"question": "a?", "documents": [{}]}', r"documents\[0\]: text must be a text"),
        ('{"question": "a?", "documents": ["x"], "answers": "b"}', "answers must be a list"),
        ('{"question": "a?", "documents": ["x"], "anwser": ["b"]}', "unknown field anwser"),
        ('{"id": 1, "question": "a?", "documents": ["x"]}\n{"question": "b?", "documents": ["x"]}', "two questions have one id"),
    ],
)  # fmt: skip
def test_a_malformed_file_names_line_and_field(content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(LiveEvaluationError, match=told):
        read_live_questions(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LiveEvaluationError, match="not readable"):
        read_live_questions(tmp_path / "none")
