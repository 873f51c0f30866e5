"""Routers as processes of their own, with the stubs behind them in another one."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.ports import free_port

__all__ = ["RunningRouters", "await_ready", "resident_bytes", "serve_routers"]

_START_SECONDS = 60.0
_POLL_SECONDS = 0.1
# Holds the documents with room to spare, and is full of questions soon: what memory grows by afterwards is something else.
_MEMO_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RunningRouters:
    """Where each listens on loopback, their processes, and that of the stubs."""

    ports: tuple[int, ...]
    pids: tuple[int, ...]
    stubs_pid: int


@contextmanager
def serve_routers(count: int = 1) -> Iterator[RunningRouters]:
    """So many routers that are ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYPIC_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with _started([sys.executable, "-m", "bench.router.stubs"], environment) as stubs:
        worker_port, cache_port = _read_ports(stubs)
        variables = {
            "HYPIC_ROUTER_WORKERS": f"127.0.0.1:{worker_port}",
            "HYPIC_ROUTER_CACHE_ADDRESS": f"127.0.0.1:{cache_port}",
            "HYPIC_ROUTER_LOG_LEVEL": "warning",
            "HYPIC_ROUTER_TOKENIZER_MEMO_BYTES": str(_MEMO_BYTES),
        }
        with ExitStack() as running:
            ports, pids = [free_port() for _ in range(count)], []
            for port in ports:
                own = environment | variables | {"HYPIC_ROUTER_PORT": str(port)}
                command = [sys.executable, "-m", "services.cli.main", "router"]
                pids.append(running.enter_context(_started(command, own)).pid)
            for port in ports:
                await_ready(port)
            yield RunningRouters(tuple(ports), tuple(pids), stubs.pid)


@contextmanager
def _started(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _read_ports(stubs: subprocess.Popen[str]) -> tuple[int, int]:
    line = stubs.stdout.readline() if stubs.stdout else ""
    ports = line.split()
    if len(ports) != 2:
        raise RuntimeError(f"the stubs did not start: {line!r}")
    return int(ports[0]), int(ports[1])


def await_ready(port: int) -> None:
    """Until the router on this port takes requests.

    Raises:
        RuntimeError: it does not in time.
    """
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready"):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > give_up:
                raise RuntimeError("the router is not ready in time; its log says why") from None
            time.sleep(_POLL_SECONDS)


def resident_bytes(pid: int) -> int:
    """Memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
