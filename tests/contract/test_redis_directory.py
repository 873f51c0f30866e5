"""What only the Redis directory has to hold: outages, lost scripts, several replicas, the server's own clock."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from services.cache.adapters.redis_directory import RedisAddress, RedisDirectory
from services.cache.domain.errors import DirectoryUnavailableError
from services.cache.domain.values import PlanOutcome
from tests.contract.directory_rig import LIMITS, Clock, create_rig, rig_over
from tests.redis_server import WHEEL_REDIS, RedisServer


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that a test may stop and start; it has lost everything then."""
    yield from _own_server()


@pytest.fixture
def lasting_server() -> Iterator[RedisServer]:
    """A server that keeps all that it has answered."""
    yield from _own_server("--appendonly", "yes", "--appendfsync", "always")


def _own_server(*options: str) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        server = RedisServer(Path(folder), WHEEL_REDIS, *options)
        server.start()
        yield server
        server.stop()


async def test_an_outage_is_reported_at_once_and_ends_with_it(own_server: RedisServer) -> None:
    """What the workers hold is of no use to a Redis that has lost what it knew of invalidations."""
    rig = create_rig("redis", own_server.url)
    await rig.beat("w1")
    (key,) = await rig.store("a")
    own_server.stop()
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(DirectoryUnavailableError, match="Redis does not answer"):
            await rig.plan("a")
        assert time.monotonic() - started < 5
    own_server.start()
    assert await rig.outcomes("a") == [PlanOutcome.COLD]
    assert await rig.beat("w1", [key]) == {key}
    assert await rig.outcomes("a") == [PlanOutcome.COLD]
    assert await rig.store("a") == [key]
    assert await rig.outcomes("a") == [PlanOutcome.HIT]
    await rig.directory.check_integrity()
    await rig.directory.close()


async def test_a_redis_that_keeps_its_data_goes_on_where_it_was_killed(lasting_server: RedisServer) -> None:
    """Whoever was away meanwhile brings back what may still be used."""
    rig = create_rig("redis", lasting_server.url)
    await rig.beat("w1")
    await rig.register("x", "v1", "hr")
    await rig.pins.pin_document("acme", "x")
    revoked, kept = await rig.store("a", "b")
    rig.clock.now += 16
    await rig.invalidate_document("acme", "doc-a")
    lasting_server.kill()
    lasting_server.start()
    assert await rig.beat("w1", [revoked, kept]) == {revoked}
    assert await rig.outcomes("a", "b") == [PlanOutcome.COLD, PlanOutcome.HIT]
    assert await rig.documents.describe("acme", "x") is not None
    await rig.directory.check_integrity()
    await rig.directory.close()


async def test_a_server_that_hangs_is_unavailable_too(own_server: RedisServer) -> None:
    rig = create_rig("redis", own_server.url, timeout_seconds=1.0)
    await rig.plan("a")
    await asyncio.to_thread(own_server.run, "CLIENT", "PAUSE", "2500", "ALL")
    with pytest.raises(DirectoryUnavailableError):
        await rig.plan("a")
    await rig.directory.close()


async def test_flushed_scripts_are_loaded_again(redis_server: RedisServer) -> None:
    rig = create_rig("redis", redis_server.url)
    await rig.beat("w1")
    await rig.store("a")
    await asyncio.to_thread(redis_server.run, "SCRIPT", "FLUSH")
    assert await rig.outcomes("a") == [PlanOutcome.HIT]
    await rig.directory.close()


async def test_replicas_share_one_directory_on_the_servers_clock(redis_server: RedisServer) -> None:
    prefix = f"test-{secrets.token_hex(6)}"
    rigs = []
    for _ in range(2):
        directory = RedisDirectory(RedisAddress(redis_server.url, prefix), LIMITS)
        rigs.append(rig_over(directory, "redis", Clock()))
    await rigs[0].beat("w1")
    plans = await asyncio.gather(*(rig.plan("a") for rig in rigs for _ in range(20)))
    cold = [reply.entries[0] for reply in plans if reply.entries[0].outcome is PlanOutcome.COLD]
    assert len(cold) == 1
    assert cold[0].ticket is not None
    assert cold[0].ticket.expires_in_seconds == pytest.approx(60)
    assert abs(cold[0].ticket.fence / 1e6 - time.time()) < 60
    await rigs[1].publish(cold[0])
    assert await rigs[0].outcomes("a") == [PlanOutcome.HIT]
    for rig in rigs:
        await rig.directory.check_integrity()
        await rig.directory.close()


async def test_every_key_lies_under_the_prefix_and_names_no_tenant(own_server: RedisServer) -> None:
    rig = create_rig("redis", own_server.url)
    await rig.beat("w1")
    await rig.store("a", tenant="acme")
    client = redis.asyncio.Redis.from_url(own_server.url, decode_responses=True)
    names = [name async for name in client.scan_iter()]
    assert len({name.split(":")[0] for name in names}) == 1
    assert all(name.startswith("{test-") for name in names)

    assert not any("acme" in name or "doc-a" in name for name in names)
    await client.aclose()
    await rig.directory.close()


async def test_a_released_directory_leaves_no_keys_behind(own_server: RedisServer) -> None:
    rig = create_rig("redis", own_server.url)
    await rig.beat("w1")
    await rig.store("a", "b")
    await rig.plan("c", "a")
    rig.clock.now += 2 * LIMITS.share_seconds
    await rig.directory.usage()
    client = redis.asyncio.Redis.from_url(own_server.url, decode_responses=True)
    left = {name.split(":", 1)[1] async for name in client.scan_iter()}
    assert left == {"bytes", "life", "sequence"}
    await client.aclose()
    await rig.directory.close()
