"""The stack as `hypic up` runs it: one supervisor process, its children, their ports and gauges."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import grpc
import httpx2
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.cli.orphans import SUPERVISOR_VARIABLE
from services.cli.ports import free_port, grpc_ready

__all__ = ["ServedStack", "child_pids", "is_running", "read_metric", "wait_refreshed", "wait_until"]

_START_SECONDS = 90.0
_END_SECONDS = 60.0


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Poll until the condition holds; fails the test when it does not in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "condition not met in time"
        time.sleep(0.05)


def child_pids(pid: int) -> list[int]:
    """Processes that a process has started and that run."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(number) for text in lists for number in text.split()]


def _read_proc(pid: int, name: str) -> list[str]:
    """A file of NUL-separated strings; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text().rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def read_metric(port: int, name: str, labels: str = "", host: str = "127.0.0.1") -> float:
    """The sum of a metric's samples whose labels hold this text; NaN where nobody serves it."""
    try:
        text = httpx2.get(f"http://{host}:{port}/metrics", timeout=5).text
    except httpx2.TransportError:
        return float("nan")
    samples = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and labels in line]
    return sum(float(line.rpartition(" ")[2]) for line in samples)


def wait_refreshed(gauge: Callable[[str, str], float], workers: Iterable[str]) -> None:
    """Until the gauges of all these workers have been refreshed."""
    now = time.time()
    waiting = set(workers)

    def all_refreshed() -> bool:
        waiting.difference_update(
            [name for name in waiting if gauge(name, "hypic_worker_engine_seen_timestamp_seconds") > now]
        )
        return not waiting

    wait_until(all_refreshed)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on now."""
    while True:
        first = free_port()
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class ServedStack:
    """`hypic up` on free ports.

    `variables` are settings beside those that tests need to see inside; `workers` the role of each; state: the folder of what
    outlives the stack.
    """

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        variables: Mapping[str, str],
        workers: Sequence[str] = ("both",),
        state: Path | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._log = log
        self.workers = ("worker",) if len(workers) == 1 else tuple(f"worker-{index}" for index in range(len(workers)))
        self._options = ["--workers", str(len(workers))]
        for role in workers:
            self._options += ["--role", "prefill,combine" if role == "both" else role]
        self._options += ["--state", str(state)] if state else []
        first = free_ports(len(workers))
        self._metrics_ports = {name: first + index for index, name in enumerate(self.workers)} | {"cache": free_port()}
        self._variables = {
            "HYPIC_WORKER_METRICS_PORT": str(first),
            "HYPIC_CACHE_METRICS_PORT": str(self._metrics_ports["cache"]),
            # Heartbeats come three times as often: a restarted directory learns soon what the worker holds.
            "HYPIC_CACHE_WORKER_TTL_SECONDS": "3",
            # What tests count is their own requests.
            "HYPIC_ROUTER_GUARD_SHARE": "0",
            **variables,
        }
        self.model = checkpoint.name
        self.base_url = ""

    def __enter__(self) -> Self:
        command = ["up", "--checkpoint", str(self._checkpoint), "--port", "0", *self._options]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", *command],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._variables},
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        try:
            self.base_url = self._read_base_url()
            self._environment = self._read_environment()
        except BaseException:
            self._end()
            raise
        self.http = httpx2.Client(base_url=self.base_url, timeout=60)
        # The same after every restart: nothing is stored yet.
        wait_until(lambda: all(self.gauge(name, "hypic_worker_pages_free") > 0 for name in self.workers))
        self._all_pages = self.gauge("workers", "hypic_worker_pages_free")
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._end()

    def pid(self, name: str) -> int:
        """The present process of a service, or of a worker by its id; 0 between two restarts."""
        service = "worker" if name.startswith("worker") else name
        found = [pid for pid in child_pids(self.process.pid) if _read_proc(pid, "cmdline")[-1:] == [service]]
        if name != service:
            found = [pid for pid in found if self._environment_of(pid).get("HYPIC_WORKER_WORKER_ID") == name]
        return found[0] if found else 0

    def pids(self) -> list[int]:
        """The supervisor and its children."""
        return [self.process.pid, *(self.pid(name) for name in ("cache", *self.workers, "router"))]

    def kill(self, name: str) -> int:
        """SIGKILL; returns the process that was."""
        return self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to one service, once it is there; returns its process."""
        give_up = time.monotonic() + 60
        # The kernel's list of children may lack one while another ends; process 0 would be this whole process group.
        while not (pid := self.pid(name)):
            assert time.monotonic() < give_up, f"no {name} is running"
            time.sleep(0.05)
        os.kill(pid, number)
        return pid

    def wait_restarted(self, name: str, killed: int) -> None:
        """Until another process of the service is ready, and the router with it."""
        wait_until(lambda: self.pid(name) not in (0, killed), 60)
        if name != "router":
            wait_until(lambda: asyncio.run(grpc_ready(self.address(name))), 60)
        wait_until(self._is_ready, 60)

    def _is_ready(self) -> bool:
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def address(self, name: str) -> str:
        """Where a worker or the cache service listens."""
        service = name.partition("-")[0]
        return self._environment_of(self.pid(name))[f"HYPIC_{service.upper()}_LISTEN_ADDRESS"]

    def environment(self) -> dict[str, str]:
        """The settings of the supervisor's children, for one more process beside them."""
        return dict(self._environment)

    def _read_environment(self) -> dict[str, str]:
        variables = self._environment_of(self.pid("router"))
        # Whoever carries it ends unless the supervisor is its parent.
        del variables[SUPERVISOR_VARIABLE]
        return variables

    @staticmethod
    def _environment_of(pid: int) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in _read_proc(pid, "environ") if entry)

    def gauge(self, service: str, name: str, labels: str = "") -> float:
        """The sum of a metric's samples whose labels hold this text; a service that is restarting has none: NaN.

        `workers` are all of them together.
        """
        if service == "workers":
            return sum(self.gauge(each, name, labels) for each in self.workers)
        return read_metric(self._metrics_ports[service], name, labels)

    def router_metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric's samples in the router whose labels hold this text."""
        return read_metric(int(self.base_url.rpartition(":")[2]), name, labels)

    def metrics_address(self, service: str) -> str:
        """Where a worker, or the cache service, serves its metrics."""
        return f"127.0.0.1:{self._metrics_ports[service]}"

    def captures(self) -> float:
        """Segments that the workers' present processes have captured."""
        return self.gauge("workers", "hypic_worker_captures_total", 'outcome="stored"')

    def wait_refreshed(self) -> None:
        """Until the workers' gauges are of this moment, or later: they are refreshed from time to time."""
        wait_refreshed(self.gauge, self.workers)

    def wait_idle(self) -> None:
        """Until nothing runs or waits, no lease is left, and the workers hold just what the directory lists."""
        self.wait_refreshed()
        wait_until(lambda: self.gauge("workers", "hypic_worker_num_requests_running") == 0)
        wait_until(lambda: self.gauge("workers", "hypic_worker_num_requests_waiting") == 0)
        wait_until(lambda: self.gauge("cache", "hypic_cache_leases") == 0)
        wait_until(lambda: self.gauge("cache", "hypic_cache_tickets") == 0)
        wait_until(
            lambda: self.gauge("workers", "hypic_worker_state_bytes") == self.gauge("cache", "hypic_cache_bytes")
        )

    def forget_everything(self) -> None:
        """Invalidate all that is stored, which must be something; returns when the worker's memory is free again.

        Gauges are refreshed from time to time: bytes that were seen first make the later zero a fresh one.
        """
        wait_until(lambda: self.gauge("workers", "hypic_worker_state_bytes") > 0)
        self.invalidate_tenant()
        wait_until(lambda: self.gauge("workers", "hypic_worker_state_bytes") == 0)
        wait_until(lambda: self.gauge("workers", "hypic_worker_pages_free") == self._all_pages)

    def invalidate_tenant(self) -> int:
        """Make all that is stored unreachable; the number of entries."""
        return self._invalidate(cache_pb2.InvalidateRequest(whole_tenant=True))

    def invalidate_document(self, document_id: str) -> int:
        """Make a document unreachable; the number of entries that fell with it."""
        return self._invalidate(cache_pb2.InvalidateRequest(document_id=document_id))

    def _invalidate(self, request: cache_pb2.InvalidateRequest) -> int:
        request.namespace.tenant = "default"
        with grpc.insecure_channel(self.address("cache")) as channel:
            return cache_pb2_grpc.CacheServiceStub(channel).Invalidate(request, timeout=10).num_entries

    def _read_base_url(self) -> str:
        """The address in the supervisor's greeting."""
        stdout = self.process.stdout
        assert stdout is not None
        give_up = time.monotonic() + _START_SECONDS
        while time.monotonic() < give_up:
            if select.select([stdout], [], [], 0.2)[0]:
                line = stdout.readline().decode()
                assert line, f"hypic up ended with {self.process.wait()}:\n{self._log.read_text()[-2000:]}"
                if line.startswith("Serving "):
                    return line.split()[3].removesuffix("/v1.")
        raise AssertionError(f"hypic up was not ready in time:\n{self._log.read_text()[-2000:]}")

    def _end(self) -> None:
        """SIGTERM; whatever is left after a while is killed."""
        if self.process.poll() is None:
            family = child_pids(self.process.pid)
            self.process.terminate()
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                for pid in filter(is_running, family):
                    os.kill(pid, signal.SIGKILL)
        if self.process.stdout:
            self.process.stdout.close()
