"""States between a real engine and its tiers: down, up, and whatever is wrong with a blob ends in computing it."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.blob.encodings import StateEncoding
from services.blob.planes import Plane
from services.blob.reader import BlobSource
from services.worker.adapters.readable_states import ReadableState
from services.worker.adapters.transfers import Fetched, WantedState
from services.worker.engine import transfer
from services.worker.tiers.disk import DiskStore
from services.worker.tiers.host import HostStore
from tests.contract.served_worker import CALL_SECONDS, IDS, KEY, EngineWithTiers, run_engine

ROOM = 1 << 26
OTHER = bytes(reversed(KEY))


async def _store(running: EngineWithTiers) -> None:
    await running.capture()
    await running.tiers.store(KEY, b"receipt", lambda: True)
    await running.drop()


async def _fetch(running: EngineWithTiers) -> Fetched | None:
    return await running.fetch(KEY, WantedState(IDS))


async def _planes(state: ReadableState) -> list[list[Plane]]:
    planes = [layer async for layer in state.layers(0)]
    await state.close()
    return planes


def _file(directory: Path) -> Path:
    (path,) = directory.glob("*.safetensors")
    return path


async def test_down_and_up(tmp_path: Path) -> None:
    """The state that comes back has the bytes of the one that went, whichever tier it comes from."""
    near, far = HostStore(ROOM), DiskStore(tmp_path / "disk", ROOM)
    async with run_engine(tmp_path, [near, far]) as running:
        await _store(running)
        blob = _file(tmp_path / "disk").read_bytes()
        for tier in ("host", "disk"):
            assert await _fetch(running) == Fetched(tier=tier)
            assert running.count("promotions", tier) == 1
            await running.tiers.store(KEY, b"receipt", lambda: True)
            assert _file(tmp_path / "disk").read_bytes() == blob
            await running.drop()
            near.delete(KEY)
        assert running.count("demotions", "host") == running.count("demotions", "disk") == 3
        await running.tiers.store(OTHER, b"", lambda: True)
        assert await running.fetch(OTHER, WantedState(IDS)) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda blob: blob[:-1], "blob_damaged"),
        (lambda blob: b"", "blob_damaged"),
        (lambda blob: bytes([blob[0] ^ 1]) + blob[1:], "blob_damaged"),
        (lambda blob: blob[:-1] + bytes([blob[-1] ^ 128]), "blob_damaged"),
        (None, "blob_missing"),
    ],
    ids=["truncated", "empty", "header", "plane", "missing"],
)
async def test_a_blob_that_is_damaged_or_gone(
    damage: Callable[[bytes], bytes] | None, reason: str, tmp_path: Path
) -> None:
    """It is removed, counted, and leaves the engine as it was; another tier's copy is as good."""
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)]) as running:
        free = await running.free_pages()
        await _store(running)
        path = _file(tmp_path / "disk")
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))
        assert await _fetch(running) == Fetched(reason=reason)
        assert running.tiers.tier_of(KEY) == ""
        assert running.count("corrupt_blobs", "disk") == (reason == "blob_damaged")
        assert not path.exists()
        assert not await running.holds()
        assert await running.free_pages() == free
        assert await _fetch(running) is None


async def test_behind_a_damaged_copy_the_next_tier_serves(tmp_path: Path) -> None:
    near, far = DiskStore(tmp_path / "near", ROOM), HostStore(ROOM)
    async with run_engine(tmp_path, [near, far]) as running:
        await _store(running)
        path = _file(tmp_path / "near")
        path.write_bytes(path.read_bytes()[:-1])
        assert await _fetch(running) == Fetched(tier="host")
        assert not path.exists()


async def test_a_restart_takes_back_what_is_of_use(tmp_path: Path) -> None:
    """Whole blobs of this model and profile with a receipt; damaged and foreign ones are removed."""
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)]) as running:
        await _store(running)
        await running.capture(OTHER)
        await running.tiers.store(OTHER, b"", lambda: True)
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)]) as running:
        (kept,) = await running.tiers.take_back()
        assert (kept.key, kept.tier, kept.num_tokens, kept.receipt) == (KEY, "disk", len(IDS), b"receipt")
        assert kept.size_bytes == _file(tmp_path / "disk").stat().st_size
        assert await _fetch(running) == Fetched(tier="disk")
        fetched = await running.tiers.read(KEY)
        assert fetched is not None
        await running.drop()
        stored = await running.tiers.read(KEY)
        assert stored is not None
        assert await _planes(fetched) == await _planes(stored)
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)], profile='end_state = "float8"') as running:
        assert await running.tiers.take_back() == []
        assert running.count("corrupt_blobs", "disk") == 0
        assert not list((tmp_path / "disk").glob("*.safetensors"))


async def test_a_blob_of_another_profile_or_segment(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)]) as running:
        await _store(running)
        assert await running.fetch(KEY, WantedState((*IDS[:-1], IDS[-1] ^ 1))) == Fetched(reason="blob_foreign")
        await _store(running)
    async with run_engine(tmp_path, [DiskStore(tmp_path / "disk", ROOM)], profile='end_state = "float8"') as running:
        assert await _fetch(running) == Fetched(reason="blob_foreign")
        assert running.tiers.tier_of(KEY) == ""


async def test_a_compact_profile_stores_less(tmp_path: Path) -> None:
    """And says in the blob's header how to read it."""
    sizes = []
    for name, profile in (("exact", ""), ("compact", 'end_state = "float8"')):
        async with run_engine(tmp_path / name, [HostStore(ROOM)], profile=profile) as running:
            await _store(running)
            reader = await running.tiers.read(KEY)
            assert reader is not None
            assert StateEncoding.from_fields(reader.header.encoding) == running.served.profile.encoding
            sizes.append(sum(plane.size for plane in reader.header.planes if plane.name == "end_state"))
            assert await _fetch(running) == Fetched(tier="host")
    assert sizes[0] == 4 * sizes[1]


async def test_what_is_slower_to_fetch_than_to_compute_is_computed(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [HostStore(ROOM)]) as running:
        await _store(running)
        running.tiers.policy.engine.observe(seconds=1.0, num_tokens=1000)
        running.tiers.policy.speed("host").observe(latency_seconds=1.0, seconds=1.0, num_bytes=1)
        assert await _fetch(running) == Fetched(reason="fetch_slower")
        assert not await running.holds()
        assert running.tiers.tier_of(KEY) == "host"


async def test_without_room_in_the_engine(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [HostStore(ROOM)]) as running:
        await _store(running)
        free = await running.free_pages()
        # The prompt's 93 tokens fit, and a state beside its live tokens does not.
        hold = await running.engine.call(lambda engine: engine.context.holds.allocate(free - 6))
        assert await _fetch(running) == Fetched(reason="no_room")
        await running.engine.call(lambda engine: engine.context.holds.release(hold))
        assert await _fetch(running) == Fetched(tier="host")


async def test_memory_that_cannot_be_had_is_no_fault_of_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_engine(tmp_path, [HostStore(ROOM)]) as running:
        await _store(running)

        def fail(*_: object, **__: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        monkeypatch.setattr(transfer, "empty_planes", fail)
        assert await _fetch(running) == Fetched(reason="no_room")
        monkeypatch.undo()
        assert await _fetch(running) == Fetched(tier="host")


async def test_prompts_share_a_fetch(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [HostStore(ROOM)]) as running:
        await _store(running)
        assert await asyncio.gather(*(_fetch(running) for _ in range(3))) == [Fetched(tier="host")] * 3
        assert running.count("promotions", "host") == 1


async def test_what_is_dropped_while_it_is_stored_does_not_stay(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [HostStore(ROOM)]) as running:
        await running.capture()
        asked = iter((True, False))
        await running.tiers.store(KEY, b"receipt", lambda: next(asked))
        assert running.tiers.tier_of(KEY) == ""
        await running.tiers.store(KEY, b"receipt", lambda: False)
        assert running.tiers.tier_of(KEY) == ""


class _SlowStore(HostStore):
    """Opens nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(ROOM)
        self.may_open = threading.Event()

    def open(self, key: bytes) -> BlobSource | None:
        self.may_open.wait(CALL_SECONDS)
        return super().open(key)


async def test_a_prompt_does_not_wait_for_ever(tmp_path: Path) -> None:
    """The fetch goes on without it, and the next prompt has its state."""
    store = _SlowStore()
    async with run_engine(tmp_path, [store], fetch_seconds=0.01) as running:
        await _store(running)
        assert await _fetch(running) == Fetched(reason="fetch_timeout")
        store.may_open.set()
        while await _fetch(running) == Fetched(reason="fetch_timeout"):
            pass
        assert await running.holds()


async def test_a_tier_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    """The next prompts compute: what has not come for so long would not come sooner for them."""
    store = _SlowStore()
    async with run_engine(tmp_path, [store], fetch_seconds=0.01) as running:
        await _store(running)
        await running.capture(OTHER)
        await running.tiers.store(OTHER, b"receipt", lambda: True)
        running.tiers.policy.engine.observe(seconds=0.001, num_tokens=1000)
        assert await _fetch(running) == Fetched(reason="fetch_timeout")
        await running.drop(OTHER)
        assert await running.fetch(OTHER, WantedState(IDS)) == Fetched(reason="fetch_slower")
        store.may_open.set()
        while await _fetch(running) == Fetched(reason="fetch_timeout"):
            pass


class _BrokenStore(HostStore):
    """Fails whatever it is asked to read or write."""

    def put(self, key: bytes, pieces: object) -> bool:
        raise OSError("the medium is gone")


async def test_a_tier_that_fails_to_write_is_done_without(tmp_path: Path) -> None:
    async with run_engine(tmp_path, [_BrokenStore(ROOM), DiskStore(tmp_path / "disk", ROOM)]) as running:
        await _store(running)
        assert await _fetch(running) == Fetched(tier="disk")
