"""`hypic up`: router, cache service and workers as children of one process, restarted when they die."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.orphans import SUPERVISOR_VARIABLE
from services.cli.ports import free_port, grpc_ready, http_ready
from services.cli.state import state_variables
from services.common.telemetry import get_logger

__all__ = ["BOTH_ROLES", "Stack", "StackOptions", "StackStartError"]

_POLL_SECONDS = 0.05
_STOP_SECONDS = 90.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0
# A child that lived this long has started well; its next failure is not part of a series.
_STEADY_SECONDS = 30.0
BOTH_ROLES = "prefill,combine"


class StackStartError(Exception):
    """A service did not become ready; the message says which, and what to do."""


@dataclass(frozen=True, slots=True)
class StackOptions:
    """checkpoint: the model to serve; port 0 takes a free one; variables go to every child; roles: of every worker, as
    `HYPIC_WORKER_ROLES` writes them, and how many there are; start_seconds: that a service may take until it is ready.

    state_directory: what outlives the stack, see `state.py`; without one nothing does, though services may be restarted.
    """

    checkpoint: Path
    host: str = "127.0.0.1"
    port: int = 8000
    log_level: str = "info"
    log_format: str = "console"
    variables: Mapping[str, str] = field(default_factory=dict)
    state_directory: Path | None = None
    roles: tuple[str, ...] = (BOTH_ROLES,)
    # A worker on a GPU reads tens of gigabytes and compiles its kernels.
    start_seconds: float = 600.0


class _Child:
    """One service's process. Restarts it whenever it dies, with growing pauses, until it is told to stop.

    service: which `hypic` command it runs.
    """

    def __init__(
        self, name: str, service: str, variables: Mapping[str, str], is_ready: Callable[[], Awaitable[bool]]
    ) -> None:
        self.name = name
        self._service = service
        self._variables = variables
        self._is_ready = is_ready
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        # Set for good by a fault that a restart cannot mend.
        self.fatal_status: int | None = None

    @property
    def pid(self) -> int:
        """The running process; 0 between two."""
        return 0 if self._process is None else self._process.pid

    async def start(self, seconds: float) -> None:
        """Returns when the service is ready.

        Raises:
            StackStartError: it exits with a settings or checkpoint fault, or takes too long.
        """
        self._task = asyncio.create_task(self._keep_running())
        try:
            async with asyncio.timeout(seconds):
                while not await self._is_ready():
                    if self.fatal_status is not None:
                        raise StackStartError(f"the {self.name} ended with status {self.fatal_status}; see its message")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise StackStartError(f"the {self.name} was not ready within {seconds:.0f} seconds") from None

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for one that does not end."""
        self._stopping = True
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_running(self) -> None:
        clock = asyncio.get_running_loop()
        pause = _FIRST_PAUSE_SECONDS
        while not self._stopping:
            started_at = clock.time()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.cli.main",
                self._service,
                env={**os.environ, **self._variables, SUPERVISOR_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            status = await self._process.wait()
            if self._stopping:
                return
            if status == 2:
                self.fatal_status = status
                return
            get_logger().error("child_died", child=self.name, status=status)
            pause = _FIRST_PAUSE_SECONDS if clock.time() - started_at > _STEADY_SECONDS else pause * 2
            await asyncio.sleep(min(pause, _LONGEST_PAUSE_SECONDS))


class Stack:
    """The whole tier on this machine. `base_url` is where clients go, `model_name` what they ask for."""

    def __init__(self, options: StackOptions) -> None:
        port = options.port or free_port()
        cache_address = f"127.0.0.1:{free_port()}"
        workers = [f"127.0.0.1:{free_port()}" for _ in options.roles]
        self.base_url = f"http://{_reached_at(options.host)}:{port}"
        self.model_name = options.checkpoint.name
        addresses = {
            "HYPIC_CACHE_LISTEN_ADDRESS": cache_address,
            "HYPIC_WORKER_CACHE_ADDRESS": cache_address,
            "HYPIC_ROUTER_CACHE_ADDRESS": cache_address,
            "HYPIC_ROUTER_WORKERS": ",".join(workers),
            "HYPIC_ROUTER_HOST": options.host,
            "HYPIC_ROUTER_PORT": str(port),
            "HYPIC_WORKER_CHECKPOINT": str(options.checkpoint),
        }
        for service in ("CACHE", "WORKER", "ROUTER"):
            addresses[f"HYPIC_{service}_LOG_LEVEL"] = options.log_level
            addresses[f"HYPIC_{service}_LOG_FORMAT"] = options.log_format
        # What stands for the state directory is filled in at the start.
        self._variables = {**addresses, **options.variables}
        probed = _probed_apart("CACHE", cache_address, self._variables)
        self._variables |= probed
        cache_probe = probed.get("HYPIC_CACHE_HEALTH_ADDRESS", cache_address)
        self._state_directory = options.state_directory
        self._start_seconds = options.start_seconds
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        ready_url = f"{self.base_url}/health/ready"
        self._children = (
            _Child("cache", "cache", self._variables, lambda: grpc_ready(cache_probe)),
            *(
                _worker(index, address, roles, self._variables, len(workers))
                for index, (address, roles) in enumerate(zip(workers, options.roles, strict=True))
            ),
            _Child("router", "router", self._variables, lambda: http_ready(ready_url)),
        )

    def pid(self, name: str) -> int:
        """The process of `cache`, `worker-0` and so on, or `router`; 0 between two restarts."""
        return next(child.pid for child in self._children if child.name == name)

    async def start(self) -> None:
        """Returns when all are ready. Stops what it has started before it raises.

        Raises:
            StackStartError: one of them did not come up, or the state directory cannot be used.
        """
        try:
            self._variables |= self._open_state()
            *others, router = self._children
            await asyncio.gather(*(child.start(self._start_seconds) for child in others))
            await router.start(self._start_seconds)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """The router first, so that running replies are finished while the others still serve them."""
        for child in reversed(self._children):
            await child.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _open_state(self) -> dict[str, str]:
        directory = self._state_directory
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="hypic-")
            directory = Path(self._temporary.name)
        try:
            return state_variables(directory, {**os.environ, **self._variables})
        except OSError as error:
            raise StackStartError(f"{error}; name a folder that may be written with --state") from error

    async def wait_for_fault(self) -> str:
        """Waits until a child ends for good; returns its name."""
        while True:
            for child in self._children:
                if child.fatal_status is not None:
                    return child.name
            await asyncio.sleep(0.5)


