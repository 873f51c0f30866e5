"""The checks of answers, and of what an overload leaves, see what they are there to see."""

import math

import pytest

from bench.traffic.answers import AnswersPlan, AnswersResult, rows_of
from bench.traffic.levels import summarise
from bench.traffic.library import Asked, FactLibrary, Verdict, judge
from bench.traffic.neighbours import NeighboursPlan, NeighboursResult, quiet_times
from bench.traffic.neighbours import rows_of as neighbours_rows
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


def test_quiet_tenants_are_those_that_are_not_the_first() -> None:
    records = [Record(f"tenant-{own % 3}", float(own), status=200, first_token=0.1 * own, end=9.0) for own in range(12)]
    records.append(Record("tenant-1", 11.5, status=429, end=0.1))
    # Of twelve seconds the first 1.8 are not counted.
    assert quiet_times(records, 12.0) == pytest.approx([0.2, 0.4, 0.5, 0.7, 0.8, 1.0, 1.1, math.inf])
    level = summarise(records, 1.0, 12.0, (), {"evicted_entries": 2.0})
    result = NeighboursResult([0.1] * 20, [0.13] * 20, level, 0.0)
    rows = {row.measure: row.value for row in neighbours_rows(result, NeighboursPlan(2.0, 12.0))}
    assert rows["quiet tenants' TTFT p95 beside a hot one over alone, 2 requests a second of all"] == pytest.approx(1.3)
    assert rows["evicted entries"] == 2.0
