"""The Redis store when Redis restarts, goes away, or evicts by itself."""

import pytest

from services.worker.tiers.redis import RedisStore
from tests.contract.test_blob_stores import CAPACITY, blob, key, read
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server


def _store(server: RedisServer, owner: str = "worker-0", blob_max_bytes: int = CAPACITY) -> RedisStore:
    return RedisStore(server.url, "test", owner, CAPACITY, blob_max_bytes)


@pytest.fixture(autouse=True)
def _empty(redis_server: RedisServer) -> None:
    redis_server.run("FLUSHALL")


def test_blobs_survive_the_worker(redis_server: RedisServer) -> None:
    store = _store(redis_server)
    store.put(key(1), blob(1, 300))
    store.close()
    again, other = _store(redis_server), _store(redis_server, owner="worker-1")
    again.take_back()
    other.take_back()
    assert read(again, 1) == b"".join(blob(1, 300))
    assert not other.sizes()
    assert read(other, 1) is None
    again.check_integrity()
    again.close()
    other.close()


def test_larger_blobs_stay_out(redis_server: RedisServer) -> None:
    store = _store(redis_server, blob_max_bytes=200)
    assert not store.put(key(1), blob(1, 201))
    assert store.put(key(1), blob(1, 200))
    store.check_integrity()
    store.close()


def test_what_redis_has_lost_is_a_miss(redis_server: RedisServer) -> None:
    store = _store(redis_server)
    store.put(key(1), blob(1, 300))
    redis_server.run("FLUSHALL")
    assert store.size(key(1)) == 300
    assert read(store, 1) is None
    assert store.size(key(1)) is None
    store.close()


def test_a_redis_that_does_not_answer(redis_server: RedisServer) -> None:
    store = _store(redis_server)
    store.put(key(1), blob(1, 300))
    redis_server.stop()
    try:
        with pytest.raises(OSError, match="Redis"):
            store.open(key(1))
        with pytest.raises(OSError, match="Redis"):
            store.put(key(2), blob(2, 300))
        with pytest.raises(OSError, match="Redis"):
            store.delete(key(1))
        assert not store.sizes()
        with pytest.raises(OSError, match="Redis"):
            store.take_back()
    finally:
        redis_server.start()
    assert store.put(key(2), blob(2, CAPACITY))
    assert read(store, 2) == b"".join(blob(2, CAPACITY))
    store.check_integrity()
    store.close()
