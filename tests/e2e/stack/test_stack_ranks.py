"""A worker of two ranks answers like a worker of one, and no rank outlives another."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.cli.ports import free_port, grpc_ready
from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.served import ServedStack, child_pids, is_running, wait_until


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks") / "log"


@pytest.fixture(scope="module")
def split(random_checkpoint: Path, log: Path) -> Iterator[ServedStack]:
    with ServedStack(random_checkpoint, log, {"HYPIC_WORKER_TENSOR_PARALLEL": "2"}) as served:
        yield served


def follower(stack: ServedStack) -> int:
    """The process of the second rank."""
    (pid,) = child_pids(stack.pid("worker"))
    return pid


@pytest.mark.parametrize(
    "more",
    [{}, {"reuse": "off"}, {"reuse": "exact"}, {"temperature": 1.0, "seed": 5}],
    ids=["composed", "off", "exact", "sampled"],
)
def test_two_ranks_answer_like_one(split: ServedStack, fragile: ServedStack, more: dict[str, Any]) -> None:
    documents = [document("first ranked"), document("second ranked")]
    for order in (documents, documents[::-1]):
        # The second time every part that may be reused is.
        answers = [[ask(stack, order, **more) for _ in range(2)] for stack in (split, fragile)]
        assert [answer.text for answer in answers[0]] == [answer.text for answer in answers[1]]
        assert [answer.served for answer in answers[0]] == [answer.served for answer in answers[1]]
    for stack in (split, fragile):
        stack.wait_idle()


def test_what_is_forgotten_is_forgotten_by_all_ranks(split: ServedStack) -> None:
    """Ranks compare their free pages at every step: one that kept what the leader dropped would end both."""
    worker = split.pid("worker")
    ask(split, [document("to be forgotten")])
    split.forget_everything()
    ask(split, [document("behind the forgotten")])
    assert split.pid("worker") == worker


def test_a_share_of_a_state_is_handed_to_nobody(split: ServedStack) -> None:
    with grpc.insecure_channel(split.address("worker")) as channel:
        chunks = worker_pb2_grpc.WorkerServiceStub(channel).Fetch(worker_pb2.FetchRequest(key=bytes(32)), timeout=10)
        with pytest.raises(grpc.RpcError, match="ranks hold shares of its states") as failed:
            next(chunks)
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_killed_rank_ends_the_worker_and_both_come_back(split: ServedStack, log: Path) -> None:
    asked = [document("killed rank")]
    before = ask(split, asked).text
    worker, other = split.pid("worker"), follower(split)
    os.kill(other, signal.SIGKILL)
    split.wait_restarted("worker", worker)
    assert not is_running(other)
    assert ask(split, asked).text == before
    said = log.read_text()
    assert "rank_lost" in said
    assert "child_died" in said


def test_a_killed_leader_ends_its_followers(split: ServedStack) -> None:
    other = follower(split)
    killed = split.kill("worker")
    wait_until(lambda: not is_running(other))
    split.wait_restarted("worker", killed)
    assert ask(split, [document("killed leader")]).text


@contextmanager
def worker_alone(checkpoint: Path, log: Path, ranks: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`hypic worker` without the other services, and its address."""
    address = f"127.0.0.1:{free_port()}"
    variables = {
        "HYPIC_WORKER_CHECKPOINT": str(checkpoint),
        "HYPIC_WORKER_LISTEN_ADDRESS": address,
        "HYPIC_WORKER_MEMORY_BYTES": str(1 << 30),
        "HYPIC_WORKER_TENSOR_PARALLEL": str(ranks),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "services.cli.main", "worker"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=out, stderr=out)
    try:
        yield process, address
    finally:
        process.kill()
        process.wait()


def test_a_worker_told_to_end_takes_its_ranks_along(random_checkpoint: Path, tmp_path: Path) -> None:
    with worker_alone(random_checkpoint, tmp_path / "log", ranks=2) as (process, address):
        wait_until(lambda: asyncio.run(grpc_ready(address)), seconds=90)
        (other,) = child_pids(process.pid)
        process.terminate()
        assert process.wait(60) == 0
        assert not is_running(other)
    assert "rank_lost" not in (tmp_path / "log").read_text()


def test_a_model_that_ranks_cannot_hold_is_refused(random_checkpoint: Path, tmp_path: Path) -> None:
    with worker_alone(random_checkpoint, tmp_path / "log", ranks=3) as (process, _):
        assert process.wait(60) == 2
    assert "config.json: 2 linear key heads cannot be split over 3 ranks" in (tmp_path / "log").read_text()
