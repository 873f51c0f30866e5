"""`Generate` with orders to capture, of a real worker over real gRPC: what is published, reported, dropped and refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypic.v1 import worker_pb2

from services.common.errors import InvalidRequestError
from tests.contract.generating_worker import CALL_SECONDS, IDS, KEY, LAST, OTHER, OTHER_IDS, ServedWorker, run_worker


def ordered(key: bytes, ids: tuple[int, ...], fence: int) -> worker_pb2.PromptPart:
    part = worker_pb2.PromptPart(token_ids=ids, serving=worker_pb2.PART_SERVING_SEGMENT, key=key)
    part.capture.CopyFrom(worker_pb2.TicketRef(ticket_id=f"ticket-{fence}", fence=fence))
    return part


@pytest.fixture
async def worker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ServedWorker]:
    async with run_worker(tmp_path, turn_seconds=getattr(request, "param", CALL_SECONDS)) as running:
        yield running


async def test_a_refresh_is_served_counted_and_bounded_by_its_budget(worker: ServedWorker) -> None:
    """Without bound it says what a prompt without states says. Nothing is refreshed under a budget that is used up."""
    live = [worker_pb2.PromptPart(token_ids=ids, serving=LAST.serving) for ids in (IDS, OTHER_IDS)]
    expected = [token for event in await worker.generate(*live) for token in event.tokens.token_ids]
    states = [ordered(KEY, IDS, 7), ordered(OTHER, OTHER_IDS, 8)]
    await worker.generate(*states)
    for refresh in (worker_pb2.Refresh(blocks=1 << 20), worker_pb2.Refresh(budget_seconds=1e6)):
        events = await worker.generate(*states, refresh=refresh)
        assert [token for event in events for token in event.tokens.token_ids] == expected
        parts = events[0].prefilled.parts
        assert [part.live_tokens for part in parts] == [90, 120, 3]
        assert all(part.refreshed_tokens for part in parts[:2])
    one = (await worker.generate(*states, refresh=worker_pb2.Refresh(blocks=1)))[0].prefilled.parts
    assert sum(part.refreshed_tokens for part in one) in range(1, 17)
    late = (await worker.generate(*states, refresh=worker_pb2.Refresh(budget_seconds=1e-6)))[0].prefilled.parts
    assert not any(part.refreshed_tokens for part in late)
    with pytest.raises(InvalidRequestError, match=r"refresh\.budget_seconds"):
        await worker.generate(*states, refresh=worker_pb2.Refresh(budget_seconds=-1.0))


async def test_each_state_is_published_once_under_its_ticket(worker: ServedWorker) -> None:
    """A segment that stands twice is one state; counts, metrics and the reply agree."""
    again = worker_pb2.PromptPart(token_ids=IDS, serving=worker_pb2.PART_SERVING_SEGMENT, key=KEY)
    events = await worker.generate(ordered(KEY, IDS, 7), ordered(OTHER, OTHER_IDS, 8), again)
    assert [event.WhichOneof("event") for event in events] == ["prefilled", "tokens", "tokens", "tokens", "finished"]
    published = sorted((each.ticket_id, each.fence, each.key) for each in worker.cache.published)
    assert published == [("ticket-7", 7, KEY), ("ticket-8", 8, OTHER)]
    parts = events[0].prefilled.parts
    assert {part.serving for part in parts[:3]} == {worker_pb2.PART_SERVING_SEGMENT}
    assert [part.live_tokens + part.reused_tokens + part.captured_tokens for part in parts] == [90, 120, 90, 3]
    assert [bool(part.captured_tokens) for part in parts] == [True, True, False, False]
    assert [bool(part.reused_tokens) for part in parts] == [False, False, True, False]
    captured = sum(part.captured_tokens for part in parts)
    assert worker.metric("prompt_tokens_total", served="captured") == captured
    assert worker.metric("prompt_tokens_total", served="segment") == parts[2].reused_tokens
    assert worker.metric("captures_total", outcome="stored") == 2
    assert worker.metric("capture_time_seconds_count") == 2


async def test_warm_answers_are_the_cold_ones(worker: ServedWorker) -> None:
    cold = await worker.generate(ordered(KEY, IDS, 1), max_tokens=8)
    hit = worker_pb2.PromptPart(token_ids=IDS, serving=worker_pb2.PART_SERVING_SEGMENT, key=KEY)
    warm = await worker.generate(hit, max_tokens=8)
    assert warm[0].prefilled.parts[0].reused_tokens == cold[0].prefilled.parts[0].captured_tokens
    assert [event.tokens for event in warm] == [event.tokens for event in cold]
    assert len(worker.cache.published) == 1


async def test_what_is_ordered_anew_is_computed_anew(worker: ServedWorker) -> None:
    """The directory does not list it any more: it may have been revoked."""
    for fence in (1, 2):
        events = await worker.generate(ordered(KEY, IDS, fence))
        assert events[0].prefilled.parts[0].captured_tokens
    assert [each.fence for each in worker.cache.published] == [1, 2]
    assert worker.metric("captures_total", outcome="stored") == 2


async def test_no_token_waits_for_the_directory_and_nothing_unpublished_stays(worker: ServedWorker) -> None:
    worker.cache.publish_delay_seconds = 2 * CALL_SECONDS
    call = worker.start(ordered(KEY, IDS, 1), max_tokens=500)
    kinds = [(await call.next()).WhichOneof("event") for _ in range(2)]
    assert kinds == ["prefilled", "tokens"]
    assert await worker.holds(KEY)
    call.leave()
    await worker.until_gone(KEY)
    assert worker.cache.published == []


async def test_only_segments_are_captured(worker: ServedWorker) -> None:
    part = ordered(KEY, IDS, 1)
    part.serving = worker_pb2.PART_SERVING_LIVE
    with pytest.raises(InvalidRequestError, match=r"parts\[0\]\.capture"):
        await worker.generate(part)


async def test_the_state_behind_a_reply_is_kept_under_a_ticket(worker: ServedWorker) -> None:
    held = await worker.end_turn()
    assert await worker.keep(held) == ""
    ((key, fence),) = [(each.key, each.fence) for each in worker.cache.published]
    assert (key, fence) == (KEY, 3)
    state = await worker.engine.call(lambda engine: engine.context.store.get(KEY))
    assert state is not None
    assert state.token_ids[:3] == (1, 2, 3)
    assert state.token_ids[-2:] == (5, 9)
    assert len(state.token_ids) == 3 + 4 + 2
    await worker.until_gone(held)
    assert await worker.keep(held, OTHER) == "not_held"
    assert await worker.holds(KEY)
    assert not await worker.holds(OTHER)


async def test_what_the_router_does_not_want_goes_at_once(worker: ServedWorker) -> None:
    held = await worker.end_turn()
    await worker.stub.Drop(worker_pb2.DropRequest(keys=[held]), timeout=CALL_SECONDS)
    await worker.until_gone(held)
    assert await worker.keep(held) == "not_held"
    assert await worker.end_turn(stop=6) == b""
    assert worker.cache.published == []


@pytest.mark.parametrize("worker", [0.2], indirect=True)
async def test_what_no_router_asks_for_goes_after_its_time(worker: ServedWorker) -> None:
    held = await worker.end_turn()
    assert held
    # A timer of the worker's own loop, which is set before this one.
    await asyncio.sleep(0.5)
    assert await worker.keep(held) == "not_held"
    await worker.until_gone(held)


@pytest.mark.parametrize("worker", [0.0], indirect=True)
async def test_nothing_is_held_for_no_time(worker: ServedWorker) -> None:
    assert await worker.end_turn() == b""
