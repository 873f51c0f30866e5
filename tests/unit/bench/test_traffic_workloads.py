"""Workloads: what a description may say, and that requests drawn from the shipped ones are what was published."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.traffic.ideal import figures_of, ideal_reuse, least_recently_used_hits, optimal_hits, zipf_slope
from bench.traffic.lengths import Quantiles
from bench.traffic.stream import Piece, Removal, TrafficRequest, TrafficStream, Turn
from bench.traffic.workload import SHIPPED, Workload, WorkloadError, read_workload, shipped_names

# RAGPulse's week has so many requests.
WEEK = 7106
SMALL = """
name = "small"
title = "a small one"
[corpus]
documents = 12
tokens = [[0.0, 10], [1.0, 30]]
[request]
documents = 3
question_tokens = 4
answer_tokens = 2
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def _small(changes: str = "", text: str = SMALL) -> Workload:
    return Workload.model_validate(tomllib.loads(text + changes))


@pytest.mark.parametrize(
    ("changed", "by", "said"),
    [
        ("documents = 12", "documents = 0", "corpus.documents: Input should be greater than or equal to 1, not 0"),
        ("documents = 12", 'documents = "many"', "corpus.documents: Input should be a valid integer, not 'many'"),
        ("documents = 12", "documents = 2", "request.documents: asks for more documents than corpus.documents"),
        ("[corpus]", "[corpus]\nzip = 1.0", "corpus.zip is unknown; leave it out, or correct its name"),
        ("[corpus]", "[corpus]\nzipf = 9.0", "corpus.zipf: Input should be less than or equal to 5, not 9.0"),
        ("answer_tokens = 2", "", "request.answer_tokens is missing; the shipped workloads show what it means"),
        (
            "[[0.0, 10], [1.0, 30]]",
            "[[0.0, 30], [1.0, 10]]",
            "corpus.tokens: tokens must be at least 1 and must not fall",
        ),
        (
            "[[0.0, 10], [1.0, 30]]",
            "[[0.5, 30], [1.0, 40]]",
            "corpus.tokens: points must begin at share 0 and end at share 1",
        ),
        ("[[0.0, 10], [1.0, 30]]", '"long"', "corpus.tokens: must be a number of tokens, or points"),
        ("[request]", '[request]\nplace = "first_message"', "request.place: 'first_message' is of conversations alone"),
        ("[corpus]", "[arrivals]\nburst = 3.0\n[corpus]", "arrivals: burst must be over 1 with kind = 'bursty'"),
        ("[corpus]", "[corpus", "is no TOML"),
        ("[corpus]", "[[system]]\ntokens = 5\n[corpus]", "system.0: variants must be at least 1"),
    ],
)
def test_a_wrong_field_is_named(changed: str, by: str, said: str, tmp_path: Path) -> None:
    path = _write(tmp_path, SMALL.replace(changed, by, 1))
    with pytest.raises(WorkloadError) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_a_file_that_is_not_there_names_those_that_come_along() -> None:
    with pytest.raises(WorkloadError, match=r"nowhere\.toml: No such file.*rag_trace"):
        read_workload("nowhere.toml")
    assert len(shipped_names()) == len(list(SHIPPED.glob("*.toml"))) >= 6


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 5000)), min_size=1, max_size=6), st.floats(0, 1))
def test_quantiles_rise_and_are_met(steps: list[tuple[int, int]], share: float) -> None:
    shares = [0, *(sum(width for width, _ in steps[: index + 1]) for index in range(len(steps)))]
    tokens = [1, *(sum(height for _, height in steps[: index + 1]) for index in range(len(steps)))]
    points = tuple((own / shares[-1], float(number)) for own, number in zip(shares, tokens, strict=True))
    lengths = Quantiles(points)
    assert points[0][1] <= lengths.at(share) <= points[-1][1]
    assert all(abs(lengths.at(own) - number) <= 1 for own, number in points)
    assert lengths.at(share) <= lengths.at(min(1.0, share + 0.1))
    many = [lengths.at((index + 0.5) / 2000) for index in range(2000)]
    assert sum(many) / 2000 == pytest.approx(lengths.mean, rel=0.02, abs=1)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    first, again = (TrafficStream(_small()).draw(5.0, 20.0) for _ in range(2))
    other = TrafficStream(_small(text="seed = 2\n" + SMALL)).draw(5.0, 20.0)
    assert first == again != other


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 50), st.integers(0, 1000), st.sampled_from([1.0, 4.0]))
def test_arrivals_come_in_order_at_their_rate(rate: float, seed: int, burst: float) -> None:
    arrivals = f'[arrivals]\nkind = "bursty"\nburst = {burst}\n' if burst > 1 else ""
    stream = TrafficStream(_small(text=f"seed = {seed}\n" + SMALL + arrivals))
    seconds = 600 / rate
    times = [own.at for own in stream.draw(rate, seconds)]
    assert times == sorted(times)
    assert min(times) >= 0
    assert max(times) < seconds
    # Six times the deviation of 600 requests in bursts of so many.
    assert len(times) == pytest.approx(600, abs=6 * (600 * (2 * burst - 1)) ** 0.5)
    if burst > 1:
        assert len(set(times)) < 0.6 * len(times)


