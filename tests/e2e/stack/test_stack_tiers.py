"""Stored states outlive the worker: hits resume from disk and Redis, and damage is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.served import ServedStack, wait_until
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server

ASKED = [document(f"tiers {index}") for index in range(2)]


@contextmanager
def _served(checkpoint: Path, folder: Path, **variables: str) -> Iterator[ServedStack]:
    """What the directory remembers stays, and so does what tiers keep in `folder` or elsewhere."""
    with ServedStack(checkpoint, folder / "log", variables, state=folder / "state") as stack:
        yield stack


def _on_disk(folder: Path) -> dict[str, str]:
    return {"HYPIC_WORKER_DISK_DIRECTORY": str(folder / "states")}


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "states").rglob("*.safetensors"))


def _tiers(answer: Answer) -> set[str]:
    return {part["tier"] for part in answer.segments}


def _await_restored(stack: ServedStack, count: int) -> None:
    """Heartbeats tell the new directory what lies on disk."""
    wait_until(lambda: stack.gauge("cache", "hypic_cache_entries") >= count)


def test_hits_from_redis_after_a_restart_of_everything(
    random_checkpoint: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    own = {"HYPIC_WORKER_REDIS_URL": redis_server.url, "HYPIC_WORKER_REDIS_PREFIX": "tiers-test"}
    with redis.Redis.from_url(redis_server.url) as client:
        with _served(random_checkpoint, tmp_path, **own) as stack:
            composed = ask(stack, ASKED).text
        assert len(client.keys("tiers-test:blob:*")) == 2
        with _served(random_checkpoint, tmp_path, **own) as stack:
            _await_restored(stack, 2)
            assert ask(stack, ASKED, cache_salt="other").served == ["cold", "cold"]
            again = ask(stack, ASKED)
            assert (again.served, again.text, _tiers(again)) == (["hit", "hit"], composed, {"redis"})
            stack.invalidate_tenant()
            wait_until(lambda: not client.keys("tiers-test:blob:*"))
            assert ask(stack, ASKED).served == ["cold", "cold"]


def test_killed_and_damaged(random_checkpoint: Path, tmp_path: Path) -> None:
    """Kill -9 loses no segment that was stored, and every snapshot; a flipped byte and a lost file are computed anew."""
    with _served(random_checkpoint, tmp_path, **_on_disk(tmp_path)) as stack:
        composed = ask(stack, ASKED).text
        exact = [ask(stack, ASKED, reuse="exact") for _ in range(2)]
        assert [answer.served for answer in exact] == [["live", "live"], ["prefix", "prefix"]]
        wait_until(lambda: len(_files(tmp_path)) == 2)
        killed = stack.kill("worker")
        stack.wait_restarted("worker", killed)
        anew = ask(stack, ASKED, reuse="exact")
        assert (anew.served, anew.text) == (["live", "live"], exact[0].text)
        again = ask(stack, ASKED)
        assert (again.text, _tiers(again), stack.captures()) == (composed, {"disk"}, 0)
        first, second = _files(tmp_path)
        blob = bytearray(first.read_bytes())
        blob[-1] ^= 1
        killed = stack.kill("worker")
        first.write_bytes(blob)
        second.unlink()
        stack.wait_restarted("worker", killed)
        damaged = ask(stack, ASKED)
        assert "hit" not in damaged.served
        assert "blob_damaged" in {part["reason"] for part in damaged.segments}
        wait_until(lambda: ask(stack, ASKED).served == ["hit", "hit"])
        assert ask(stack, ASKED).text == composed
        assert stack.gauge("worker", "hypic_worker_corrupt_blobs_total") == 1


def test_a_directory_that_cannot_be_used_stops_the_start(random_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("a file")
    with (
        pytest.raises(AssertionError, match="HYPIC_WORKER_DISK_DIRECTORY"),
        _served(random_checkpoint, tmp_path, **_on_disk(tmp_path)),
    ):
        pass
