"""A decode state that a worker holds for another engine: what is sent, who may read it and how often, and when it is freed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch
from hypic.v1 import worker_pb2

from services.blob.layout import CHECKSUM_BYTES, parse_header
from services.blob.planes import Plane
from services.blob.tensors import tensor_of
from services.common.errors import OverloadedError
from services.router.adapters.generate_stream import GenerateCall
from services.worker.adapters.held_states import HoldLimits
from services.worker.engine.loop import Engine
from services.worker.mixers.paged_attention import PagedAttention
from tests.contract.generating_worker import (
    CALL_SECONDS,
    IDS,
    KEY,
    LAST,
    OTHER,
    OTHER_IDS,
    ServedWorker,
    all_events,
    request_writer,
    run_worker,
)
from tests.contract.test_worker_generate import ordered

_ORDERED = (ordered(KEY, IDS, 1), ordered(OTHER, OTHER_IDS, 2))
_HITS = [
    worker_pb2.PromptPart(token_ids=ids, serving=worker_pb2.PART_SERVING_SEGMENT, key=key)
    for key, ids in ((KEY, IDS), (OTHER, OTHER_IDS))
]
_PROMPT = (*IDS, *OTHER_IDS, *LAST.token_ids)


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[ServedWorker]:
    async with run_worker(tmp_path) as running:
        yield running


def _hold(worker: ServedWorker, seconds: float = 0.0) -> GenerateCall:
    request = worker_pb2.GenerateRequest(
        parts=[*_HITS, LAST],
        sampling=worker_pb2.Sampling(max_tokens=1),
        hold=worker_pb2.HoldOrder(seconds=seconds),
    )
    return worker.stream.begin(request_writer(request), CALL_SECONDS)


async def _held(call: GenerateCall) -> worker_pb2.Held:
    events = [await call.next(), await call.next()]
    assert [each.WhichOneof("event") for each in events] == ["prefilled", "held"]
    return events[1].held


async def _take(worker: ServedWorker, handle: bytes) -> list[worker_pb2.Chunk]:
    return [chunk async for chunk in worker.stub.Take(worker_pb2.TakeRequest(handle=handle), timeout=CALL_SECONDS)]


async def _expected(worker: ServedWorker) -> list[dict[str, torch.Tensor]]:
    """The planes of the one held prompt, worked out token by token from the page table, in fp64."""

    def read(engine: Engine) -> list[dict[str, torch.Tensor]]:
        (prompt,) = engine.held
        memory, layers = engine.context.memory, []
        pools, slots = iter(memory.page_pools), iter(memory.linear_slots)
        for layer in engine.context.model.layers:
            if not isinstance(layer.mixer, PagedAttention):
                own = next(slots)
                layers.append({"state": own.states[prompt.slot].clone(), "tail": own.tails[prompt.slot].clone()})
                continue
            pool, rotary = next(pools), layer.mixer.rotary
            assert rotary is not None
            keys, values = [], []
            for row in sorted(prompt.table.rows, key=lambda row: row.first):
                for place in range(row.count):
                    key = pool.keys[row.page, row.offset + place].double()
                    angles = row.base * rotary.frequencies.double()
                    first, second, rest = key.split([rotary.half, rotary.half, key.shape[-1] - 2 * rotary.half], -1)
                    turned = torch.view_as_complex(torch.stack([first, second], -1)) * torch.polar(
                        torch.ones_like(angles), angles
                    )
                    keys.append(torch.cat([turned.real, turned.imag, rest], -1))
                    values.append(pool.values[row.page, row.offset + place].clone())
            layers.append({"keys": torch.stack(keys), "values": torch.stack(values)})
        return layers

    return await worker.engine.call(read)


async def _until_free(worker: ServedWorker, pages: int) -> None:
    """Pages and slots come back behind the end of a stream."""
    async with asyncio.timeout(CALL_SECONDS):
        while await worker.engine.call(lambda engine: len(engine.held)):  # noqa: ASYNC110 # the engine's thread frees it
            await asyncio.sleep(0.005)
    assert await worker.engine.call(lambda engine: engine.context.pages.num_free) == pages


async def _captured(worker: ServedWorker) -> int:
    """Both segments are stored; the pages that are free now."""
    await worker.generate(*_ORDERED)
    return await worker.engine.call(lambda engine: engine.context.pages.num_free)


async def test_the_state_is_the_prompts_with_keys_at_their_true_positions(worker: ServedWorker) -> None:
    await _captured(worker)
    call = _hold(worker)
    held = await _held(call)
    expected = await _expected(worker)
    chunks = await _take(worker, held.handle)
    header = chunks[0].header
    said = parse_header(header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:], len(header))
    assert said.token_ids == _PROMPT
    assert held.num_tokens == len(_PROMPT)
    read: dict[tuple[int, str], torch.Tensor] = {}
    size = 0
    for chunk in chunks[1:]:
        assert chunk.checksum, "planes of this model are smaller than a chunk"
        plane = Plane(chunk.layer, chunk.plane, chunk.dtype, tuple(chunk.shape), chunk.data)
        read[chunk.layer, chunk.plane] = tensor_of(plane)
        size += len(chunk.data)
    assert held.size_bytes == size
    assert read.keys() == {(index, name) for index, planes in enumerate(expected) for name in planes}
    for index, planes in enumerate(expected):
        for name, own in planes.items():
            assert torch.allclose(read[index, name].double(), own.double(), atol=1e-5), (index, name)
    rotated = [index for index, planes in enumerate(expected) if "keys" in planes]
    base = len(IDS) + 60
    stored = await worker.engine.call(
        lambda engine: next(iter(engine.context.memory.page_pools)).keys.flatten(0, 1).clone()
    )
    assert not (stored == read[rotated[0], "keys"][base].float()).all(-1).all(-1).any(), "keys lie as they were stored"
    assert (await call.next()).released.taken
    assert worker.metric("held_states_total", outcome="taken") == 1


async def test_a_handle_is_read_once_and_frees_everything(worker: ServedWorker) -> None:
    pages = await _captured(worker)
    call = _hold(worker)
    held = await _held(call)
    await _take(worker, held.handle)
    assert (await call.next()).released.taken
    for handle in (held.handle, bytes(32), b""):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _take(worker, handle)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    await _until_free(worker, pages)


async def test_handles_are_long_and_all_different(worker: ServedWorker) -> None:
    await _captured(worker)
    calls = [_hold(worker) for _ in range(3)]
    handles = {(await _held(call)).handle for call in calls}
    assert {len(handle) for handle in handles} == {32}
    assert len(handles) == 3
    for call in calls:
        call.leave()


async def test_closing_the_stream_gives_the_state_up(worker: ServedWorker) -> None:
    pages = await _captured(worker)
    call = _hold(worker)
    held = await _held(call)
    call.leave()
    await _until_free(worker, pages)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _take(worker, held.handle)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert worker.metric("held_states_total", outcome="dropped") == 1


async def test_a_state_that_nobody_takes_goes_when_its_time_is_up(worker: ServedWorker) -> None:
    pages = await _captured(worker)
    call = _hold(worker, seconds=0.01)
    held = await _held(call)
    assert held.seconds == pytest.approx(0.01)
    released = await call.next()
    assert released.WhichOneof("event") == "released"
    assert not released.released.taken
    await _until_free(worker, pages)


async def test_more_bytes_than_may_wait_are_refused(tmp_path: Path) -> None:
    async with run_worker(tmp_path, HoldLimits(CALL_SECONDS, num_bytes=1000, fetch_bytes=1 << 26)) as worker:
        pages = await _captured(worker)
        call = _hold(worker)
        with pytest.raises(OverloadedError, match="HYPIC_WORKER_HELD_BYTES"):
            await all_events(call)
        await _until_free(worker, pages)
        assert worker.metric("held_states_total", outcome="refused") == 1


async def test_what_is_cancelled_while_it_is_read_is_freed_when_reading_ends(worker: ServedWorker) -> None:
    pages = await _captured(worker)
    call = _hold(worker)
    await _held(call)

    def cancel_while_reading(engine: Engine) -> None:
        (name,) = engine.held._held
        reading = engine.held.open(name)
        assert reading is not None
        assert engine.held.open(name) is None
        engine.cancel(name)
        assert engine.held.is_cancelled(name)
        assert len(engine.held) == 1
        engine.check_integrity()
        reading.read_layer(0)
        engine.held.close(name)

    await worker.engine.call(cancel_while_reading)
    await _until_free(worker, pages)
    call.leave()


async def test_held_prompts_count_as_running(worker: ServedWorker) -> None:
    """They take a slot and pages, so that what waits for room knows that some will come back."""
    await _captured(worker)
    call = _hold(worker)
    await _held(call)
    assert await worker.engine.call(lambda engine: (engine.num_running, engine.num_decoding)) == (1, 0)
    call.leave()
