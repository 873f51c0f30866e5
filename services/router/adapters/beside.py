"""A second listener in the process, which leaves signals to the first."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn
from fastapi import FastAPI

__all__ = ["serve_beside"]

_STOP_SECONDS = 1


class _Beside(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override] # a generator's wrapper there
        """Signals are the other server's."""
        return nullcontext()


@asynccontextmanager
async def serve_beside(app: FastAPI, address: str) -> AsyncIterator[None]:
    """Serve in plain HTTP as long as the context lasts; nothing without an address.

    Raises:
        RuntimeError: the address cannot be bound.
    """
    if not address:
        yield
        return
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    server = _Beside(config)
    serving = asyncio.create_task(server.serve(sockets=[_listen(address)]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        raise RuntimeError(f"HYPIC_ROUTER_OPERATIONS_ADDRESS: cannot listen on {address}: {error}") from error
