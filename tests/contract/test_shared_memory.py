"""States that go through memory which two workers of a host map: the same bytes, held up by the reader, gone with the stream."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.adapters import state_stream
from services.worker.adapters.shared_memory import ReaderPage, ReaderProgress, SharedAddress, SharedMemory, map_shared
from services.worker.adapters.transfers import Fetched
from tests.contract.peer_pair import Chunk, has_free, is_, pair, planes_of, until

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files in memory need Linux")


async def all_given_back() -> None:
    """Until no descriptor of shared memory is open in this process."""
    await until(lambda: is_(_num_shared() == 0))


def _num_shared() -> int:
    # A cancelled task's frames may still refer to what it has mapped.
    gc.collect()
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:hypic")
        except FileNotFoundError:
            continue
    return found


def test_another_process_reads_what_is_written_and_changes_nothing() -> None:
    memory = SharedMemory()
    memory.reserve(8192)
    memory.write(4096, b"states")
    at = memory.address
    reads = (
        "import sys\nfrom services.worker.adapters.shared_memory import SharedAddress, map_shared\n"
        "mapped = map_shared(SharedAddress(*map(int, sys.argv[1:])))\n"
        "print(mapped[4096:4102].decode())\nmapped[4096:4102] = b'spoilt'\n"
    )
    numbers = [str(number) for number in (at.pid, at.descriptor, at.num_bytes)]
    done = subprocess.run([sys.executable, "-c", reads, *numbers], capture_output=True, text=True, check=True)
    assert done.stdout == "states\n"
    assert map_shared(at)[4096:4102] == b"states"
    memory.close()
    with pytest.raises(OSError, match=r"no memory|No such file"):
        map_shared(at)


def test_memory_grows_and_keeps_what_stands_in_it() -> None:
    memory = SharedMemory()
    memory.reserve(4096)
    memory.write(0, b"first")
    before = map_shared(memory.address)
    memory.reserve(1 << 20)
    memory.write((1 << 20) - 4, b"last")
    after = map_shared(memory.address)
    assert (after[:5], after[-4:], before[:5]) == (b"first", b"last", b"first")
    memory.close()


def test_what_is_no_memory_is_not_opened() -> None:
    """Nor waited for: nobody writes to the pipe."""
    read, write = os.pipe()
    memory = SharedMemory()
    memory.reserve(4096)
    at = memory.address
    for address in (
        SharedAddress(at.pid, read, 16),
        SharedAddress(at.pid, at.descriptor, 8192),
        SharedAddress(at.pid, at.descriptor, 0),
        SharedAddress(at.pid, 9999, 16),
        SharedAddress(2**31 - 1, at.descriptor, 16),
    ):
        with pytest.raises(OSError, match=r"no memory|No such|descriptor"):
            map_shared(address)
    memory.close()
    os.close(read)
    os.close(write)


def test_a_page_is_known_by_its_number() -> None:
    page, other = ReaderPage(), ReaderPage()
    progress = ReaderProgress(page.address, page.nonce)
    page.note_used(3)
    assert progress.layers_used == 3
    for nonce in (other.nonce, b"", page.nonce[:-1]):
        with pytest.raises(OSError, match="another one"):
            ReaderProgress(page.address, nonce)
    page.close()
    other.close()


async def test_the_bytes_that_arrive_are_the_holders(tmp_path: Path) -> None:
    """Twelve layers through two windows, and no byte in a message."""
    async with pair(tmp_path, num_layers=12, shares_memory=True) as workers:
        await workers.holder.running.capture()
        assert await workers.fetch() == Fetched("same_host", "", "holder")
        assert await planes_of(workers.wanting) == await planes_of(workers.holder.running)
        sent = [chunk for chunk, _ in workers.holder.sent]
        assert not any(chunk.data for chunk in sent)
        assert len({chunk.memory.descriptor for chunk in sent if chunk.HasField("memory")}) == 2
        whole = sum(len(data) for planes in await planes_of(workers.wanting) for _, data in planes)
        assert workers.wanting.count("fetched_bytes", "same_host") == whole
    await all_given_back()


async def test_a_reader_that_does_not_read_holds_the_sender_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No window is written before its layer has been used."""
    async with pair(tmp_path, num_layers=12, shares_memory=True) as workers:
        await workers.holder.running.capture()
        held = asyncio.Event()
        used = ReaderPage.note_used
        monkeypatch.setattr(ReaderPage, "note_used", lambda page, number: held.is_set() and used(page, number))
        fetching = asyncio.create_task(workers.fetch())
        await until(lambda: is_(len({chunk.layer for chunk, _ in workers.holder.sent if chunk.dtype}) == 2))
        await asyncio.sleep(0.1)
        assert {chunk.layer for chunk, _ in workers.holder.sent if chunk.dtype} == {0, 1}
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)
        await until(lambda: is_(workers.holder.num_running == 0))
    await all_given_back()


