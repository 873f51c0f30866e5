"""A gateway in small: TCP to whichever router takes it, with one more attempt where the first has answered nothing."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Self

__all__ = ["Balancer"]

_CHUNK_BYTES = 1 << 16


class Balancer:
    """Takes one request a connection; in a thread with a loop of its own. num_retried: requests that a router left unanswered."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = list(ports)
        self._loop = asyncio.new_event_loop()
        # The loop alone does not keep a task whose client has gone.
        self._serving: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.num_retried = 0
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._begin, "127.0.0.1", 0, limit=1 << 20)

    async def _close(self) -> None:
        """With every connection that is left."""
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            self._ports.append(self._ports.pop(0))
            for attempt, port in enumerate(tuple(self._ports)):
                self.num_retried += attempt > 0
                if await self._pass_on(request, port, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    async def _pass_on(self, request: bytes, port: int, client: asyncio.StreamWriter) -> bool:
        """Whether this router has answered anything."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        try:
            writer.write(request)
            begun = received = await _read_some(reader)
            while received:
                client.write(received)
                await client.drain()
                received = await _read_some(reader)
            return bool(begun)
        finally:
            writer.close()


async def _read_some(reader: asyncio.StreamReader) -> bytes:
    """What has come; nothing once the router has gone."""
    try:
        return await reader.read(_CHUNK_BYTES)
    except OSError:
        return b""


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
