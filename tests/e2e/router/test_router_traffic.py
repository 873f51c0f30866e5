"""The load's requests through a real router: nothing waits for anything, and every reply is accounted for."""

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from bench.traffic.bodies import Mode, body_of
from bench.traffic.client import Endpoint, TrafficError, find_model
from bench.traffic.connection import Target
from bench.traffic.measure import Cell, CellResult, Settings, measure_cell
from bench.traffic.record import Record
from bench.traffic.scrape import scrape
from bench.traffic.sender import Planned, Sending, encode, send_open
from bench.traffic.stream import Piece, TrafficRequest, TrafficStream
from bench.traffic.workload import read_workload
from services.router.settings import RouterSettings
from tests.router_stack import RouterStack
from tests.stub_worker import MODEL_NAME

HELD = 7


class Writer:
    """Of the stub's few words."""

    def text(self, piece: Piece) -> str:
        return f"{piece.name} {piece.version} " + " ".join(["the river"] * max(8, piece.tokens // 20))


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack(RouterSettings(max_requests_per_worker=3)) as running:
        yield running


def _endpoint(stack: RouterStack) -> Endpoint:
    return Endpoint(Target(stack.url), {}, [f"{stack.url}/metrics"])


def _planned(due: float, priority: int = 0, model: str = MODEL_NAME) -> Planned:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "where?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "priority": priority,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    return Planned(due, "tenant-0", encode(body))


def _send(stack: RouterStack, planned: list[Planned], is_over: Callable[[Sending, float], bool]) -> list[Record]:
    return asyncio.run(send_open(_endpoint(stack), planned, 20.0, is_over))


def test_a_request_that_waits_holds_up_no_later_one(stack: RouterStack) -> None:
    stack.worker.held_priority = HELD
    try:
        records = _send(
            stack, [_planned(0.0, HELD), _planned(0.05), _planned(0.1)], lambda state, elapsed: len(state.records) == 2
        )
    finally:
        stack.worker.held_priority = None
    assert [own.is_cut for own in records] == [True, False, False]
    assert [own.is_answered for own in records] == [False, True, True]
    assert all(0 < (own.first_token or 0) <= (own.end or 0) for own in records[1:])
    assert all(own.answer_tokens == 4 and own.served.total > 0 and own.reply for own in records[1:])


def test_what_is_shed_and_what_fails_is_told_apart(stack: RouterStack) -> None:
    async def send_past_held() -> tuple[list[Record], list[Record]]:
        is_done = asyncio.Event()
        held = [_planned(0.0001 * own, HELD) for own in range(3)]
        holding = asyncio.create_task(send_open(_endpoint(stack), held, 20.0, lambda *_: is_done.is_set()))
        while (await asyncio.to_thread(scrape, [f"{stack.url}/metrics"]))["hypic_num_requests_running"] < 3:  # noqa: ASYNC110 # its metrics
            await asyncio.sleep(0.02)
        shed = await send_open(_endpoint(stack), [_planned(0.0)], 20.0, lambda *_: False)
        is_done.set()
        return await holding, shed

    stack.worker.held_priority = HELD
    try:
        held, (shed,) = asyncio.run(send_past_held())
    finally:
        stack.worker.held_priority = None
    assert all(own.is_cut for own in held)
    assert shed.is_refused
    assert "every worker has 3 requests" in shed.fault
    (wrong,) = _send(stack, [_planned(0.0, model="nobody")], lambda *_: False)
    assert (wrong.status, wrong.is_refused) == (404, False)
    assert "nobody" in wrong.fault
    (gone,) = asyncio.run(send_open(Endpoint(Target("http://127.0.0.1:9"), {}), [_planned(0.0)], 5.0, lambda *_: False))
    assert gone.status == 0
    assert gone.fault


def test_a_cell_sends_what_it_draws_and_counts_tokens_as_they_were_served(stack: RouterStack) -> None:
    workload = read_workload("multi_document").scaled(0.02)
    # Few documents make hits in a short test.
    workload = workload.model_copy(update={"corpus": workload.corpus.model_copy(update={"documents": 12})})
    said: list[str] = []
    result = CellResult(Cell(workload, Mode.COMPOSE, MODEL_NAME, "a salt"))
    settings = Settings((30.0,), level_seconds=1.0, fill_requests=10, fill_concurrency=2)
    asyncio.run(measure_cell(_endpoint(stack), result, Writer(), settings, time.perf_counter() + 4.0, said.append))
    assert result.filled > 0
    assert result.levels
    assert len(said) == 1 + len(result.levels)
    for level, records in zip(result.levels, result.records, strict=True):
        assert level.answered + level.refused + level.failed + level.cut == level.counted <= len(records)
        assert level.failed == 0, level.faults
    tokens = [own.served for records in result.records for own in records if own.is_answered]
    assert sum(own.hit for own in tokens) > 0
    assert sum(own.live for own in tokens) > 0


def test_the_same_tokens_are_asked_for_in_every_mode(stack: RouterStack) -> None:
    requests = TrafficStream(read_workload("agent").scaled(0.01)).take(12)
    request = max(requests, key=lambda own: len(own.turns))
    assert isinstance(request, TrafficRequest)
    totals = set()
    for mode in Mode:
        body = body_of(request, mode, Writer(), MODEL_NAME, "salt") | {"stream": False, "stream_options": None}
        reply = stack.http.post("/v1/chat/completions", json={k: v for k, v in body.items() if v is not None})
        assert reply.status_code == 200, reply.text
        totals.add(reply.json()["usage"]["prompt_tokens"])
        assert reply.json()["hypic"]["reuse"] == mode
    assert len(totals) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(TrafficError, match=r"http://127\.0\.0\.1:9/v1/models: no answer"):
        find_model(Endpoint(Target("http://127.0.0.1:9"), {}))