def test_documents_change_and_are_born_at_their_rates() -> None:
    stream = TrafficStream(
        _small(text=SMALL.replace("[request]", "updates_per_minute = 0.5\nbirths_per_minute = 0.25\n[request]"))
    )
    events = stream.draw(2.0, 3600.0)
    removals = [own for own in events if isinstance(own, Removal)]
    assert len(removals) == pytest.approx(0.75 * 12 * 60, rel=0.15)
    seen: dict[str, int] = {}
    gone: set[tuple[str, int]] = set()
    for event in events:
        if isinstance(event, Removal):
            if event.name in seen:
                gone.add((event.name, seen[event.name]))
            continue
        for piece in event.turns[-1].documents:
            # A version that was taken away never comes back.
            assert (piece.name, piece.version) not in gone
            seen[piece.name] = max(piece.version, seen.get(piece.name, 0))
    assert max(seen.values()) > 3
    assert len(seen) > 12


def test_conversations_grow_by_what_was_said_before() -> None:
    talk = SMALL.replace("[request]", '[request]\nplace = "first_message"')
    requests = TrafficStream(_small(text=talk + "[conversations]\nshare = 0.7\nmost_tokens = 200\n")).take(400)
    longer = [own for own in requests if len(own.turns) > 1]
    assert len(longer) == pytest.approx(0.6 * 400, rel=0.35)
    asked = {own.turns for own in requests}
    for request in longer:
        assert request.turns[:-1] in asked
        assert request.turns[0].documents
        assert not request.turns[-1].documents
        assert request.prompt_tokens <= 200


def test_tenants_share_nothing_and_a_hot_one_has_its_share() -> None:
    requests = TrafficStream(_small("[tenants]\ncount = 5\nhot_share = 0.6\n")).take(2000)
    counts = Counter(own.tenant for own in requests)
    assert counts["tenant-0"] / 2000 == pytest.approx(0.6, abs=0.05)
    owners: dict[str, set[str]] = {}
    for request in requests:
        for piece in request.turns[-1].documents:
            owners.setdefault(piece.name, set()).add(request.tenant)
    assert all(len(own) == 1 for own in owners.values())


def _request(system: str, documents: str, question: str, tenant: str = "a") -> TrafficRequest:
    pieces = tuple(Piece(name, 10) for name in documents)
    turn = Turn(pieces, Piece(question, 5), Piece(f"{question}!", 1))
    return TrafficRequest(0.0, tenant, (Piece(system, 5),), (turn,))


