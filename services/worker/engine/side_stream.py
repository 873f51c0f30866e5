"""A stream for copies beside the engine's passes. On a CPU there is none, and everything runs where it is called."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["SideStream"]


class SideStream:
    """One an engine, since every stream keeps memory of its own for what is made on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """On the engine's thread: what is used from now on comes behind what the engine's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def used(self) -> Iterator[None]:
        """On any thread: work inside goes to this stream, and is done when the block ends."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def lead(self) -> None:
        """On the engine's thread: the engine's stream goes on behind what this one has been given so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
