"""The line against what fair queueing promises: turns by work, whatever a tenant sends; as they came for one tenant."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from operator import is_

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.fair_line import FairLine
from services.worker.engine.requests import GenerateRequest, PromptPart, Serving
from services.worker.engine.sampling import SamplingOptions


@dataclass(frozen=True)
class Waiting:
    request: GenerateRequest


def waiting(tenant: str, work: int = 2, priority: int = 0, name: str = "") -> Waiting:
    parts = (PromptPart((1,) * (work - 1)),)
    return Waiting(
        GenerateRequest(name, parts, SamplingOptions(1), lambda _: None, priority=priority, tenant=tenant.encode())
    )


def drain(line: FairLine[Waiting]) -> list[Waiting]:
    return [line.pop() for _ in range(len(line))]


def names(items: list[Waiting]) -> list[str]:
    return [item.request.request_id for item in items]


def test_work_is_what_runs() -> None:
    stored = PromptPart((1,) * 50, Serving.SEGMENT, b"a")
    ordered = PromptPart((1,) * 7, Serving.SEGMENT, b"b", captures=True)
    request = GenerateRequest("r", (stored, ordered, PromptPart((1, 2))), SamplingOptions(10), lambda _: None)
    assert request.work == 7 + 2 + 10


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(2, 9)), max_size=12))
def test_one_tenant_is_served_by_priority_as_it_came(sent: list[tuple[int, int]]) -> None:
    line = FairLine[Waiting]()
    for index, (priority, work) in enumerate(sent):
        line.add(waiting("a", work, priority, str(index)))
    expected = sorted(range(len(sent)), key=lambda index: sent[index][0])
    assert names(drain(line)) == [str(index) for index in expected]


def test_a_late_request_of_a_quiet_tenant_waits_for_one_of_the_hot_ones() -> None:
    line = FairLine[Waiting]()
    for index in range(100):
        line.add(waiting("hot", 5, name=f"hot {index}"))
    served = [line.pop() for _ in range(20)]
    line.add(waiting("quiet", 5, name="quiet"))
    assert names([line.pop(), line.pop()]).count("quiet") == 1
    assert names(served) == [f"hot {index}" for index in range(20)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 20)), min_size=1, max_size=60),
    st.lists(st.booleans(), max_size=60),
)
def test_backlogged_tenants_get_equal_work(sent: list[tuple[str, int]], arrives: list[bool]) -> None:
    """While two tenants both wait, their work differs by no more than the largest request of each (Goyal et al., theorem 1)."""
    line, queue = FairLine[Waiting](), list(sent)
    backlog: Counter[str] = Counter()
    since: dict[frozenset[str], Counter[str]] = {}
    largest = {tenant: max((work for own, work in sent if own == tenant), default=0) for tenant in "abc"}
    steps = [*arrives, *([True] * len(queue)), *([False] * len(sent))]
    for is_arrival in steps:
        if is_arrival and queue:
            tenant, work = queue.pop(0)
            line.add(waiting(tenant, work))
            backlog[tenant] += 1
        elif not is_arrival and len(line):
            request = line.pop().request
            tenant = request.tenant.decode()
            for pair, done in since.items():
                if tenant in pair:
                    done[tenant] += request.work
            backlog[tenant] -= 1
        waits = {tenant for tenant in "abc" if backlog[tenant]}
        pairs = {frozenset(pair) for pair in ("ab", "ac", "bc") if set(pair) <= waits}
        since = {pair: since.get(pair, Counter()) for pair in pairs}
        for pair, done in since.items():
            one, other = sorted(pair)
            assert abs(done[one] - done[other]) <= largest[one] + largest[other]


def test_who_is_put_first_is_next_whatever_waits() -> None:
    line = FairLine[Waiting]()
    line.add(waiting("a", priority=-5, name="urgent"))
    line.put_first([waiting("b", name="second"), waiting("b", name="first")])
    line.add(waiting("c", priority=-9, name="more urgent"))
    assert line.head.request.request_id == "first"
    assert names(list(line)) == names(drain(line)) == ["first", "second", "more urgent", "urgent"]


def test_who_gives_up_is_taken_out() -> None:
    line = FairLine[Waiting]()
    for name in "abcd":
        line.add(waiting("t", name=name))
    assert names(line.take_out(lambda one: one.request.request_id in "bd")) == ["b", "d"]
    assert names(drain(line)) == ["a", "c"]


def test_what_waits_at_another_priority_counts_for_nothing() -> None:
    """Batch work that has not run keeps none of its tenant's other requests back, and what is urgent nobody's."""
    line = FairLine[Waiting]()
    for index in range(50):
        line.add(waiting("a", 10, 5, f"batch {index}"))
        line.add(waiting("b", 10, 0, f"b {index}"))
    line.add(waiting("a", 10, 0, "live"))
    line.add(waiting("b", 10, -1, "urgent"))
    assert line.pop().request.request_id == "urgent"
    line.add(waiting("c", 10, 0, "late"))
    assert {"live", "late"} < set(names([line.pop() for _ in range(4)]))


def test_what_gave_up_counts_for_nothing() -> None:
    line = FairLine[Waiting]()
    for index in range(50):
        line.add(waiting("a", 10, name=f"a {index}"))
        line.add(waiting("b", 10, name=f"b {index}"))
    line.take_out(lambda one: one.request.tenant == b"a")
    line.add(waiting("a", 10, name="again"))
    assert "again" in names([line.pop() for _ in range(2)])


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(2, 20), st.integers(-1, 1), st.integers(0, 3), st.integers(0, 20)
        ),
        max_size=40,
    )
)
def test_it_is_what_tags_at_the_head_of_flows_say(steps: list[tuple[str, int, int, int, int]]) -> None:
    """Against a list that is searched from the start: any requests, some of which leave in turn, out of turn or give up."""
    line, oracle = FairLine[Waiting](), _Oracle()
    for number, (tenant, work, priority, kind, place) in enumerate(steps):
        if kind < 2 or not oracle.waiting:
            item = waiting(tenant, work, priority, str(number))
            line.add(item)
            oracle.add(item)
        else:
            item = oracle.order()[place % len(oracle.waiting) if kind == 3 else 0]
            if kind == 3 and place % 2:
                assert line.take_out(partial(is_, item)) == [item]
                oracle.remove(item)
            else:
                line.serve(item)
                oracle.serve(item)
        assert names(list(line)) == names(oracle.order())
        assert len(line) == len(oracle.waiting)


class _Oracle:
    """Start-time fair queueing by the book, level by level; an empty level begins anew."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.starts: dict[tuple[int, str], float] = {}
        self.ends: dict[tuple[int, str], float] = {}
        self.clocks: defaultdict[int, float] = defaultdict(float)

    @staticmethod
    def flow(item: Waiting) -> tuple[int, str]:
        return item.request.priority, item.request.tenant.decode()

    def add(self, item: Waiting) -> None:
        flow = self.flow(item)
        if all(self.flow(other) != flow for other in self.waiting):
            self.starts[flow] = max(self.clocks[flow[0]], self.ends.get(flow, 0.0))
        self.waiting.append(item)

    def serve(self, item: Waiting) -> None:
        flow = self.flow(item)
        self.clocks[flow[0]] = max(self.clocks[flow[0]], self.starts[flow])
        self.starts[flow] += item.request.work
        self.remove(item)

    def remove(self, item: Waiting) -> None:
        flow = self.flow(item)
        self.waiting.remove(item)
        self.ends[flow] = self.starts[flow]
        if all(other.request.priority != flow[0] for other in self.waiting):
            self.ends = {own: end for own, end in self.ends.items() if own[0] != flow[0]}
            self.clocks.pop(flow[0], None)

    def order(self) -> list[Waiting]:
        tags, starts = dict[int, tuple[int, float, int]](), dict(self.starts)
        for number, item in enumerate(self.waiting):
            flow = self.flow(item)
            tags[number] = (flow[0], starts[flow], number)
            starts[flow] += item.request.work
        return [self.waiting[number] for number in sorted(tags, key=lambda number: tags[number])]


