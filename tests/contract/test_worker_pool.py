"""How a router finds workers, and which of them it takes, over real gRPC."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest
from hypic.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from structlog.testing import capture_logs

from services.common.errors import UnavailableError
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.router.adapters.clients import Description
from services.router.adapters.discovery import find_named, find_registered, keep_finding
from services.router.adapters.worker_pool import WorkerPool
from services.router.served_model import ServedModel
from tests.stub_cache import StubCache
from tests.stub_worker import StubWorker

SILENCE_SECONDS = 0.5


def build(description: Description) -> ServedModel:
    """The pool only hands it on."""
    return cast(ServedModel, description.info.profile.digest)


@dataclass
class Rig:
    """A pool, and workers on addresses of their own."""

    closing: AsyncExitStack
    pool: WorkerPool = field(default_factory=lambda: WorkerPool(build, SILENCE_SECONDS))
    servers: dict[str, grpc.aio.Server] = field(default_factory=dict)

    async def serve(self, worker: StubWorker, address: str = "127.0.0.1:0") -> str:
        server, port = await create_server(
            [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)],
            address,
            HealthSwitch(),
        )
        self.closing.push_async_callback(server.stop, 0)
        at = f"127.0.0.1:{port}"
        self.servers[at] = server
        return at

    def is_in(self, states: dict[tuple[str, str], int]) -> Callable[[], bool]:
        return lambda: dict(self.pool.states()) == states

    def model(self) -> str:
        return str(self.pool.require())

    def ids(self) -> list[str]:
        return [view.worker_id for view in self.pool.views()]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as closing:
        rig = Rig(closing)
        closing.push_async_callback(rig.pool.close)
        yield rig


def stub(worker_id: str, profile_digest: str = "profile-1") -> StubWorker:
    return StubWorker(StubCache(), worker_id=worker_id, profile_digest=profile_digest)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("condition not met in time")


async def test_a_worker_of_another_profile_is_refused_with_the_reason(rig: Rig) -> None:
    """Until the last one of the first kind is gone; then the model is the other one's."""
    first, second = await rig.serve(stub("a")), await rig.serve(stub("b", "profile-2"))
    with capture_logs() as logs:
        rig.pool.update([first])
        await until(lambda: rig.ids() == ["a"])
        rig.pool.update([first, second])
        await until(rig.is_in({("prefill", "ready"): 1, ("combine", "ready"): 1, ("unknown", "refused"): 1}))
    (told,) = [log for log in logs if log["event"] == "worker_not_ready" and log.get("state") == "refused"]
    assert told["reason"] == (
        f"the worker at {second} is not like the others: its profile digest is profile-2, theirs profile-1"
    )
    assert rig.ids() == ["a"]
    assert rig.model() == "profile-1"
    await rig.servers[first].stop(0)
    rig.pool.update([second])
    await until(lambda: rig.ids() == ["b"])
    assert rig.model() == "profile-2"


async def test_workers_with_different_cards_serve_together_and_the_later_card_counts(rig: Rig) -> None:
    """While cards are rolled out, one worker has none yet."""
    workers = [stub(each) for each in "abc"]
    for worker, day in zip(workers, ("", "1", "2"), strict=True):
        worker.calibration = worker_pb2.Calibration(card_digest=day, date=f"2026-12-0{day}") if day else None
    rig.pool.update([await rig.serve(worker) for worker in workers])
    await until(lambda: rig.ids() == ["a", "b", "c"])
    card = rig.pool.calibration().card
    assert card is not None
    assert card.digest == "2"


async def test_two_workers_of_one_id_are_not_taken(rig: Rig) -> None:
    first = await rig.serve(stub("same"))
    rig.pool.update([first])
    await until(lambda: rig.ids() == ["same"])
    with capture_logs() as logs:
        rig.pool.update([first, await rig.serve(stub("same"))])
        await until(lambda: any("HYPIC_WORKER_WORKER_ID" in str(log.get("reason")) for log in logs))
    assert rig.ids() == ["same"]


async def test_a_worker_combines_only_where_that_is_its_role(rig: Rig) -> None:
    prefill, combine = stub("a"), stub("b")
    prefill.can_combine = combine.can_capture = False
    rig.pool.update([await rig.serve(prefill)])
    await until(rig.is_in({("prefill", "ready"): 1}))
    with pytest.raises(UnavailableError, match="no worker that combines is known"):
        rig.pool.require()
    rig.pool.update([*rig.servers, await rig.serve(combine)])
    await until(rig.is_in({("prefill", "ready"): 1, ("combine", "ready"): 1}))
    assert rig.model() == "profile-1"


async def test_a_draining_worker_is_asked_for_nothing_new(rig: Rig) -> None:
    worker = stub("a")
    rig.pool.update([await rig.serve(worker)])
    await until(lambda: rig.ids() == ["a"])
    worker.is_draining = True
    await until(rig.is_in({("prefill", "draining"): 1, ("combine", "draining"): 1}))
    with pytest.raises(UnavailableError, match="is draining"):
        rig.pool.require()


async def test_one_that_is_not_named_any_more_stays_while_it_answers(rig: Rig) -> None:
    """The cache service may have lost its registrations; the worker's own word counts."""
    at = await rig.serve(stub("a"))
    rig.pool.update([at])
    await until(lambda: rig.ids() == ["a"])
    rig.pool.update([])
    assert rig.ids() == ["a"]
    await rig.servers[at].stop(0)
    await until(lambda: rig.ids() == [])
    rig.pool.update([])
    assert not rig.pool.states()


async def test_a_worker_that_comes_back_is_described_anew(rig: Rig) -> None:
    at = await rig.serve(stub("a"))
    rig.pool.update([at])
    await until(lambda: rig.ids() == ["a"])
    await rig.servers[at].stop(0)
    await until(lambda: rig.ids() == [])
    back = asyncio.create_task(rig.pool.wait_back(10))
    await rig.serve(stub("b", "profile-2"), at)
    assert str(await back) == "profile-2"


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a headless service's name does; one that is not known takes nothing from the others."""
    pods = {"workers": ["10.0.0.1", "10.0.0.2"], "six": ["fd00::1"]}

    async def resolve(_: object, host: str, port: int, **_more: object) -> list[tuple[object, ...]]:
        if host not in pods:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in pods[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)
    find = find_named([("workers", 8002), ("six", 8002), ("nobody", 8002)])
    assert await find() == {"10.0.0.1:8002", "10.0.0.2:8002", "[fd00::1]:8002"}
    pods["workers"].append("10.0.0.3")
    assert "10.0.0.3:8002" in await find()


@asynccontextmanager
async def cache_service(cache: StubCache) -> AsyncIterator[grpc.aio.Channel]:
    server, port = await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)], "127.0.0.1:0", HealthSwitch()
    )
    channel = create_channel(f"127.0.0.1:{port}")
    yield channel
    await channel.close()
    await server.stop(0)


async def test_what_is_registered_is_found_and_kept_without_the_cache_service() -> None:
    cache = StubCache(workers=[cache_pb2.RegisteredWorker(worker_id="a", address="10.0.0.1:8002")])
    told: list[set[str]] = []
    async with cache_service(cache) as channel:
        finding = asyncio.create_task(
            keep_finding(find_registered(channel), lambda found: told.append(set(found)), 0.02)
        )
        await until(lambda: told[-1:] == [{"10.0.0.1:8002"}])
        cache.is_down = True
        await asyncio.sleep(0.1)
        cache.is_down = False
        del cache.workers[:]
        await until(lambda: told[-1:] == [set()])
        finding.cancel()
    assert all(found == {"10.0.0.1:8002"} for found in told[:-1])