def other_checksum(chunk: Chunk) -> None:
    if chunk.layer == 2 and chunk.checksum:
        chunk.checksum = bytes(len(chunk.checksum))


def other_place(chunk: Chunk) -> None:
    if chunk.layer == 2 and chunk.HasField("memory"):
        chunk.offset += 64


def outside(chunk: Chunk) -> None:
    if chunk.layer == 2 and chunk.HasField("memory"):
        chunk.offset = 1 << 40


def other_layer(chunk: Chunk) -> None:
    if chunk.layer == 2:
        chunk.layer = 3


@pytest.mark.parametrize("spoil", [other_checksum, other_place, outside, other_layer])
async def test_what_is_damaged_on_the_way_is_not_used(spoil: object, tmp_path: Path) -> None:
    async with pair(tmp_path, shares_memory=True) as workers:
        await workers.holder.running.capture()
        free = await workers.wanting.free_pages()
        workers.holder.spoil_one = spoil  # type: ignore[assignment] # one of the functions above
        assert await workers.fetch() == Fetched(reason="blob_damaged")
        assert not await workers.wanting.holds()
        assert await workers.wanting.free_pages() == free
        workers.holder.spoil_one = None
        assert await workers.fetch() == Fetched("same_host", "", "holder")
    await all_given_back()


async def test_a_prompt_that_leaves_ends_the_stream(tmp_path: Path) -> None:
    async with pair(tmp_path, shares_memory=True) as workers:
        free = await workers.wanting.free_pages()
        await workers.holder.running.capture()
        workers.holder.pause_seconds = 0.02
        for moment in (0.0, 0.005, 0.05, 0.1):
            fetching = asyncio.create_task(workers.fetch())
            await asyncio.sleep(moment)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        await until(lambda: is_(workers.holder.num_running == 0))
        await until(lambda: has_free(workers.wanting, free))
    await all_given_back()


async def test_bytes_come_in_messages_where_the_senders_memory_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the second try, and from then on at the first."""

    def unseen(address: SharedAddress) -> None:
        raise OSError(f"no process {address.pid} here")

    async with pair(tmp_path, shares_memory=True) as workers:
        await workers.holder.running.capture()
        monkeypatch.setattr(state_stream, "map_shared", unseen)
        for calls in (2, 3):
            assert await workers.fetch() == Fetched("same_host", "", "holder")
            assert workers.holder.num_calls == calls
            await workers.wanting.drop()
        assert await planes_of(workers.holder.running)
        assert any(chunk.data for chunk, _ in workers.holder.sent)


async def test_bytes_come_in_messages_where_the_readers_page_cannot_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path, shares_memory=True) as workers:
        await workers.holder.running.capture()
        page = ReaderPage.__init__

        def other_number(self: ReaderPage) -> None:
            page(self)
            self.nonce = bytes(len(self.nonce))

        monkeypatch.setattr(ReaderPage, "__init__", other_number)
        assert await workers.fetch() == Fetched("same_host", "", "holder")
        assert await planes_of(workers.wanting) == await planes_of(workers.holder.running)
        assert workers.holder.num_calls == 1
        assert not any(chunk.HasField("memory") for chunk, _ in workers.holder.sent)
