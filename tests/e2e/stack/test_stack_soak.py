"""Services and Redis are killed at random moments under load: every answer is right, and all recovers by itself.

States lie on disk too, so that workers come back with what they held; nothing that was deleted comes back with it.
A round kills each service once. `HYPIC_SOAK_SECONDS` asks for rounds until this much time has passed (`make soak`), half of
it over each directory.
"""

import asyncio
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from services.cache.adapters.redis_directory import RedisAddress, RedisDirectory
from services.cache.settings import CacheSettings
from tests.e2e.stack.asking import CHAT, Answer, ask, body, document
from tests.e2e.stack.served import ServedStack, wait_until
from tests.redis_server import RedisServer

SECONDS = float(os.environ.get("HYPIC_SOAK_SECONDS", "0")) / 2
NUM_DOCUMENTS = 6
NUM_CLIENTS = 2
# Documents that one client alone asks about, so that it knows what it has deleted.
NUM_OWN = 2
BUDGET_BYTES = 400_000


@dataclass(slots=True)
class Killed:
    """A stack, over a Redis that is killed too where one is the directory, and when the worker was last seen away."""

    stack: ServedStack
    redis: RedisServer | None
    worker_away: threading.Event = field(default_factory=threading.Event)
    num_worker_kills: int = 0
    num_kills: Counter[str] = field(default_factory=Counter)

    @property
    def targets(self) -> list[str]:
        """Whom a round kills."""
        return ["cache", "worker", "redis"] if self.redis else ["cache", "worker"]

    async def check_directory(self) -> None:
        """Every index in Redis agrees with the others."""
        if self.redis is None:
            return
        limits = CacheSettings.from_environment(budget_bytes=BUDGET_BYTES).limits()
        directory = RedisDirectory(RedisAddress(self.redis.url, "hypic"), limits)
        await directory.check_integrity()
        await directory.close()

    def kill(self, target: str) -> None:
        """SIGKILL; returns once it is back."""
        self.num_kills[target] += 1
        if target == "redis" and self.redis:
            self.redis.kill()
            time.sleep(0.5)
            self.redis.start()
            return
        if target == "worker":
            self.num_worker_kills += 1
            self.worker_away.set()
        self.stack.wait_restarted(target, self.stack.kill(target))
        if target == "worker":
            self.worker_away.clear()


@pytest.fixture(params=["redis", "memory"])
def killed(request: pytest.FixtureRequest, random_checkpoint: Path, tmp_path: Path) -> Iterator[Killed]:
    """The Redis keeps nothing, the directory in memory its journal."""
    variables = {
        "HYPIC_ROUTER_WORKER_WAIT_SECONDS": "40",
        "HYPIC_ROUTER_LEASE_SECONDS": "4",
        "HYPIC_CACHE_TICKET_SECONDS": "4",
        # Room for some of the documents: they evict each other all the time.
        "HYPIC_CACHE_BUDGET_BYTES": str(BUDGET_BYTES),
        "HYPIC_WORKER_DISK_DIRECTORY": str(tmp_path / "states"),
    }
    if request.param == "memory":
        with ServedStack(random_checkpoint, tmp_path / "log", variables) as stack:
            yield Killed(stack, None)
        return
    with tempfile.TemporaryDirectory(prefix="hypic-redis-") as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        variables |= {"HYPIC_CACHE_DIRECTORY": "redis", "HYPIC_CACHE_REDIS_URL": redis.url}
        try:
            with ServedStack(random_checkpoint, tmp_path / "log", variables) as stack:
                yield Killed(stack, redis)
        finally:
            redis.stop()


