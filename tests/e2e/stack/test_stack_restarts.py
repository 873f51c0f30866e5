"""Everything restarts or is killed, over either directory: what may be used comes back, and nothing else does."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.blob.reader import BytesSource, StateReader
from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.served import ServedStack, wait_until
from tests.redis_server import WHEEL_REDIS, RedisServer

DOCUMENTS = "/v1/documents"


@dataclass(slots=True)
class Lasting:
    """What outlives a stack: its folder, and a Redis that keeps all that it has answered, where one is the directory."""

    checkpoint: Path
    folder: Path
    redis: RedisServer | None

    @contextmanager
    def served(self) -> Iterator[ServedStack]:
        variables = {"HYPIC_WORKER_DISK_DIRECTORY": str(self.folder / "states")}
        if self.redis:
            variables |= {"HYPIC_CACHE_DIRECTORY": "redis", "HYPIC_CACHE_REDIS_URL": self.redis.url}
        with ServedStack(self.checkpoint, self.folder / "log", variables, state=self.folder / "state") as stack:
            yield stack

    def files(self, ending: str = "safetensors") -> set[Path]:
        return set((self.folder / "states").rglob(f"*.{ending}"))

    def forget(self) -> None:
        """Lose what the directory remembers."""
        if self.redis:
            self.redis.run("FLUSHALL")
        else:
            os.unlink(self.folder / "state" / "directory.journal")

    def restart_redis(self) -> None:
        if self.redis:
            self.redis.kill()
            self.redis.start()

    def kill(self, stack: ServedStack, *names: str) -> None:
        """SIGKILL to services, and to Redis with the cache service; returns once all are ready again."""
        killed = {name: stack.kill(name) for name in names}
        if "cache" in names:
            self.restart_redis()
        for name, pid in killed.items():
            stack.wait_restarted(name, pid)


@pytest.fixture(params=["memory", "redis"])
def lasting(request: pytest.FixtureRequest, random_checkpoint: Path, tmp_path: Path) -> Iterator[Lasting]:
    if request.param == "memory":
        yield Lasting(random_checkpoint, tmp_path, None)
        return
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        redis = RedisServer(Path(folder), WHEEL_REDIS, "--appendonly", "yes", "--appendfsync", "always")
        redis.start()
        yield Lasting(random_checkpoint, tmp_path, redis)
        redis.stop()


def named(name: str) -> dict[str, str]:
    return document(name) | {"id": name}


def register(stack: ServedStack, asked: dict[str, str], *tags: str) -> None:
    response = stack.http.post(DOCUMENTS, json=asked | {"tags": tags})
    assert response.json()["status"] == "stored", response.text


def tiers(answer: Answer) -> set[str]:
    return {part["tier"] for part in answer.segments}


def await_restored(stack: ServedStack, count: int) -> None:
    """Heartbeats tell the directory what lies on disk."""
    wait_until(lambda: stack.gauge("cache", "hypic_cache_entries") >= count)


def test_a_restart_of_everything(lasting: Lasting) -> None:
    """Hits resume without a capture, documents are known; a directory without its memory takes nothing back."""
    asked = [named("first"), named("second")]
    with lasting.served() as stack:
        for each in asked:
            register(stack, each, "hr")
        composed = ask(stack, asked).text
        assert composed != ask(stack, asked, reuse="off").text
        described = stack.http.get(f"{DOCUMENTS}/first").json()
    # The end of the worker waits for what it has published.
    assert len(lasting.files()) == 2
    lasting.restart_redis()
    with lasting.served() as stack:
        await_restored(stack, 2)
        again = ask(stack, asked)
        assert (again.served, again.text, tiers(again)) == (["hit", "hit"], composed, {"disk"})
        assert again.raw["hypic"]["seconds"]["fetch"] > 0
        assert stack.captures() == 0
        warm = ask(stack, asked)
        assert (warm.text, tiers(warm)) == (composed, {"worker"})
        known = stack.http.get(f"{DOCUMENTS}/first").json()
        assert [known[field] for field in ("registered", "tags", "version", "digest")] == [
            described[field] for field in ("registered", "tags", "version", "digest")
        ]
        older = ask(stack, [asked[0] | {"text": "Another text. " * 20}])
        assert (older.served, older.segments[0]["reason"]) == (["live"], "superseded")
        assert ask(stack, asked, cache_salt="other").served == ["cold", "cold"]
        wait_until(lambda: len(lasting.files()) == 4)
    # What was revoked before is not known any more: everything is computed anew, and the disk is emptied.
    lasting.forget()
    with lasting.served() as stack:
        wait_until(lambda: not lasting.files())
        assert ask(stack, asked).served == ["cold", "cold"]
        assert not stack.http.get(f"{DOCUMENTS}/first").json()["registered"]


def test_a_crash_during_a_write_leaves_no_half_entry(lasting: Lasting) -> None:
    """All is killed while a blob is being written; what was whole before serves, the half is gone."""
    asked = [named("whole")]
    with lasting.served() as stack:
        register(stack, asked[0])
        composed = ask(stack, asked).text
        wait_until(lambda: len(lasting.files()) == 1)
        with ThreadPoolExecutor(1) as pool:
            written = _stop_while_writing(lasting, stack, pool)
            assert lasting.files("unfinished")
            lasting.kill(stack, "cache", *stack.workers, "router")
        assert not lasting.files("unfinished")
        for path in lasting.files():
            list(StateReader(BytesSource(path.read_bytes())).layers())
        await_restored(stack, 1)
        again = ask(stack, asked)
        assert (again.served, again.text, tiers(again)) == (["hit"], composed, {"disk"})
        assert stack.http.get(f"{DOCUMENTS}/whole").json()["registered"]
        # Its state went with the worker: nobody was told of a half. The ticket of those who were killed may hold a while.
        anew = ask(stack, [written])
        give_up = time.monotonic() + 90
        while anew.served == ["live"]:
            assert anew.segments[0]["reason"] == "computed_elsewhere"
            assert time.monotonic() < give_up, "the ticket of the killed holds for ever"
            anew = ask(stack, [written])
        assert anew.served == ["cold"]
        assert ask(stack, [written]).text == anew.text


def _stop_while_writing(lasting: Lasting, stack: ServedStack, pool: ThreadPoolExecutor) -> dict[str, str]:
    """The document whose blob was being written when the worker was stopped."""
    for number in range(50):
        asked = document(f"half {number}", 400) | {"id": f"half {number}"}
        before = lasting.files()
        asking = pool.submit(_ask_in_vain, stack, asked)
        give_up = time.monotonic() + 30
        while not lasting.files("unfinished") and lasting.files() == before:
            assert time.monotonic() < give_up, "nothing is written"
        stack.signal("worker", signal.SIGSTOP)
        if lasting.files("unfinished"):
            return asked
        stack.signal("worker", signal.SIGCONT)
        asking.result()
    raise AssertionError("no write was met half way")


def _ask_in_vain(stack: ServedStack, asked: dict[str, str]) -> None:
    with suppress(AssertionError):
        ask(stack, [asked])


def test_what_was_revoked_does_not_come_back(lasting: Lasting) -> None:
    """The worker hears of nothing, and the directory is killed before it could tell: receipts of old copies are refused."""
    revoked, replaced, tagged, kept = (named(name) for name in ("revoked", "replaced", "tagged", "kept"))
    with lasting.served() as stack:
        for each in (revoked, replaced, tagged, kept):
            register(stack, each, *(["t"] if each is tagged else []))
        wait_until(lambda: len(lasting.files()) == 4)
        stack.signal("worker", signal.SIGSTOP)
        receipt = stack.http.delete(f"{DOCUMENTS}/revoked").json()
        assert receipt["documents"] == 1
        assert not any(copy["dropped"] for copy in receipt["copies"])
        assert stack.http.post("/v1/invalidate", json={"tag": "t"}).json()["documents"] == 1
        _replace(stack, "replaced")
        lasting.kill(stack, "cache")
        stack.signal("worker", signal.SIGCONT)
        wait_until(lambda: len(lasting.files()) == 1)
        assert ask(stack, [kept]).served == ["hit"]
        assert ask(stack, [replaced]).segments[0]["reason"] == "superseded"
        assert ask(stack, [revoked, tagged]).served == ["cold", "cold"]
        wait_until(lambda: len(lasting.files()) == 3)
        # The same when the worker is killed too, and comes back with what lies on its disk.
        register(stack, revoked)
        stack.signal("worker", signal.SIGSTOP)
        assert stack.http.delete(f"{DOCUMENTS}/revoked").json()["documents"] == 1
        lasting.kill(stack, "cache", "worker")
        wait_until(lambda: len(lasting.files()) == 2)
        await_restored(stack, 2)
        assert ask(stack, [kept, revoked]).served == ["hit", "cold"]
        stack.signal("worker", signal.SIGSTOP)
        stack.invalidate_tenant()
        lasting.kill(stack, "cache", "worker")
        wait_until(lambda: not lasting.files())
        assert ask(stack, [kept]).served == ["cold"]


def _replace(stack: ServedStack, document_id: str) -> None:
    """Register another text under an id, which no worker captures."""
    request = cache_pb2.RegisterDocumentRequest(
        namespace=cache_pb2.Namespace(tenant="default"),
        document=cache_pb2.DocumentRef(id=document_id, digest=b"n" * 32),
        num_tokens=100,
    )
    with grpc.insecure_channel(stack.address("cache")) as channel:
        answer = cache_pb2_grpc.CacheServiceStub(channel).RegisterDocument(request, timeout=10)
    assert answer.removed.num_documents == 1
