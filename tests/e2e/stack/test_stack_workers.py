"""Several workers: what they answer is what one answers, whoever captures, holds and combines."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.e2e.stack.leaving import leave_anywhere
from tests.e2e.stack.served import ServedStack, wait_until

DOCUMENTS = [document(f"workers {index}", 150 + 60 * index) for index in range(6)]
NUM_LEAVING = int(os.environ.get("HYPIC_LEAVING_CLIENTS", "200"))
# Cold, warm, in another order, with a new one, and computed whole.
REQUESTS: list[dict[str, Any]] = [
    {"documents": DOCUMENTS[:4]},
    {"documents": DOCUMENTS[:4]},
    {"documents": DOCUMENTS[3::-1], "question": "What closes?"},
    {"documents": [DOCUMENTS[4], *DOCUMENTS[1:3], DOCUMENTS[5]]},
    {"documents": DOCUMENTS[:2], "reuse": "off"},
    {"documents": DOCUMENTS[2:4], "reuse": "exact"},
]


# On a busy machine too nothing is late, and computed in place, which is another answer than a composed one.
PATIENCE = {
    "HYPIC_WORKER_FETCH_SECONDS": "30",
    "HYPIC_ROUTER_HEDGE_SLACK_SECONDS": "30",
    "HYPIC_ROUTER_CACHE_TIMEOUT_SECONDS": "20",
    "HYPIC_ROUTER_PENDING_WAIT_SECONDS": "60",
}


@contextmanager
def several(checkpoint: Path, directory: Path, roles: Sequence[str]) -> Iterator[ServedStack]:
    with ServedStack(checkpoint, directory / "log", PATIENCE, roles) as stack:
        wait_until(lambda: num_roles(stack) == sum(2 if role == "both" else 1 for role in roles))
        yield stack
        stack.wait_idle()
        stack.forget_everything()


def num_roles(stack: ServedStack) -> int:
    """Roles of the workers that the router may use; one with both counts twice."""
    lines = stack.http.get("/metrics").text.splitlines()
    ready = [line for line in lines if line.startswith("hypic_workers{") and 'state="ready"' in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in ready))


def all_answers(stack: ServedStack) -> list[Answer]:
    return [ask(stack, **request) for request in REQUESTS]


def capturers(answer: Answer) -> set[str]:
    return {part["capture"]["worker"] for part in answer.segments if part["capture"]}


@pytest.fixture(scope="module")
def slower_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With so many layers that fetching a state is quicker than computing it, whatever else the machine does."""
    directory = tmp_path_factory.mktemp("slower") / "endless"
    write_random_checkpoint(directory, Path(__file__).parents[3] / "models" / "demo", num_layers=16)
    return directory


@pytest.fixture(scope="module")
def alone(slower_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """One worker's answers."""
    with several(slower_checkpoint, tmp_path_factory.mktemp("alone"), ["both"]) as stack:
        answers = all_answers(stack)
    # Else a wrong state could pass for a right one.
    texts = [answer.text for answer in answers]
    assert len({texts[0], texts[2], texts[3], texts[4]}) == 4
    return answers


@pytest.mark.parametrize(
    "roles",
    [["both"] * 2, ["prefill", "prefill", "combine", "both"]],
    ids=["two", "four"],
)
def test_the_answers_are_those_of_one_worker(
    roles: list[str], alone: list[Answer], slower_checkpoint: Path, tmp_path: Path
) -> None:
    with several(slower_checkpoint, tmp_path, roles) as stack:
        answers = all_answers(stack)
        cold, warm, *_ = answers
        # First: what came too late would be computed in place, and the answer another one.
        assert [(part["served"], part["reason"]) for part in cold.segments] == [("cold", "first_use")] * 4
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        capturing = {f"worker-{index}" for index, role in enumerate(roles) if role != "combine"}
        # What the worker that combines captures it captures in the same sweep.
        assert capturers(cold) == capturing - {cold.raw["hypic"]["placing"]["worker"]}
        assert warm.served == ["hit"] * 4
        assert warm.cached_tokens == alone[1].cached_tokens
        assert stack.captures() == len(DOCUMENTS)
        fetched = [part["fetch"] for answer in answers for part in answer.segments if part["fetch"]]
        assert fetched
        assert all(fetch["worker"].startswith("worker-") and fetch["seconds"] > 0 for fetch in fetched)
        moved = stack.gauge("workers", "hypic_worker_fetched_bytes_total", 'tier="same_host"')
        assert moved > 0
        assert stack.gauge("workers", "hypic_worker_failed_fetches_total") == 0


@pytest.fixture(scope="module")
def pair(slower_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    with several(slower_checkpoint, tmp_path_factory.mktemp("pair"), ["both"] * 2) as stack:
        yield stack


def test_a_copy_falls_with_its_document_on_every_worker(pair: ServedStack) -> None:
    asked = [document("copied", 400) | {"id": "copied"}]

    def holders() -> set[str]:
        with ThreadPoolExecutor(4) as pool:
            texts.update(answer.text for answer in pool.map(lambda _: ask(pair, asked, max_tokens=5), range(4)))
        states = pair.http.get("/v1/documents/copied").json()["states"]
        return {holder["worker"] for state in states for holder in state["holders"]}

    texts = {ask(pair, asked, max_tokens=5).text}
    wait_until(lambda: holders() == set(pair.workers))
    assert len(texts) == 1
    assert pair.http.delete("/v1/documents/copied").status_code == 200
    wait_until(lambda: pair.gauge("workers", "hypic_worker_state_bytes") == pair.gauge("cache", "hypic_cache_bytes"))
    assert ask(pair, asked, max_tokens=5).served == ["cold"]


def test_fifty_requests_for_one_new_document_capture_it_once(pair: ServedStack) -> None:
    asked = [document("fifty", 300)]
    before = pair.captures()
    with ThreadPoolExecutor(50) as pool, httpx2.Client(base_url=pair.base_url, timeout=60) as http:
        pair.http, own = http, pair.http
        answers = list(pool.map(lambda _: ask(pair, asked, max_tokens=3), range(50)))
        pair.http = own
    assert len({answer.text for answer in answers}) == 1
    served = [answer.served[0] for answer in answers]
    assert served.count("cold") == 1
    assert served.count("hit") == 49
    assert pair.captures() == before + 1
    assert {answer.raw["hypic"]["placing"]["worker"] for answer in answers} == set(pair.workers)


def test_clients_that_leave_anywhere_free_every_worker(pair: ServedStack) -> None:
    """Slots, pages, leases and streams of both; the fixture looks at what is left in the end."""
    documents = [document(f"leaving {index}", 400) for index in range(40)]
    statuses = leave_anywhere(pair, documents, NUM_LEAVING, longest_seconds=0.6)
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(0) >= NUM_LEAVING / 10
    pair.wait_idle()
    pair.forget_everything()
    for name in range(0, 40, 13):
        assert ask(pair, [documents[name]]).served == ["cold"]
