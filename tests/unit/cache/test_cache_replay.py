"""The replay against a cache that is searched from end to end, readers of traces, and the command."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.cache.domain.eviction import POLICIES, Use
from services.cache.domain.values import Limits
from services.cache.replay import Costs, ReplayResult, distinct_bytes, replay
from services.cache.traces import RAGPULSE_LIKE, TraceError, TracePart, TraceRequest, TraceShape, draw_trace, read_trace
from services.cli.main import app
from services.cli.sizes import parse_capacity

COSTS = Costs(segment_bytes=10, token_bytes=1, seconds_per_token=1.0, seconds_per_hit=2.0, capture_share=0.5)
PARTS = [TracePart(name, tokens) for name, tokens in zip("abcdefgh", (1, 2, 5, 9, 14, 20, 30, 50), strict=True)]
TRACES = st.lists(
    st.tuples(st.sampled_from(["t1", "t2"]), st.lists(st.sampled_from([*PARTS, TracePart("", 7)]), max_size=4)),
    max_size=40,
).map(
    lambda drawn: tuple(TraceRequest(float(time), tenant, tuple(parts)) for time, (tenant, parts) in enumerate(drawn))
)


@dataclass
class Slow:
    tenant: str
    name: str
    size: int
    uses: int = 0
    score: float = 0.0

    @property
    def order(self) -> tuple[float, str]:
        return self.score, f"{self.tenant}\0{self.name}"


class SlowCache:
    """Lists of what is stored; room is made by looking at everything for each victim."""

    def __init__(self, policy: str, limits: Limits) -> None:
        self.policy, self.limits = POLICIES[policy], limits
        self.stored: list[Slow] = []
        self.clock = self.now = 0.0
        self.seen: dict[str, float] = {}
        self.sightings: dict[tuple[str, str], int] = {}

    def use(self, one: Slow) -> None:
        one.uses += 1
        one.score = self.policy(Use(one.uses, one.size - 10, one.size, self.now, self.clock))

    def make_room(self, tenant: str, size: int, busy: set[str]) -> bool:
        stay = list(self.stored)
        sharers = [name for name, seen in self.seen.items() if seen + self.limits.share_seconds > self.now]
        share = self.limits.budget_bytes / max(len(sharers), 1)

        def lowest(of: str) -> Slow | None:
            free = [one for one in stay if one.tenant == of and not (of == tenant and one.name in busy)]
            return min(free, key=lambda one: one.order, default=None)

        def may_go(one: Slow) -> bool:
            used = sum(other.size for other in stay if other.tenant == one.tenant)
            return one.tenant == tenant or one.tenant not in sharers or used - one.size >= share

        while sum(one.size for one in stay) + size > self.limits.budget_bytes:
            able = [one for one in map(lowest, {one.tenant for one in stay}) if one and may_go(one)]
            if not able:
                return False
            stay.remove(min(able, key=lambda one: one.order))
        self.clock = max([self.clock, *(one.score for one in self.stored if one not in stay)])
        self.stored = stay
        return True

    def serve(self, request: TraceRequest) -> set[str]:
        """The names that are there."""
        parts = {part.id: part for part in request.parts if part.id}
        if not parts:
            return set()
        self.now = self.seen[request.tenant] = request.time
        hits = [one for one in self.stored if one.tenant == request.tenant and one.name in parts]
        for one in hits:
            self.use(one)
        for name in parts.keys() - {one.name for one in hits}:
            known = (request.tenant, name)
            self.sightings[known] = self.sightings.get(known, 0) + 1
        for name, part in parts.items():
            new = Slow(request.tenant, name, COSTS.size_bytes(part))
            is_known = name in {one.name for one in hits}
            if is_known or self.sightings[request.tenant, name] < self.limits.min_uses:
                continue
            if self.make_room(request.tenant, new.size, set(parts)):
                self.use(new)
                self.stored.append(new)
        return {one.name for one in hits}


@pytest.mark.parametrize("policy", list(POLICIES))
@settings(deadline=None)
@given(TRACES, st.integers(20, 200), st.integers(1, 3), st.sampled_from([4.5, 1000.0]))
def test_a_replay_serves_what_a_slow_cache_serves(
    policy: str, trace: tuple[TraceRequest, ...], capacity: int, min_uses: int, share_seconds: float
) -> None:
    limits = Limits(capacity, share_seconds=share_seconds, min_uses=min_uses)
    slow, expected = SlowCache(policy, limits), ReplayResult()
    for request in trace:
        parts = {part.id: part for part in request.parts if part.id}
        hits = slow.serve(request)
        expected.requests += bool(parts)
        expected.hit_requests += bool(parts) and len(hits) == len(parts)
        for name, part in parts.items():
            expected.tokens += part.num_tokens
            expected.bytes += part.num_tokens + 10
            expected.hit_tokens += part.num_tokens * (name in hits)
            expected.hit_bytes += (part.num_tokens + 10) * (name in hits)
    found = replay(trace, POLICIES[policy], limits, COSTS)
    expected.captures, expected.evictions = found.captures, found.evictions
    expected.saved_seconds = found.saved_seconds
    assert found == expected


def test_saved_seconds_are_of_hits_less_captures() -> None:
    long, short = TracePart("long", 100), TracePart("short", 1)
    trace = [TraceRequest(float(time), "", (long, short, TracePart("", 9))) for time in range(3)]
    result = replay(trace, POLICIES["gdsf"], Limits(1000), COSTS)
    assert (result.captures, result.evictions, result.hit_requests) == (2, 0, 2)
    # A hit of the short one takes longer than computing it.
    assert result.saved_seconds == pytest.approx(2 * (100 - 2) - 0.5 * 101)
    assert (result.token_ratio, result.byte_ratio, result.request_ratio) == pytest.approx((2 / 3, 2 / 3, 2 / 3))


def test_the_default_policy_is_the_best_on_synthetic_traces() -> None:
    shapes = (
        replace(RAGPULSE_LIKE, requests=1500),
        TraceShape(requests=1500, documents=800),
        TraceShape(requests=1500, documents=800, once=2),
    )
    for shape in shapes:
        trace = draw_trace(shape, seed=5)
        capacity = distinct_bytes(trace, Costs()) // 10
        ratios = {name: replay(trace, score, Limits(capacity), Costs()).token_ratio for name, score in POLICIES.items()}
        assert ratios["gdsf"] > ratios["lru"] + 0.01
        assert ratios["gdsf"] >= ratios["lfu"] - 0.002


def test_a_drawn_trace_has_its_shape() -> None:
    shape = TraceShape(requests=2000, documents=300, parts=4, share_with_parts=0.5, tenants=2, once=1, rate=10.0)
    trace = draw_trace(shape, seed=1)
    assert trace == draw_trace(shape, seed=1) != draw_trace(shape, seed=2)
    assert len(trace) == 2000
    assert all(before.time < after.time for before, after in pairwise(trace))
    assert trace[-1].time == pytest.approx(200, rel=0.1)
    assert {request.tenant for request in trace} == {"tenant-0", "tenant-1"}
    assert sum(len(request.parts) > 1 for request in trace) == pytest.approx(1000, rel=0.1)
    names = {request.tenant: {part.id for part in request.parts} for request in trace}
    assert not names["tenant-0"] & names["tenant-1"]
    tokens = sorted(part.num_tokens for request in trace for part in request.parts)
    assert 16 <= tokens[0] <= tokens[-1] <= shape.longest_tokens


def test_our_own_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    later = {"time": 2, "tenant": "t", "parts": [{"id": 7, "tokens": 5, "bytes": 99}, {"tokens": 3}]}
    path.write_text(f"{json.dumps(later)}\n\n" + '{"time": 1.5, "parts": []}\n')
    assert read_trace(path) == (
        TraceRequest(1.5, "", ()),
        TraceRequest(2.0, "t", (TracePart("7", 5, 99), TracePart("", 3))),
    )


def test_public_traces(tmp_path: Path) -> None:
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [4, 8]}\n')
    assert read_trace(mooncake) == (TraceRequest(2.5, "", (TracePart("4", 512), TracePart("8", 188))),)
    lengths = {"1_sys_prompt": (1, 50), "2_passages": (2, 60), "3_history": (3, 7)}
    lengths |= {"4_user_input": (4, 8), "5_web_search": (5, 90)}
    for name, (identity, tokens) in lengths.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({f"{name[2:]}_id": identity, "token_length": tokens}))
    ids = {"sys_prompt": [1], "passages_ids": [2], "history": [3], "web_search": [5], "user_input": [4]}
    (tmp_path / "0_trace.jsonl").write_text(json.dumps({"timestamp": "82", "hash_ids": ids}) + "\n")
    (request,) = read_trace(tmp_path)
    assert request.time == 82.0
    assert request.parts[:2] == (TracePart("2", 60), TracePart("5", 90))
    assert sorted((part.id, part.num_tokens) for part in request.parts[2:]) == [("", 7), ("", 8), ("", 50)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ("[1]", "trace.jsonl:1: must be a JSON object"),
        ("nonsense", "trace.jsonl:1: is no JSON object"),
        ('{"time": 1}', "trace.jsonl:1: .*parts"),
        ('{"time": "soon", "parts": []}', "trace.jsonl:1: .*could not convert"),
        ('{"time": 1, "parts": [{"id": "a", "tokens": 0}]}', "tokens must be positive"),
        ('{"time": 1, "parts": [{"id": "a", "tokens": 1, "bytes": -1}]}', "bytes must not be negative"),
        ('{"time": NaN, "parts": []}', "time must be finite"),
    ],
)
def test_a_faulty_trace_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert "hypic replay" in result.stderr


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    request = {"time": 1, "parts": [{"id": "a", "tokens": 1024}]}
    path.write_text(f"{json.dumps(request)}\n{json.dumps(request)}\n")
    options = ["--capacity", "1GiB", "--policy", "gdsf", "--min-uses", "1", "--cost", "seconds_per_token=0.5"]
    table = CliRunner().invoke(app, ["replay", str(path), *options])
    assert table.exit_code == 0
    assert "50.0%" in table.stdout
    content = json.loads(CliRunner().invoke(app, ["replay", str(path), *options, "--json"]).stdout)
    assert content["requests"] == 2
    (line,) = content["replays"]
    assert (line["policy"], line["min_uses"], line["capacity_bytes"]) == ("gdsf", 1, 1 << 30)
    assert line["hit_ratio_tokens"] == line["hit_ratio_requests"] == line["hit_ratio_bytes"] == 0.5
    assert line["saved_seconds"] == pytest.approx(512 - 0.002 - 0.15 * 512)


@pytest.mark.parametrize(
    "option", [["--policy", "magic"], ["--cost", "speed=3"], ["--cost", "token_bytes"], ["--capacity", "much"]]
)
def test_a_faulty_option_is_named(tmp_path: Path, option: list[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1, "parts": []}')
    result = CliRunner().invoke(app, ["replay", str(path), *option])
    assert result.exit_code == 2
    assert option[0] in result.stderr


@pytest.mark.parametrize(
    ("text", "expected"), [("64GiB", 64 << 30), ("1.5 MiB", 3 << 19), ("1000", 1000), ("7B", 7), ("10%", 20)]
)
def test_capacities(text: str, expected: int) -> None:
    assert parse_capacity(text, 200) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0%", "5 apples", "nan"])
def test_what_is_no_capacity(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_capacity(text, 200)
