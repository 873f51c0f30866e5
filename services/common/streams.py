"""Bidirectional streams that a service serves, and ends when it drains."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["DrainedStreams", "OpenStream"]

_Request = TypeVar("_Request")
_Message = TypeVar("_Message")
_Told = TypeVar("_Told", covariant=True)


class OpenStream(Protocol[_Told]):
    """One stream, which reads its requests by itself."""

    async def next_message(self) -> _Told | None:
        """The next message to its caller; None behind the last one, once no more is read."""
        ...

    def stop_reading(self) -> None:
        """Read no further request."""
        ...

    def cancel(self) -> None:
        """The caller has left: everything of it ends."""
        ...


class DrainedStreams(Generic[_Request, _Message]):
    """All open streams. begin: makes one of its requests."""

    def __init__(self, begin: Callable[[AsyncIterable[_Request]], OpenStream[_Message]]) -> None:
        self._begin = begin
        self._streams: set[OpenStream[_Message]] = set()
        self._is_draining = False

    async def serve(self, requests: AsyncIterable[_Request]) -> AsyncGenerator[_Message]:
        """The messages of one stream, until the caller ends it or the streams are drained."""
        if self._is_draining:
            return
        stream = self._begin(requests)
        self._streams.add(stream)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        finally:
            self._streams.discard(stream)
            stream.cancel()

    def drain(self) -> None:
        """Read no further request; every stream ends with the answers to those that were read, a new one at once."""
        self._is_draining = True
        for stream in self._streams:
            stream.stop_reading()
