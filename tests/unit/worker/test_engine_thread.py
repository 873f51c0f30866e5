"""The engine's thread: what callers hear when its loop ends under them."""

import asyncio
import threading

import pytest

from services.common.errors import UnavailableError
from services.worker.adapters.engine_thread import EngineThread
from services.worker.engine.loop import Engine
from tests.unit.worker.engine_rig import EngineRig

_GATE_SECONDS = 30.0


class _BrokenDeviceError(RuntimeError):
    pass


def _break(_engine: Engine) -> None:
    raise _BrokenDeviceError


async def test_a_call_returns_a_result_or_raises(rig: EngineRig) -> None:
    thread = EngineThread(lambda: rig.engine, lambda error: None)
    await thread.start()
    assert await thread.call(lambda engine: engine.num_running) == 0
    with pytest.raises(_BrokenDeviceError):
        await thread.call(_break)
    assert await thread.call(lambda engine: engine.is_idle)
    thread.stop()


async def test_callers_of_a_dead_engine_are_told(rig: EngineRig) -> None:
    """Who waits when it dies, and who comes later; nobody waits for ever."""
    deaths: list[BaseException] = []
    thread = EngineThread(lambda: rig.engine, deaths.append)
    await thread.start()
    gate = threading.Event()

    def hold(_engine: Engine) -> None:
        gate.wait(_GATE_SECONDS)

    thread.post(hold)
    thread.post(_break)
    waiting = [asyncio.create_task(thread.call(lambda engine: engine.num_running)) for _ in range(3)]
    left = asyncio.create_task(thread.call(lambda engine: engine.num_running))
    await asyncio.sleep(0)
    left.cancel()
    gate.set()
    for call in waiting:
        with pytest.raises(UnavailableError, match="ended"):
            await call
    with pytest.raises(UnavailableError, match="ended"):
        await thread.call(lambda engine: engine.num_running)
    assert [type(death) for death in deaths] == [_BrokenDeviceError]
    thread.stop()


async def test_a_call_behind_the_stop_is_told(rig: EngineRig) -> None:
    thread = EngineThread(lambda: rig.engine, lambda error: None)
    await thread.start()
    thread.stop()
    with pytest.raises(UnavailableError):
        await thread.call(lambda engine: engine.num_running)


async def test_a_fault_of_building_reaches_the_starter() -> None:
    def build() -> Engine:
        raise _BrokenDeviceError

    with pytest.raises(_BrokenDeviceError):
        await EngineThread(build, lambda error: None).start()
