"""A server that does not end is not waited for."""

import asyncio
import time

import pytest

from services.common import rpc
from services.common.rpc import HealthSwitch, create_server, stop_server


class Endless:
    """Stands for a server whose library has lost a call."""

    def __init__(self) -> None:
        self.grace: float | None = None

    async def stop(self, grace: float | None) -> None:
        self.grace = grace
        await asyncio.Event().wait()


async def test_a_server_that_never_stops_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rpc, "_STOP_SECONDS", 0.2)
    server = Endless()
    async with asyncio.timeout(10):
        await stop_server(server, 0.1)  # type: ignore[arg-type]
    assert server.grace == 0.1
    printed = capsys.readouterr()
    assert "server_does_not_stop" in printed.out + printed.err


async def test_an_idle_server_stops_at_once() -> None:
    server, _ = await create_server([], "127.0.0.1:0", HealthSwitch())
    started = time.monotonic()
    await stop_server(server, 60)
    assert time.monotonic() - started < 30
    await asyncio.wait_for(server.wait_for_termination(), 30)
