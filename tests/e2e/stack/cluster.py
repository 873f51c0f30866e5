"""Services as processes of their own, without a supervisor: a test ends, pauses and starts each of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import grpc
import httpx2
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.cli.ports import free_port, grpc_ready
from tests.e2e.stack.network import Namespace
from tests.e2e.stack.served import read_metric, wait_refreshed, wait_until
from tests.e2e.stack.worker_proxy import WorkerProxy
from tests.redis_server import RedisServer

__all__ = ["Cluster"]

_ROUTERS = ("router", "second")


class Cluster:
    """Redis, a cache service, workers behind proxies, and two routers that different clients use: `router` has the
    workers' addresses from its settings, `second` from the cache service.

    `roles` by worker id; `variables` go to everybody; `apart`: the first worker runs in this network namespace.
    """

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        roles: Mapping[str, str],
        variables: Mapping[str, str],
        apart: Namespace | None = None,
    ) -> None:
        self._apart = apart
        self._lonely = next(iter(roles)) if apart else ""
        self.model = checkpoint.name
        self.roles = dict(roles)
        self._log = directory / "log"
        self._closing = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # Its socket's path must be short.
        self.redis = RedisServer(Path(self._closing.enter_context(TemporaryDirectory(prefix="hypic-redis-"))))
        self._ports = {name: free_port() for name in ("cache", *_ROUTERS, *roles)}
        self._metrics = {name: free_port() for name in ("cache", *roles)}
        self.proxies = {name: WorkerProxy(f"{self._host(name)}:{self._ports[name]}") for name in roles}
        self.base_url, self.second_url = (f"http://127.0.0.1:{self._ports[name]}" for name in _ROUTERS)
        self._shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HYPIC_CACHE_LISTEN_ADDRESS": f"{'0.0.0.0' if apart else '127.0.0.1'}:{self._ports['cache']}",
            "HYPIC_CACHE_METRICS_PORT": str(self._metrics["cache"]),
            "HYPIC_CACHE_DIRECTORY": "redis",
            "HYPIC_CACHE_REDIS_URL": self.redis.url,
            "HYPIC_CACHE_SECRET": "a secret of the cluster",
            "HYPIC_CACHE_WORKER_TTL_SECONDS": "3",
            "HYPIC_WORKER_CACHE_ADDRESS": f"127.0.0.1:{self._ports['cache']}",
            "HYPIC_WORKER_CHECKPOINT": str(checkpoint),
            "HYPIC_ROUTER_CACHE_ADDRESS": f"127.0.0.1:{self._ports['cache']}",
            # What tests count is their own requests.
            "HYPIC_ROUTER_GUARD_SHARE": "0",
            **variables,
        }

    def __enter__(self) -> Self:
        try:
            for proxy in self.proxies.values():
                self._closing.enter_context(proxy)
            self.redis.start()
            self.http = self._closing.enter_context(httpx2.Client(base_url=self.base_url, timeout=60))
            for name in ("cache", *self.roles, *_ROUTERS):
                self.spawn(name)
            self.wait_ready()
            wait_until(lambda: all(self.gauge(name, "hypic_worker_pages_free") > 0 for name in self.roles))
            self._all_pages = self.gauge("workers", "hypic_worker_pages_free")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that still runs."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.redis.stop()
        self._closing.close()

    def spawn(self, name: str) -> None:
        """Start a service; see `wait_ready`."""
        with self._log.open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._prefix(name), sys.executable, "-m", "services.cli.main", self._service(name)],
                env={**self._shared, **self._own(name)},
                stderr=log,
                stdout=subprocess.DEVNULL,
            )

    def _host(self, name: str) -> str:
        return self._apart.inner if self._apart and name == self._lonely else "127.0.0.1"

    def _prefix(self, name: str) -> Sequence[str]:
        return self._apart.command if self._apart and name == self._lonely else ()

    def _service(self, name: str) -> str:
        if name in self.roles:
            return "worker"
        return "router" if name in _ROUTERS else name

    def _own(self, name: str) -> dict[str, str]:
        if name in _ROUTERS:
            addresses = ",".join(proxy.address for proxy in self.proxies.values()) if name == "router" else ""
            return {"HYPIC_ROUTER_WORKERS": addresses, "HYPIC_ROUTER_PORT": str(self._ports[name])}
        if name == "cache":
            return {}
        own = {
            "HYPIC_WORKER_WORKER_ID": name,
            "HYPIC_WORKER_ROLES": self.roles[name],
            "HYPIC_WORKER_LISTEN_ADDRESS": f"{self._host(name)}:{self._ports[name]}",
            "HYPIC_WORKER_ADVERTISE_ADDRESS": self.proxies[name].address,
            "HYPIC_WORKER_METRICS_HOST": self._host(name),
            "HYPIC_WORKER_METRICS_PORT": str(self._metrics[name]),
        }
        if self._apart and name == self._lonely:
            own["HYPIC_WORKER_CACHE_ADDRESS"] = f"{self._apart.outer}:{self._ports['cache']}"
        return own

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one service, or to Redis."""
        if name == "redis":
            self.redis.signal(number)
        else:
            self._processes[name].send_signal(number)
            if number == signal.SIGKILL:
                # Else it may still be taken for one that runs.
                self._processes[name].wait()

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for its end."""
        if name == "redis":
            self.redis.kill()
            return
        self._processes[name].kill()
        self._processes[name].wait()

    def end(self, name: str) -> int:
        """SIGTERM; the exit status."""
        self._processes[name].terminate()
        return self._processes[name].wait(60)

    def wait_ended(self, name: str) -> int:
        """The exit status of what ends by itself."""
        return self._processes[name].wait(60)

    def restore(self) -> None:
        """Whatever was ended or stopped runs again, and everything is ready."""
        self.redis.restore()
        for name in ("cache", *self.roles, *_ROUTERS):
            if self._processes[name].poll() is not None:
                self.spawn(name)
            else:
                self._processes[name].send_signal(signal.SIGCONT)
        for proxy in self.proxies.values():
            if proxy.fault is not None:
                proxy.fault.released.set()
            proxy.fault = None
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until every service is ready, and the router knows all workers."""
        served = [f"{self._host(name)}:{self._ports[name]}" for name in ("cache", *self.roles)]
        wait_until(lambda: self._all_run() and all(asyncio.run(grpc_ready(address)) for address in served), 90)
        for proxy in self.proxies.values():
            proxy.wait_through(90)
        wanted = sum(role.count(",") + 1 for role in self.roles.values())
        wait_until(lambda: self._all_run() and all(self.ready_roles(name) == wanted for name in _ROUTERS), 90)

    def _all_run(self) -> bool:
        """True; fails at once where a service has ended by itself."""
        ended = [(name, process.returncode) for name, process in self._processes.items() if process.poll() is not None]
        assert not ended, f"{ended} ended; the log's end: {self._log.read_text()[-3000:]}"
        return True

    def ready_roles(self, router: str = "router") -> float:
        """Roles of the workers that a router may use; one with both counts twice."""
        return read_metric(self._ports[router], "hypic_workers", 'state="ready"')

    def gauge(self, service: str, name: str, labels: str = "") -> float:
        """The sum of a metric's samples whose labels hold this text; `workers` are all of them together."""
        if service == "workers":
            return sum(self.gauge(each, name, labels) for each in self.roles)
        return read_metric(self._metrics[service], name, labels, self._host(service))

    def wait_idle(self) -> None:
        """Until nothing runs or waits, no lease is left, and the workers hold just what the directory lists."""
        wait_refreshed(self.gauge, self.roles)
        wait_until(lambda: self.gauge("workers", "hypic_worker_num_requests_running") == 0)
        wait_until(lambda: self.gauge("workers", "hypic_worker_num_requests_waiting") == 0)
        wait_until(lambda: self.gauge("cache", "hypic_cache_leases") == 0)
        wait_until(lambda: self.gauge("cache", "hypic_cache_tickets") == 0)
        wait_until(
            lambda: self.gauge("workers", "hypic_worker_state_bytes") == self.gauge("cache", "hypic_cache_bytes")
        )

    def forget_everything(self) -> None:
        """Invalidate all that is stored; returns when the workers' memory is as free as at the start."""
        request = cache_pb2.InvalidateRequest(whole_tenant=True)
        request.namespace.tenant = "default"
        with grpc.insecure_channel(f"127.0.0.1:{self._ports['cache']}") as channel:
            cache_pb2_grpc.CacheServiceStub(channel).Invalidate(request, timeout=10)
        wait_until(lambda: self.gauge("workers", "hypic_worker_state_bytes") == 0)
        wait_until(lambda: self.gauge("workers", "hypic_worker_pages_free") == self._all_pages)