class Load:
    """Clients that ask about one document each time, and now and then delete it first.

    Of documents that nobody else asks about, a client knows that nothing is stored once they are deleted.
    """

    def __init__(self, killed: Killed, documents: list[dict[str, str]]) -> None:
        self._killed = killed
        self._documents = documents
        # One document: its text is either composed or recomputed, and each way has one right answer.
        self._composed = [self._stored(each) for each in documents]
        self._recomputed = [ask(killed.stack, [each], reuse="off").text for each in documents]
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(NUM_CLIENTS)]
        self.num_deletions = 0
        self.served: Counter[str] = Counter()
        self.faults: list[str] = []

    def _stored(self, asked: dict[str, str]) -> str:
        ask(self._killed.stack, [asked])
        return ask(self._killed.stack, [asked]).text

    @property
    def num_answers(self) -> int:
        """Answers that were checked."""
        return self.served.total()

    def __enter__(self) -> "Load":
        assert self._composed != self._recomputed
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a request hangs"

    def check(self, index: int, answer: Answer) -> None:
        """Note an answer that is not what this way of serving gives."""
        right = self._recomputed if answer.served == ["live"] else self._composed
        if answer.text != right[index]:
            self.faults.append(f"document {index} served {answer.served}: {answer.text!r}")
        self.served.update(answer.served)

    def _run(self, seed: int) -> None:
        source = random.Random(seed)
        with httpx2.Client(base_url=self._killed.stack.base_url, timeout=100) as http:
            while not self._stopping.is_set():
                try:
                    self._ask_one(http, seed, source)
                except Exception as error:  # a fault of this thread must fail the test, not the thread
                    self.faults.append(repr(error))
                    return

    def _ask_one(self, http: httpx2.Client, seed: int, source: random.Random) -> None:
        shared = len(self._documents) - NUM_CLIENTS * NUM_OWN
        own = range(shared + seed * NUM_OWN, shared + (seed + 1) * NUM_OWN)
        index = source.choice([*range(shared), *own])
        is_deleted = source.random() < (0.3 if index in own else 0.1) and self._delete(http, index)
        kills, was_away = self._killed.num_worker_kills, self._killed.worker_away.is_set()
        response = http.post(CHAT, json=body(self._killed.stack, [self._documents[index]]))
        if response.status_code == 200:
            answer = Answer(response.json())
            self.check(index, answer)
            if is_deleted and index in own and answer.served == ["hit"]:
                self.faults.append(f"document {index} was deleted, and came back")
        elif not was_away and kills == self._killed.num_worker_kills:
            self.faults.append(f"{response.status_code} while the worker lived: {response.text}")

    def _delete(self, http: httpx2.Client, index: int) -> bool:
        """Whether the document is gone for certain: of a call that was not answered nobody knows."""
        status = http.delete(f"/v1/documents/{self._documents[index]['id']}").status_code
        if status not in (200, 404, 503):
            self.faults.append(f"a deletion ended with {status}")
        self.num_deletions += status == 200
        return status in (200, 404)


def test_kills_under_load_cost_no_answer(killed: Killed) -> None:
    num_documents = NUM_DOCUMENTS + NUM_CLIENTS * NUM_OWN
    documents = [document(f"soak {index}") | {"id": f"soak {index}"} for index in range(num_documents)]
    source = random.Random(7)
    ends_at = time.monotonic() + SECONDS
    with Load(killed, documents) as load:
        while True:
            for target in source.sample(killed.targets, len(killed.targets)):
                time.sleep(source.random())
                killed.kill(target)
                _await_reuse(load)
            if time.monotonic() >= ends_at or load.faults:
                break
    assert load.faults == []
    for index, each in enumerate(documents):
        wait_until(lambda asked=each: ask(killed.stack, [asked]).served == ["hit"])  # type: ignore[misc] # bound now
        load.check(index, ask(killed.stack, [each]))
    assert load.faults == []
    killed.stack.wait_idle()
    asyncio.run(killed.check_directory())
    killed.stack.forget_everything()
    told = f"answers: {dict(load.served)}, {load.num_deletions} deletions, kills: {dict(killed.num_kills)}"
    print(told)  # noqa: T201 # make soak


def _await_reuse(load: Load) -> None:
    """Until stored states have served since."""
    before = load.served["hit"]
    wait_until(lambda: load.served["hit"] >= before + 3 or bool(load.faults), 100)
