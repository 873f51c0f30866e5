"""Where workers are: addresses and DNS names from the settings, or what is registered with the cache service.

Nothing that a client sends is ever an address (request forgery inside the cluster).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import HypicError, error_from_status
from services.common.telemetry import get_logger

__all__ = ["Find", "find_named", "find_registered", "keep_finding"]

Find = Callable[[], Awaitable[Collection[str]]]
_CALL_SECONDS = 2.0


def find_named(places: Collection[tuple[str, int]]) -> Find:
    """Every address that these names stand for now: a headless service has one for each of its pods."""

    async def find() -> Collection[str]:
        found: set[str] = set()
        for host, port in places:
            try:
                answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                get_logger().warning("worker_name_unknown", host=host, error=str(error))
                continue
            found.update(_join(str(address[0]), port) for *_, address in answers)
        return found

    return find


def find_registered(channel: grpc.aio.Channel) -> Find:
    """The addresses that living workers have registered with the cache service."""
    stub = cache_pb2_grpc.CacheServiceStub(channel)

    async def find() -> Collection[str]:
        try:
            answer = await stub.ListWorkers(cache_pb2.ListWorkersRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        return {worker.address for worker in answer.workers}

    return find


async def keep_finding(find: Find, update: Callable[[Collection[str]], None], pause_seconds: float) -> None:
    """Tell every time what has been found; where nothing can be asked, what was known stays."""
    could_ask = True
    while True:
        try:
            update(await find())
            could_ask = True
        except HypicError as error:
            if could_ask:
                get_logger().warning("workers_not_listed", error=str(error))
            could_ask = False
        await asyncio.sleep(pause_seconds)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