def test_who_fills_a_line_goes_first() -> None:
    line = FairLine[Waiting]()
    for index in range(5):
        line.add(waiting("hot", name=f"hot {index}"))
    line.add(waiting("quiet", name="quiet"))
    displaced = line.find_displaced(waiting("new"))
    assert displaced is not None
    assert displaced.request.request_id == "hot 4"
    assert line.find_displaced(waiting("hot")) is None
    assert line.find_displaced(waiting("new", priority=1)) is None
    # Where all have one, it is who comes last.
    fair = FairLine[Waiting]()
    for tenant in "abc":
        fair.add(waiting(tenant))
    assert fair.find_displaced(waiting("d")) is None
    assert FairLine[Waiting]().find_displaced(waiting("a")) is None
    # Who was put first has begun already.
    line.put_first([waiting("first", name="first")])
    assert line.find_displaced(waiting("new")) is displaced


def test_an_empty_line_forgets_and_a_long_one_forgets_what_is_past() -> None:
    line = FairLine[Waiting]()
    line.add(waiting("a", 1000))
    line.pop()
    line.add(waiting("a", 2, name="a"))
    line.add(waiting("b", 2, name="b"))
    assert names(drain(line)) == ["a", "b"]
    for index in range(5000):
        line.add(waiting("always there"))
        line.add(waiting(str(index)))
        if index:
            line.pop()
            line.pop()
    assert sum(len(level.ends) for level in line._levels.values()) < 4200
