"""HTTP connections that write once a turn of the loop: a write costs far more than what it carries."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["GatheredWrites", "GatheringProtocol"]


class GatheredWrites(asyncio.Transport):
    """A transport that keeps what is written until the running turn of the loop ends, and hands it over in one piece.

    A reply's head goes out with its first event, and the last event with the marks that end the stream.
    """

    def __init__(self, inner: asyncio.Transport) -> None:
        super().__init__()
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See `asyncio.WriteTransport`."""
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(bytes(data))

    def close(self) -> None:
        """See `asyncio.BaseTransport`; what was written goes first."""
        self._flush()
        self._inner.close()

    def abort(self) -> None:
        """See `asyncio.WriteTransport`."""
        self._pieces.clear()
        self._inner.abort()

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 # as the library has it
        """See `asyncio.BaseTransport`."""
        return self._inner.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See `asyncio.BaseTransport`."""
        self._inner.set_protocol(protocol)

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._inner.resume_reading()

    def _flush(self) -> None:
        if self._pieces and not self._inner.is_closing():
            self._inner.write(b"".join(self._pieces))
        self._pieces.clear()


class GatheringProtocol(HttpToolsProtocol):
    """The server's own protocol over such a transport."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the library has it
        """See `asyncio.Protocol`."""
        super().connection_made(GatheredWrites(transport))
