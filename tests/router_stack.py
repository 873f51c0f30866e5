"""A router on a free port with stub services behind it, in a thread with a loop of its own."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import grpc
import httpx2
from hypic.v1 import cache_pb2_grpc, worker_pb2_grpc

from services.common.rpc import HealthSwitch, create_server
from services.common.tls import TlsFiles
from services.router import bootstrap
from services.router.settings import RouterSettings
from tests.stub_cache import StubCache
from tests.stub_worker import StubPrefill, StubWorker

Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until the condition holds; fails the test when it does not in time."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "condition not met in time"
        time.sleep(0.02)


class StubServices:
    """Stub worker and cache service in a background loop. tls: of both; plain text without."""

    def __init__(self, *, can_capture: bool = True, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self.cache = StubCache()
        self.worker = StubWorker(self.cache, can_capture=can_capture)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._servers: list[grpc.aio.Server] = []
        self.worker_port = 0
        self.prefill_port = 0
        self.cache_port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.start_cache()
        if not self.worker.can_capture:
            self.prefill_port = self._serve_worker(self._create_prefill(), 0)[1]
        self.start_worker()
        return self

    def _create_prefill(self) -> StubPrefill:
        return StubPrefill(
            self.cache, self.worker.tokenizer, worker_id="stub-prefill", can_combine=False, behind=self.worker
        )

    @property
    def worker_addresses(self) -> str:
        """As the router's settings name them."""
        return ",".join(f"127.0.0.1:{port}" for port in (self.worker_port, self.prefill_port) if port)

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            self.call(server.stop(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run this in the background loop."""
        return self.submit(work).result(20)

    def submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Start this in the background loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def start_worker(self) -> grpc.aio.Server:
        """Serve the worker, on the same port as before."""
        server, self.worker_port = self._serve_worker(self.worker, self.worker_port)
        return server

    def _serve_worker(self, worker: StubWorker, port: int) -> tuple[grpc.aio.Server, int]:
        return self._serve(lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server), port)

    def start_cache(self) -> grpc.aio.Server:
        """Serve the cache service, on the same port as before."""
        server, self.cache_port = self._serve(
            lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(self.cache, server), self.cache_port
        )
        return server

    def stop(self, server: grpc.aio.Server) -> None:
        """End one server at once, as a kill does."""
        self.call(server.stop(0))
        self._servers.remove(server)

    @property
    def cache_server(self) -> grpc.aio.Server:
        """The cache service, as long as nothing was stopped."""
        return self._servers[0]

    @property
    def worker_server(self) -> grpc.aio.Server:
        """The worker, as long as nothing was restarted since it came."""
        return self._servers[-1]

    def _serve(self, add: Callable[[grpc.aio.Server], None], port: int) -> tuple[grpc.aio.Server, int]:
        server, bound = self.call(create_server([add], f"127.0.0.1:{port}", HealthSwitch(), self._tls))
        self._servers.append(server)
        return server, bound

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class RouterStack(StubServices):
    """Stub services and the router, served over HTTP. can_capture: whether one worker does all, or another one captures."""

    def __init__(
        self, settings: RouterSettings | None = None, *, can_capture: bool = True, tls: TlsFiles | None = None
    ) -> None:
        super().__init__(can_capture=can_capture, tls=tls)
        self._settings = settings or RouterSettings()

    def __enter__(self) -> Self:
        super().__enter__()
        addresses = {
            "workers": self.worker_addresses,
            "cache_address": f"127.0.0.1:{self.cache_port}",
        }
        settings = self._settings.model_copy(update={"port": 0, **addresses})
        listener = bootstrap.bind(settings)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = self.call(self._create(settings))
        self._serving = self.submit(self._server.serve(sockets=[listener]))
        self.http = httpx2.Client(base_url=self.url, timeout=20)
        wait_until(self.is_ready)
        wait_until(self._knows_workers)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._serving.result(20)
        super().__exit__()

    def _knows_workers(self) -> bool:
        lines = self.http.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("hypic_workers") and 'state="ready"' in line] != [] and not [
            line for line in lines if line.startswith("hypic_workers") and 'state="connecting"' in line
        ]

    def is_ready(self) -> bool:
        return self.http.get("/health/ready").status_code == 200

    async def _create(self, settings: RouterSettings) -> bootstrap.RouterServer:
        return bootstrap.create_server(settings)


class RunningRouter:
    """A router in the stubs' loop that need not be ready."""

    def __init__(self, services: StubServices, settings: RouterSettings) -> None:
        self._services, self._settings = services, settings

    def __enter__(self) -> str:
        listener = bootstrap.bind(self._settings)

        async def create() -> bootstrap.RouterServer:
            return bootstrap.create_server(self._settings)

        self._server = self._services.call(create())
        self._serving = self._services.submit(self._server.serve(sockets=[listener]))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it as SIGTERM does."""
        self._server.should_exit = True
        self._serving.result(20)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