def test_ideal_reuse_is_what_a_look_at_every_piece_says() -> None:
    requests = [
        _request("s", "ab", "q"),
        _request("s", "ba", "r"),
        _request("s", "abc", "t"),
        _request("s", "ab", "u", "b"),
    ]
    found = ideal_reuse(requests)
    total = 30 + 30 + 40 + 30
    # The system prompt; then it and both documents; nothing of another tenant's.
    assert found.prefix == pytest.approx((5 + 25) / total)
    assert found.anywhere == pytest.approx((25 + 25) / total)
    assert least_recently_used_hits(requests[:3], room=2) == pytest.approx(4 / 7)
    assert zipf_slope(Counter({str(rank): 1000 // rank for rank in range(1, 30)})) == pytest.approx(-1.0, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_no_cache_has_more_hits_than_the_offline_optimum(names: list[str], room: int) -> None:
    requests = [_request("s", name, f"q{index}") for index, name in enumerate(names)]
    best = optimal_hits(requests, room)
    assert best >= least_recently_used_hits(requests, room)
    assert best * len(names) == pytest.approx(_most_hits(names, frozenset(), room))
    assert optimal_hits(requests, 6) == pytest.approx(1 - len(set(names)) / len(names))
    assert optimal_hits(requests, room, first=len(requests)) == 0.0


def _most_hits(names: list[str], held: frozenset[str], room: int) -> int:
    """By trying everything that could be dropped."""
    if not names:
        return 0
    first, *rest = names
    if first in held:
        return 1 + _most_hits(rest, held, room)
    grown = held | {first}
    if len(grown) <= room:
        return _most_hits(rest, grown, room)
    return max(_most_hits(rest, grown - {victim}, room) for victim in grown)


def test_the_rag_trace_is_as_ragpulse_was_published() -> None:
    requests = TrafficStream(read_workload("rag_trace")).take(WEEK, rate=WEEK / (7 * 86400))
    found = figures_of(requests)
    assert found.prompt_mean == pytest.approx(2944, rel=0.03)
    assert found.prompt_p50 == pytest.approx(3140, rel=0.05)
    assert found.prompt_p99 == pytest.approx(5439, rel=0.05)
    assert found.answer_mean == pytest.approx(283, rel=0.06)
    assert found.shares["system"] == pytest.approx(0.467, abs=0.015)
    assert found.shares["documents"] == pytest.approx(0.424, abs=0.015)
    assert found.shares["history"] == pytest.approx(0.091, abs=0.015)
    assert found.slope == pytest.approx(-1.0, abs=0.12)
    assert found.documents_used == pytest.approx(3235, rel=0.12)
    assert found.reuse.prefix == pytest.approx(0.314, abs=0.015)
    assert found.reuse.anywhere == pytest.approx(0.718, abs=0.03)
    assert least_recently_used_hits(requests, 1000) == pytest.approx(0.758, abs=0.025)
    brought = {len(own.turns[-1].documents) for own in requests}
    assert brought == {0, 6}


def test_conversations_are_as_mooncake_published_them() -> None:
    requests = TrafficStream(read_workload("conversations")).take(6000, rate=12031 / 3537)
    found = figures_of(requests)
    assert found.prompt_mean == pytest.approx(12035, rel=0.06)
    assert found.answer_mean == pytest.approx(343, rel=0.06)
    assert found.reuse.prefix == pytest.approx(0.366, abs=0.025)


@pytest.mark.parametrize(
    ("name", "shortest", "longest", "order_matters"),
    [
        ("multi_document", 8000, 32768, True),
        ("long_document", 8000, 32768, False),
        ("agent", 8000, 32768, False),
        ("few_shot", 8000, 32768, True),
    ],
)
def test_the_others_ask_for_long_prompts(name: str, shortest: int, longest: int, order_matters: bool) -> None:
    requests = TrafficStream(read_workload(name)).take(300)
    lengths = sorted(own.prompt_tokens for own in requests)
    assert lengths[len(lengths) // 2] >= shortest
    assert lengths[-1] <= longest
    found = ideal_reuse(requests)
    assert found.anywhere > 0.5
    assert (found.prefix < 0.3 * found.anywhere) is order_matters


def test_scaled_workloads_keep_their_shape() -> None:
    whole, part = (TrafficStream(own).take(200) for own in (read_workload("agent"), read_workload("agent").scaled(0.1)))
    mean = [sum(own.prompt_tokens for own in each) / 200 for each in (whole, part)]
    assert mean[1] == pytest.approx(0.1 * mean[0], rel=0.1)
