"""Where the services of one machine listen, and whether they are ready."""

import asyncio
import random
import socket
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc import READINESS

__all__ = ["free_port", "grpc_ready", "http_ready"]

_PROBE_SECONDS = 1.0
# Below those that systems give to outgoing connections.
_PORTS = range(15000, 32000)


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection is given before somebody does."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port is free among 100 of {_PORTS.start} to {_PORTS.stop - 1}")


async def grpc_ready(address: str) -> bool:
    """Whether a service's health says that it is ready."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=READINESS)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_PROBE_SECONDS)  # type: ignore[attr-defined] # absent from the stubs
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def http_ready(url: str) -> bool:
    """Whether an HTTP readiness endpoint answers 200."""
    return await asyncio.to_thread(_fetch_ok, url)


def _fetch_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_SECONDS) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
