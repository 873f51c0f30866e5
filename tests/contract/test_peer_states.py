"""States pulled from another worker over real gRPC: the same bytes arrive, or none are used."""

import asyncio
import time
from pathlib import Path

import pytest

from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.peer_states import Source
from services.worker.adapters.transfers import Fetched
from services.worker.engine.loop import Engine
from services.worker.engine.prefill import Prefill
from services.worker.engine.requests import CaptureJob, CaptureSegment
from tests.contract.peer_pair import RECEIPT, Chunk, as_sent, has_free, is_, pair, planes_of, until
from tests.contract.served_worker import IDS, KEY


async def test_the_bytes_that_arrive_are_the_holders(tmp_path: Path) -> None:
    async with pair(tmp_path) as workers:
        await workers.holder.running.capture()
        assert await workers.fetch() == Fetched("same_host", "", "holder")
        assert await planes_of(workers.wanting) == await planes_of(workers.holder.running)
        assert workers.wanting.count("promotions", "same_host") == 1
        sent = sum(len(data) for planes in await planes_of(workers.wanting) for _, data in planes)
        assert workers.wanting.count("fetched_bytes", "same_host") == sent
        assert workers.wanting.tiers.policy.speed("same_host").bytes_per_second


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def flipped_data(chunks: list[Chunk]) -> list[Chunk]:
    chunks[5].data = _flip(chunks[5].data, len(chunks[5].data) // 2)
    return chunks


def flipped_checksum(chunks: list[Chunk]) -> list[Chunk]:
    chunks[3].checksum = _flip(chunks[3].checksum, 0)
    return chunks


def flipped_header(chunks: list[Chunk]) -> list[Chunk]:
    chunks[0].header = _flip(chunks[0].header, len(chunks[0].header) // 2)
    return chunks


def other_shape(chunks: list[Chunk]) -> list[Chunk]:
    chunks[1].shape[0] += 1
    return chunks


def other_dtype(chunks: list[Chunk]) -> list[Chunk]:
    chunks[1].dtype = "F128"
    return chunks


def endless_layer(chunks: list[Chunk]) -> list[Chunk]:
    chunks[1].layer_bytes = 1 << 60
    return chunks


DAMAGES = {
    "flipped_data": flipped_data,
    "flipped_checksum": flipped_checksum,
    "flipped_header": flipped_header,
    "other_shape": other_shape,
    "other_dtype": other_dtype,
    "endless_layer": endless_layer,
    "missing": lambda chunks: [*chunks[:4], *chunks[5:]],
    "twice": lambda chunks: [*chunks[:4], chunks[3], *chunks[4:]],
    "other_layer_first": lambda chunks: [chunks[0], *(one for one in chunks[1:] if one.layer), chunks[-1]],
    "ends_early": lambda chunks: chunks[:-3],
    "empty": lambda chunks: [],
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_what_is_damaged_on_the_way_is_not_used(damage: str, tmp_path: Path) -> None:
    """It leaves nothing behind, and the next fetch is a good one."""
    async with pair(tmp_path) as workers:
        await workers.holder.running.capture()
        free = await workers.wanting.free_pages()
        workers.holder.spoil = DAMAGES[damage]
        assert await workers.fetch() == Fetched(reason="blob_damaged")
        assert not await workers.wanting.holds()
        assert await workers.wanting.free_pages() == free
        assert workers.wanting.count("failed_fetches", "same_host") == 1
        workers.holder.spoil = as_sent
        fetched = await workers.fetch()
        assert fetched is not None
        assert fetched.source == "holder"


async def test_other_tokens_are_not_taken(tmp_path: Path) -> None:
    async with pair(tmp_path) as workers:
        await workers.holder.running.capture()
        assert await workers.fetch((*IDS[:-1], IDS[-1] ^ 1)) == Fetched(reason="blob_foreign")


async def test_the_next_holder_is_asked_where_one_fails(tmp_path: Path) -> None:
    async with pair(tmp_path) as workers:
        assert await workers.fetch() == Fetched(reason="blob_missing")
        await workers.holder.running.capture()
        workers.sources = (Source("gone", "127.0.0.1:1"), workers.source)
        fetched = await workers.fetch()
        assert fetched is not None
        assert (fetched.source, workers.wanting.count("failed_fetches", "same_host")) == ("holder", 2)
        workers.sources = (Source("gone", "127.0.0.1:1"),)
        await workers.wanting.drop()
        assert await workers.fetch() == Fetched(reason="worker_unreachable")


async def test_a_holder_that_stalls_costs_the_prompts_patience(tmp_path: Path) -> None:
    async with pair(tmp_path, fetch_seconds=0.5) as workers:
        await workers.holder.running.capture()
        workers.holder.pause_seconds = 5.0
        assert await workers.fetch() == Fetched(reason="fetch_timeout")
        await until(lambda: is_(workers.holder.num_running == 0))
        assert not await workers.wanting.holds()


async def test_a_prompt_that_leaves_ends_the_stream(tmp_path: Path) -> None:
    """At any moment; both sides hold no page of it."""
    async with pair(tmp_path) as workers:
        free = await workers.wanting.free_pages(), await workers.holder.running.free_pages()
        await workers.holder.running.capture()
        workers.holder.pause_seconds = 0.02
        for moment in (0.0, 0.005, 0.05, 0.1, 0.2):
            fetching = asyncio.create_task(workers.fetch())
            await asyncio.sleep(moment)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        await until(lambda: is_(workers.holder.num_running == 0))
        await until(lambda: has_free(workers.wanting, free[0]))
        await workers.holder.running.drop()
        await until(lambda: has_free(workers.holder.running, free[1]))


@pytest.fixture
def slow_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take a while for every layer."""
    advance = Prefill.advance

    def slowly(prefill: Prefill) -> int | None:
        time.sleep(0.15)
        return advance(prefill)

    monkeypatch.setattr(Prefill, "advance", slowly)


@pytest.mark.usefixtures("slow_layers")
async def test_layers_are_sent_while_later_ones_are_computed(tmp_path: Path) -> None:
    """The bytes are those that are stored in the end."""
    async with pair(tmp_path, num_layers=12) as workers:
        workers.holder.streams = True
        fetching = asyncio.create_task(workers.fetch(wait_seconds=10.0))
        await asyncio.sleep(0.05)
        capturing = asyncio.create_task(workers.holder.running.capture())
        fetched = await fetching
        await capturing
        assert fetched == Fetched("same_host", "", "holder")
        assert await planes_of(workers.wanting) == await planes_of(workers.holder.running)
        (first, _), *others = workers.holder.sent
        assert first.being_computed
        stored_by_then = [was_stored for _, was_stored in others]
        assert stored_by_then[0] is False
        assert stored_by_then[-1] is True
        # Computing is no measure of the way.
        assert workers.wanting.tiers.policy.speed("same_host").bytes_per_second is None
        assert workers.wanting.copies.copied == {KEY: ("holder", RECEIPT)}


@pytest.mark.usefixtures("slow_layers")
@pytest.mark.parametrize("layers", [0, 1, 3])
async def test_a_capture_that_is_given_up_under_its_readers(layers: int, tmp_path: Path) -> None:
    def give_up(running: Engine) -> bool:
        progress = running.find_capture(KEY)
        if progress is None or progress.layers_done < layers:
            return False
        running.cancel("given up")
        return True

    async with pair(tmp_path) as workers:
        free = await workers.wanting.free_pages(), await workers.holder.running.free_pages()
        workers.holder.streams = True
        engine = workers.holder.running.engine
        job = CaptureJob("given up", (CaptureSegment(KEY, IDS),), lambda _: None)
        await engine.call(lambda running: running.submit_capture(job))
        fetching = asyncio.create_task(workers.fetch(wait_seconds=0.5))
        await until(lambda: engine.call(give_up))
        fetched = await fetching
        assert fetched is not None
        assert fetched.reason in {"worker_unreachable", "blob_missing"}
        await until(lambda: has_free(workers.wanting, free[0]))
        await until(lambda: has_free(workers.holder.running, free[1]))


@pytest.mark.usefixtures("slow_layers")
async def test_a_second_source_goes_on_where_the_first_one_broke(tmp_path: Path) -> None:
    async with pair(tmp_path) as workers:
        await workers.holder.running.capture()
        half = len(await planes_of(workers.holder.running)) // 2

        def breaks(chunks: list[Chunk]) -> list[Chunk]:
            workers.holder.spoil = as_sent
            return [chunk for chunk in chunks if chunk.layer < half and not chunk.receipt]

        workers.holder.spoil = breaks
        workers.sources = (workers.source, Source("second", workers.source.address))
        fetched = await workers.fetch()
        assert fetched is not None
        assert fetched.source == "second"
        assert workers.holder.num_calls == 2
        assert await planes_of(workers.wanting) == await planes_of(workers.holder.running)
        assert workers.wanting.count("fetched_bytes", "same_host") < sum(
            len(data) for planes in await planes_of(workers.wanting) for _, data in planes
        )


async def test_prompts_share_a_stream(tmp_path: Path) -> None:
    """It goes on while one of them still waits."""
    async with pair(tmp_path) as workers:
        await workers.holder.running.capture()
        workers.holder.pause_seconds = 0.01
        first, *others = (asyncio.create_task(workers.fetch()) for _ in range(3))
        await asyncio.sleep(0.05)
        first.cancel()
        fetched = await asyncio.gather(*others)
        assert {one.source for one in fetched if one} == {"holder"}
        assert workers.holder.num_calls == 1


async def test_the_budget_bounds_what_is_held_at_once() -> None:
    budget, peak = ByteBudget(100), 0

    async def use(num_bytes: int) -> None:
        nonlocal peak
        async with budget.held(num_bytes):
            peak = max(peak, budget.held_bytes)
            await asyncio.sleep(0.001)

    await asyncio.gather(*(use(size) for size in (60, 30, 30, 250, 10, 90, 100, 1)))
    assert budget.held_bytes == 0
    # What is larger than the budget goes alone.
    assert peak == 250
    peak = 0
    await asyncio.gather(*(use(size) for size in (60, 30, 30, 10, 90, 100, 1) * 3))
    assert peak <= 100


async def test_whoever_leaves_while_waiting_for_the_budget_takes_nothing() -> None:
    budget = ByteBudget(100)
    async with budget.held(100):
        waiting = [asyncio.create_task(budget.held(50).__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert budget.held_bytes == 100
    async with asyncio.timeout(1), budget.held(100):
        pass