def _worker(index: int, address: str, roles: str, variables: Mapping[str, str], num_workers: int) -> _Child:
    asked = {**os.environ, **variables}
    own = {"HYPIC_WORKER_LISTEN_ADDRESS": address}
    if roles != BOTH_ROLES:
        own["HYPIC_WORKER_ROLES"] = roles
    if num_workers > 1:
        # An id, a GPU and a metrics port each.
        own["HYPIC_WORKER_WORKER_ID"] = f"worker-{index}"
        if asked.get("HYPIC_WORKER_DEVICE") == "cuda":
            own["HYPIC_WORKER_DEVICE"] = f"cuda:{index}"
        if int(asked.get("HYPIC_WORKER_METRICS_PORT") or 0):
            own["HYPIC_WORKER_METRICS_PORT"] = str(int(asked["HYPIC_WORKER_METRICS_PORT"]) + index)
    own |= _probed_apart("WORKER", address, variables)
    probe = own.get("HYPIC_WORKER_HEALTH_ADDRESS", address)
    return _Child(f"worker-{index}", "worker", {**variables, **own}, lambda: grpc_ready(probe))


def _probed_apart(service: str, address: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Where to ask a service that answers only those with a certificate whether it is ready."""
    if not {**os.environ, **variables}.get(f"HYPIC_{service}_TLS_CERT_FILE"):
        return {}
    return {f"HYPIC_{service}_HEALTH_ADDRESS": f"{address.rpartition(':')[0]}:{free_port()}"}


def _reached_at(host: str) -> str:
    """Where this machine reaches a listener, as a URL writes it: on loopback when it listens everywhere."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached
