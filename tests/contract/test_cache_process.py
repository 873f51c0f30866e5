"""The life of a cache service's process: readiness, draining, its end."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypic.v1 import cache_pb2 as pb
from hypic.v1 import cache_pb2_grpc
from prometheus_client import CollectorRegistry

from services.cache.bootstrap import start
from services.cache.settings import CacheSettings
from services.common.rpc import LIVENESS, READINESS, create_channel
from tests.contract.served_cache import DEADLINE_SECONDS, NOT_SERVING, SECRET, SEGMENT, SERVING, Service, running
from tests.redis_server import RedisServer


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder))
        server.start()
        yield server
        server.stop()


async def test_a_stream_of_plans_ends_with_the_service_and_not_with_its_grace() -> None:
    settings = CacheSettings.from_environment(listen_address="127.0.0.1:0", secret=SECRET)
    process = await start(settings, CollectorRegistry())
    async with create_channel(process.address) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Plan()
        await call.write(pb.PlanRequest(model="m", profile_digest="p", entries=[SEGMENT]))
        answer = await call.read()
        assert isinstance(answer, pb.PlanResponse)
        assert answer.entries[0].outcome == pb.PLAN_OUTCOME_COLD
        async with asyncio.timeout(DEADLINE_SECONDS):
            await process.stop(grace_seconds=10 * DEADLINE_SECONDS)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_stop_gets_through_to_a_watch_that_misses_it() -> None:
    settings = CacheSettings.from_environment(listen_address="127.0.0.1:0")
    process = await start(settings, CollectorRegistry())
    process.watch.cancel()
    missed = 0

    async def stubborn() -> None:
        nonlocal missed
        while missed < 2:
            try:
                await asyncio.sleep(10 * DEADLINE_SECONDS)
            except asyncio.CancelledError:
                missed += 1

    watch = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await replace(process, watch=watch).stop(0)
    assert missed == 2


async def test_readiness_follows_redis(own_server: RedisServer) -> None:
    settings = CacheSettings.from_environment(
        listen_address="127.0.0.1:0", directory="redis", redis_url=own_server.url, secret=SECRET
    )
    async with running(settings) as service:
        assert await service.status(READINESS) == SERVING
        own_server.stop()
        await reaches(service, NOT_SERVING)
        assert await service.status(LIVENESS) == SERVING
        assert (await service.plan()).failure.status == grpc.StatusCode.UNAVAILABLE.value[0]
        own_server.start()
        await reaches(service, SERVING)
        assert (await service.plan()).entries[0].outcome == pb.PLAN_OUTCOME_COLD


async def reaches(service: Service, wanted: int) -> None:
    for _ in range(int(DEADLINE_SECONDS / 0.1)):
        if await service.status(READINESS) == wanted:
            return
        await asyncio.sleep(0.1)
    pytest.fail("readiness did not follow Redis")


def test_sigterm_ends_the_process_with_status_0() -> None:
    environment = {**os.environ, "HYPIC_CACHE_LISTEN_ADDRESS": "127.0.0.1:0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from services.cache.bootstrap import main; main()"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert '"address": "127.0.0.1:' in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert '"event": "stopped"' in process.stderr.read()
        assert process.wait() == 0


def test_a_bad_setting_ends_the_process_with_status_2() -> None:
    environment = {**os.environ, "HYPIC_CACHE_DIRECTORY": "redis", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "from services.cache.bootstrap import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "secret" in done.stderr


def test_a_journal_that_cannot_be_used_ends_the_process_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {
        **os.environ,
        "HYPIC_CACHE_LISTEN_ADDRESS": "127.0.0.1:0",
        "HYPIC_CACHE_SECRET": SECRET,
        "HYPIC_CACHE_JOURNAL_FILE": str(tmp_path / "file" / "journal"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", "from services.cache.bootstrap import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "HYPIC_CACHE_JOURNAL_FILE" in done.stderr
    assert "Traceback" not in done.stderr
