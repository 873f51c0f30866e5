"""The checks of answers, and of what an overload leaves, see what they are there to see."""

import math

from bench.traffic.answers import AnswersPlan, AnswersResult, rows_of
from bench.traffic.library import Asked, FactLibrary, Verdict, judge
from bench.traffic.overload import OverloadPlan, summarise_overload
from bench.traffic.record import Record


def test_every_version_of_a_document_says_something_else() -> None:
    asked = FactLibrary(seed=3, scenes=3).ask(rate=1.0, count=120, updates_per_second=0.5)
    assert [own.due for own in asked] == sorted(own.due for own in asked)
    changes = [own for own in asked if own.body is None]
    questions = [own for own in asked if own.body is not None]
    assert len(questions) == 120
    assert 30 < len(changes) < 100
    texts: dict[str, set[str]] = {}
    for own in questions:
        assert own.body is not None
        by_id = {each["id"]: each["text"] for each in own.body["documents"]}
        assert len(by_id) == 8
        # The answer stands in the document that is asked about, and no other version's does.
        assert own.answer in by_id[own.document]
        assert own.others
        assert own.answer not in own.others
        texts.setdefault(own.document, set()).add(by_id[own.document])
    assert max(map(len, texts.values())) >= 3
    again = FactLibrary(seed=3, scenes=3).ask(rate=1.0, count=120, updates_per_second=0.5)
    assert asked == again


def test_a_reply_from_another_version_is_seen() -> None:
    asked = Asked(0.0, "d", {}, "1903", frozenset({"1851", "1777"}))
    assert judge(asked, "1903.") == Verdict(True, False)
    assert judge(asked, " 1851") == Verdict(False, True)
    assert judge(asked, "1852") == Verdict(False, False)


def _answers(broken: int, stale: int) -> AnswersResult:
    return AnswersResult(100, 90, 90 - broken, broken, 0, stale, (), 0.1, 0.2, 0.7, {"evicted_entries": 3.0})


def test_answers_are_good_within_chance_and_with_nothing_stale() -> None:
    assert _answers(0, 0).is_good
    assert _answers(2, 0).is_good
    assert not _answers(20, 0).is_good
    assert not _answers(0, 1).is_good
    named = {row.measure: row.value for row in rows_of(_answers(20, 1), AnswersPlan(100, 2.0, 0.1, 3))}
    assert named["answers that another version of a document says"] == 1
    assert named["evicted entries under load"] == 3


def test_an_overload_is_split_into_taken_refused_and_recovery() -> None:
    plan = OverloadPlan(promise=1.0, rate=5.0, factor=2.0, seconds=10.0)
    taken = [Record("t", own / 10, status=200, first_token=1.2, end=2.0) for own in range(50)]
    refused = [Record("t", 5 + own / 10, status=429, end=0.01) for own in range(45)]
    failed = [Record("t", 9.9, status=500, end=0.1, fault="broken")]
    late = [Record("t", 10 + own, status=200, first_token=1.5 if own < 4 else 0.2, end=2.0) for own in range(10)]
    found = summarise_overload([*taken, *refused, *failed, *late], plan)
    assert (found.taken, found.refused, found.failed) == (50, 45, 1)
    assert (found.taken_p95, found.refusal_p95, found.recovery_seconds) == (1.2, 0.01, 3.0)
    never = [Record("t", 10 + own, status=200, first_token=5.0, end=6.0) for own in range(10)]
    assert math.isinf(summarise_overload([*taken, *never], plan).recovery_seconds)
