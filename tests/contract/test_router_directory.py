"""The router's client of the cache service, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import pytest
from hypic.v1 import cache_pb2_grpc

from services.common.errors import DeadlineError, UnavailableError
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.router.adapters.clients import GrpcDirectory
from services.router.domain.plan import CacheEntry, EntryKind
from services.router.domain.ports import PlanQuery
from services.router.domain.request import Namespace
from tests.stub_cache import StubCache

DEADLINE_SECONDS = 10.0
QUERY = PlanQuery(
    request_id="r",
    namespace=Namespace("acme"),
    model="m",
    profile_digest="p",
    entries=(CacheEntry(EntryKind.SEGMENT, b"c" * 32, 400),),
    lease_seconds=30.0,
)


@dataclass(slots=True)
class Served:
    cache: StubCache
    server: grpc.aio.Server
    port: int
    directory: GrpcDirectory

    async def lease(self, timeout_seconds: float = DEADLINE_SECONDS) -> str:
        return (await self.directory.plan(QUERY, timeout_seconds)).lease_id

    async def release(self, lease_id: str) -> None:
        await self.directory.release(lease_id, DEADLINE_SECONDS)

    async def restart(self) -> None:
        """As after a kill, on the same port."""
        await self.server.stop(0)
        self.server, _ = await serve(self.cache, self.port)


async def serve(cache: StubCache, port: int = 0) -> tuple[grpc.aio.Server, int]:
    return await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)],
        f"127.0.0.1:{port}",
        HealthSwitch(),
    )


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    cache = StubCache()
    server, port = await serve(cache)
    async with create_channel(f"127.0.0.1:{port}") as channel:
        one = Served(cache, server, port, GrpcDirectory(channel))
        yield one
    await one.server.stop(0)


async def reaches_one_plan(cache: StubCache) -> None:
    for _ in range(int(DEADLINE_SECONDS / 0.01)):
        if cache.plans:
            return
        await asyncio.sleep(0.01)
    pytest.fail("no plan arrived")


async def test_all_plans_go_over_one_stream_and_each_gets_its_own_answer(served: Served) -> None:
    queries = [replace(QUERY, entries=QUERY.entries * number) for number in range(1, 20)]
    answers = await asyncio.gather(*(served.directory.plan(query, DEADLINE_SECONDS) for query in queries))
    assert [len(answer.outcomes) for answer in answers] == list(range(1, 20))
    assert len({answer.lease_id for answer in answers}) == len(queries)
    assert served.cache.num_streams == 1


async def test_a_plan_that_fails_leaves_the_stream_to_the_next_one(served: Served) -> None:
    served.cache.is_down = True
    with pytest.raises(UnavailableError, match="the stub is down"):
        await served.lease()
    served.cache.is_down = False
    assert await served.lease()
    assert served.cache.num_streams == 1


async def test_a_late_answer_is_nobody_elses(served: Served) -> None:
    served.cache.plan_delay_seconds = 0.3
    with pytest.raises(DeadlineError):
        await served.lease(timeout_seconds=0.1)
    assert await served.lease() == "lease-2"
    assert served.cache.num_streams == 1


async def test_the_lease_of_a_late_answer_is_given_back(served: Served) -> None:
    served.cache.plan_delay_seconds = 0.3
    with pytest.raises(DeadlineError):
        await served.lease(timeout_seconds=0.1)
    for _ in range(int(DEADLINE_SECONDS / 0.01)):
        if served.cache.releases:
            break
        await asyncio.sleep(0.01)
    assert [list(request.lease_ids) for request in served.cache.releases] == [["lease-1"]]


async def test_a_late_answer_takes_no_lease_that_it_was_to_extend(served: Served) -> None:
    lease_id = await served.lease()
    served.cache.plan_delay_seconds = 0.3
    with pytest.raises(DeadlineError):
        await served.directory.plan(replace(QUERY, lease_id=lease_id), 0.1)
    # Answers of the stub come in order: the late one has been read by then.
    other = await served.lease()
    await served.release(other)
    assert [list(request.lease_ids) for request in served.cache.releases] == [[other]]


async def test_a_plan_that_is_cancelled_before_it_was_sent_is_never_made(served: Served) -> None:
    plans = [asyncio.create_task(served.lease()) for _ in range(3)]
    await asyncio.sleep(0)
    plans[1].cancel()
    assert list(await asyncio.gather(plans[0], plans[2])) == ["lease-1", "lease-2"]
    assert len(served.cache.plans) == 2


async def test_a_cancelled_plan_disturbs_no_other(served: Served) -> None:
    served.cache.plan_delay_seconds = 0.1
    plans = [asyncio.create_task(served.lease()) for _ in range(3)]
    await asyncio.sleep(0)
    plans[0].cancel()
    await reaches_one_plan(served.cache)
    plans[1].cancel()
    assert await plans[2] == "lease-3"
    assert served.cache.num_streams == 1


async def test_waiting_plans_fail_with_a_lost_service_and_the_next_one_finds_it_again(served: Served) -> None:
    served.cache.plan_delay_seconds = 60.0
    plans = [asyncio.create_task(served.lease()) for _ in range(2)]
    await reaches_one_plan(served.cache)
    served.cache.plan_delay_seconds = 0.0
    async with asyncio.timeout(DEADLINE_SECONDS):
        await served.restart()
        outcomes = await asyncio.gather(*plans, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [UnavailableError, UnavailableError]
        while True:
            try:
                assert await served.lease()
                break
            except UnavailableError:
                await asyncio.sleep(0.05)
    assert served.cache.num_streams == 2


async def test_a_service_that_is_not_there_is_unavailable_before_the_deadline(served: Served) -> None:
    await served.lease()
    await served.server.stop(0)
    for _ in range(3):
        with pytest.raises(UnavailableError):
            await served.lease()


async def test_leases_that_end_within_a_moment_are_released_in_one_call(served: Served) -> None:
    leases = [await served.lease() for _ in range(3)]
    await asyncio.gather(*map(served.release, leases[:2]))
    assert [list(request.lease_ids) for request in served.cache.releases] == [leases[:2]]
    assert served.cache.leases == {leases[2]}
    await served.release(leases[2])
    assert [list(request.lease_ids) for request in served.cache.releases] == [leases[:2], leases[2:]]


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_release_goes_although_one_who_gave_it_is_cancelled(served: Served, cancelled: int) -> None:
    calls = [asyncio.create_task(served.release(await served.lease())) for _ in range(2)]
    await asyncio.sleep(0)
    calls[cancelled].cancel()
    await calls[1 - cancelled]
    assert served.cache.leases == set()
    with pytest.raises(asyncio.CancelledError):
        await calls[cancelled]


async def test_everyone_learns_that_a_release_failed_and_the_next_one_goes(served: Served) -> None:
    leases = [await served.lease() for _ in range(2)]
    served.cache.is_down = True
    outcomes = await asyncio.gather(*map(served.release, leases), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [UnavailableError, UnavailableError]
    served.cache.is_down = False
    await served.release(leases[0])
    assert served.cache.leases == {leases[1]}
