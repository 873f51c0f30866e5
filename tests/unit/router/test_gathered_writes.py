"""One write a turn of the loop, in order, and nothing lost at a close."""

import asyncio

from services.router.adapters.gathered_writes import GatheredWrites


class Recorder(asyncio.Transport):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.has_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.has_closed = True

    def abort(self) -> None:
        self.has_closed = True

    def is_closing(self) -> bool:
        return self.has_closed


async def test_what_is_written_in_one_turn_goes_out_at_once() -> None:
    inner = Recorder()
    transport = GatheredWrites(inner)
    transport.write(b"head,")
    transport.write(bytearray(b"first"))
    assert inner.written == []
    await asyncio.sleep(0)
    assert inner.written == [b"head,first"]
    transport.write(b"second")
    await asyncio.sleep(0)
    assert inner.written == [b"head,first", b"second"]


async def test_a_close_lets_go_what_was_written() -> None:
    inner = Recorder()
    transport = GatheredWrites(inner)
    transport.write(b"last")
    transport.close()
    assert inner.written == [b"last"]
    assert transport.is_closing()
    await asyncio.sleep(0)
    assert inner.written == [b"last"]


async def test_an_aborted_connection_writes_nothing_more() -> None:
    inner = Recorder()
    transport = GatheredWrites(inner)
    transport.write(b"never read")
    transport.abort()
    transport.write(b"nor this")
    await asyncio.sleep(0)
    assert inner.written == []
