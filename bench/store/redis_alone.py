"""What Redis itself answers on this machine: `redis-benchmark`, or a loop of redis-py where that is missing."""

import csv
import shutil
import subprocess
import time
from dataclasses import dataclass

import redis

from tests.redis_server import RedisServer

__all__ = ["RedisRate", "measure_redis"]

_REQUESTS = 100_000
_CLIENTS = 16
_LOOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RedisRate:
    """GETs a second, and how they were made."""

    rate: float
    how: str


def measure_redis(server: RedisServer) -> RedisRate:
    """GETs of a small value over the same socket that the directory uses."""
    socket = server.url.removeprefix("unix://")
    binary = shutil.which("redis-benchmark")
    if binary:
        command = [binary, "-s", socket, "-n", str(_REQUESTS), "-c", str(_CLIENTS), "-t", "get", "--csv"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [row for row in csv.reader(printed.splitlines()) if row and row[0].startswith("GET")]
        return RedisRate(float(rows[0][1]), f"redis-benchmark, {_CLIENTS} clients")
    with redis.Redis(unix_socket_path=socket) as client:
        client.set("bench", "value")
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < _LOOP_SECONDS:
            client.get("bench")
            count += 1
        client.delete("bench")
        return RedisRate(count / (time.perf_counter() - started), "redis-py, one client")
