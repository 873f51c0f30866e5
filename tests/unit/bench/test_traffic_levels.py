"""What levels say of promises, and which rates are tried."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.results import Row
from bench.traffic.bodies import Mode
from bench.traffic.levels import Level, holds, summarise
from bench.traffic.measure import Cell, CellResult
from bench.traffic.record import Record, ServedTokens
from bench.traffic.report import rows_of
from bench.traffic.scrape import difference, read_metrics
from bench.traffic.search import RateSearch
from bench.traffic.stream import Piece
from bench.traffic.wording import CANDIDATES, Wording, WordingError, learn_words
from bench.traffic.workload import read_workload

PROMISES = (0.3, 1.0, 3.0)


def _record(due: float, first: float, lag: float = 0.0) -> Record:
    return Record("t", due, lag, 200, first, first + 0.2, (0.1, 0.1), 3, ServedTokens(10, 70, 10, 10), 0.01)


def _level(rate: float, first: float, count: int = 100, late: int = 0, drift: float = 0.0) -> Level:
    records = [_record(index / rate, first + drift * index / count) for index in range(count - late)]
    records += [_record((count - late + index) / rate, 60.0) for index in range(late)]
    return summarise(records, rate, count / rate, PROMISES, {})


def test_a_level_counts_what_came_behind_its_lead() -> None:
    refused = Record("t", 9.0, status=429, end=0.01, fault="full")
    broken = Record("t", 9.5, status=200, end=0.5, fault="the stream was cut off")
    cut = Record("t", 9.9, is_cut=True)
    level = summarise(
        [*(_record(own / 10, 0.2) for own in range(90)), refused, broken, cut], 10.0, 10.0, PROMISES, {"x": 1.0}
    )
    assert (level.counted, level.answered, level.refused, level.failed, level.cut) == (78, 75, 1, 1, 1)
    assert level.tokens == {"prefix": 750, "hit": 5250, "cold": 750, "live": 750}
    assert level.cold_share == pytest.approx(0.1)
    assert level.first_token_p50 == 0.2
    assert math.isinf(level.first_token_p99)
    assert level.goodput["0.3"] == pytest.approx(75 / 8.5)
    assert level.faults == ["the stream was cut off"]
    assert level.as_json()["first_token_p99"] is None


def test_a_promise_is_kept_by_95_of_100_and_not_by_a_queue_that_still_grows() -> None:
    assert holds(_level(10, 0.25), 0.3)
    assert holds(_level(10, 0.25, late=4), 0.3)
    assert not holds(_level(10, 0.25, late=6), 0.3)
    assert not holds(_level(10, 0.5), 0.3)
    assert not holds(_level(10, 0.1, drift=2.8), 3.0)
    late = summarise([_record(own / 10, 0.1, lag=0.2) for own in range(50)], 10, 5.0, PROMISES, {})
    assert late.behind
    assert not holds(late, 3.0)
    assert not holds(summarise([], 10, 5.0, PROMISES, {}), 3.0)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 300), st.floats(0.02, 300))
def test_a_search_finds_the_rates_of_a_server_that_has_them(capacity: float, start: float) -> None:
    """First tokens of a queue with one server grow as 1 / (1 − load); at the capacity they never come."""

    def first_token(rate: float) -> float:
        return 0.1 / (1 - rate / capacity) if rate < capacity else math.inf

    search = RateSearch(PROMISES, start)
    for _ in range(60):
        if (rate := search.next_rate()) is None:
            break
        search.add(_level(rate, min(first_token(rate), 1e6)))
    else:
        raise AssertionError("the search does not end")
    for bracket in search.brackets:
        true = capacity * (1 - 0.1 / bracket.promise)
        assert bracket.is_closed
        assert bracket.held <= true <= (bracket.failed or 0)
    assert len(search.levels) < 45


def test_a_promise_that_requests_alone_do_not_keep_is_given_up() -> None:
    search = RateSearch((0.3, 1.0), 2.0)
    search.add(replace(_level(2.0, 0.5), metrics={"running": 0.2}))
    assert search.bracket(0.3).is_closed
    assert search.bracket(0.3).held == 0
    assert not search.bracket(1.0).is_closed
    assert (search.next_rate() or 0) > 2.0
    busy = RateSearch((0.3,), 2.0)
    busy.add(replace(_level(2.0, 0.5), metrics={"running": 2.0}))
    assert not busy.bracket(0.3).is_closed


def test_what_is_cut_keeps_the_time_of_its_first_token() -> None:
    records = [_record(own / 10, 0.2) for own in range(50)]
    cut = [replace(own, end=None, is_cut=True) for own in records[25:]]
    level = summarise([*records[:25], *cut], 10.0, 5.0, PROMISES, {})
    assert level.first_token_p99 == 0.2
    assert level.cut == 25


def test_a_rate_that_failed_by_its_tail_alone_is_measured_again() -> None:
    search = RateSearch((1.0,), 4.0)
    search.add(_level(4.0, 0.1, late=20))
    assert search.next_rate() == 4.0
    search.add(_level(4.0, 0.1))
    assert search.bracket(1.0).held == 4.0
    again = RateSearch((1.0,), 4.0)
    for _ in range(2):
        again.add(_level(4.0, 0.1, late=20))
    assert again.bracket(1.0).failed == 4.0
    assert (again.next_rate() or 9.0) < 4.0


def test_rows_set_modes_beside_each_other() -> None:
    workload = read_workload("few_shot")
    results = []
    for mode, rate in ((Mode.EXACT, 4.0), (Mode.COMPOSE, 10.0)):
        search = RateSearch((1.0,), rate)
        search.add(_level(rate, 0.2))
        search.add(_level(rate * 1.1, 5.0))
        results.append(CellResult(Cell(workload, mode, "m", "s"), search.brackets, search.levels))
    rows = list(rows_of(results))
    assert rows[0] == Row("requests a second at TTFT p95 ≤ 1 s, compose over exact", 2.5, "×", 2.0)
    named = {row.measure: row.value for row in rows}
    assert named["requests a second at TTFT p95 ≤ 1 s, compose (not at 11)"] == 10.0
    assert named["cold tokens, exact"] == pytest.approx(10.0)


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a b\na_total{x="1"} 2\na_total{x="2"} 3.5\nb 1e3\nhypic:bad 1\n'
    assert read_metrics(text) == {"a_total": 5.5, "b": 1000.0}
    assert difference({"a_total": 1.0}, {"a_total": 5.5}, {"as": "a_total", "none": "c"}) == {"as": 4.5}


def test_words_are_those_that_the_server_has_as_one_token() -> None:
    def count(text: str) -> int:
        # Words of more than five letters are two tokens; a template adds seven.
        return 7 + sum(1 + (len(word) > 5) for word in text.split())

    words = learn_words(count)
    assert set(words) == {word for word in CANDIDATES if len(word) <= 5}
    wording = Wording(words, seed=1)
    piece = Piece("document-1", 300, 2)
    assert count(wording.text(piece)) == 307
    assert wording.text(piece) == Wording(words, seed=1).text(piece)
    others = {wording.text(Piece("document-1", 300, 3)), wording.text(Piece("document-2", 300, 2))}
    assert wording.text(piece) not in others
    with pytest.raises(WordingError, match="only 0 of"):
        learn_words(lambda text: 3 * len(text))
