"""Faults of every service at every moment: no wrong answer, no hang, nothing left behind. docs/operations.md has the table."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.e2e.stack.asking import CHAT, Answer, StreamedReply, body, read_stream, stream
from tests.e2e.stack.cluster import Cluster
from tests.e2e.stack.fault_rig import (
    COMBINE,
    DEADLINE_SECONDS,
    DOCUMENT,
    PREFILL,
    VARIABLES,
    Rig,
    held,
    reached,
    release,
)
from tests.e2e.stack.served import wait_until
from tests.e2e.stack.worker_proxy import Fault

LONG_REPLY = 3000


@pytest.fixture(scope="module")
def shared(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    roles = {**dict.fromkeys(PREFILL, "prefill"), **dict.fromkeys(COMBINE, "combine")}
    with Cluster(random_checkpoint, tmp_path_factory.mktemp("faults"), roles, VARIABLES) as cluster:
        rig = Rig(cluster)
        rig.learn()
        yield rig
        cluster.forget_everything()


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """Everything runs again after a test, and nothing is left of it."""
    yield shared
    shared.cluster.restore()
    shared.cluster.wait_idle()
    shared.check(shared.ask(shared.new_salt()))
    shared.cluster.wait_idle()


END = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
end = pytest.mark.parametrize("number", END.values(), ids=END.keys())


@end
def test_a_prefill_worker_is_lost_before_it_is_asked(number: signal.Signals, rig: Rig) -> None:
    """Whether or not the router knows: another one captures."""
    for name in PREFILL:
        rig.cluster.signal(name, number)
        with rig.asking(rig.new_salt()) as asking:
            assert asking.answer().served == ["cold"]
        rig.cluster.restore()


def test_all_prefill_workers_are_lost(rig: Rig) -> None:
    """Nobody captures: the document is computed in its place."""
    for name in PREFILL:
        rig.cluster.kill(name)
    wait_until(lambda: rig.cluster.ready_roles() == len(COMBINE))
    with rig.asking(rig.new_salt()) as asking:
        answer = asking.answer()
    assert (answer.served, answer.segments[0]["reason"]) == (["live"], "no_prefill_worker")


@end
def test_a_prefill_worker_is_lost_under_a_transfer(number: signal.Signals, rig: Rig) -> None:
    faults = rig.at(held)
    with rig.asking(rig.new_salt()) as asking:
        rig.cluster.signal(reached(faults), number)
        release(faults)
        asking.answer()


@end
def test_a_prefill_worker_is_lost_after_the_transfer(number: signal.Signals, rig: Rig) -> None:
    """The stream goes on; the combining worker has a copy of its own, which serves the next request."""
    salt = rig.new_salt()
    with stream(rig.cluster, body(rig.cluster, [DOCUMENT], cache_salt=salt, max_tokens=200)) as response:
        lines = response.iter_lines()
        begun = read_stream(lines, until_texts=3)
        for name in PREFILL:
            rig.cluster.signal(name, number)
        rest = read_stream(lines)
    assert (rest.error, rest.finish_reason) == (None, "length")
    assert (begun.text + rest.text).startswith(rig.composed)
    rig.check(rig.ask(salt))


def test_a_slow_transfer_is_waited_for(rig: Rig) -> None:
    rig.at(lambda: Fault("Fetch", slow_seconds=0.01))
    with rig.asking(rig.new_salt()) as asking:
        assert asking.answer().served == ["cold"]


def test_a_transfer_that_is_too_slow_is_given_up(rig: Rig) -> None:
    rig.at(lambda: Fault("Fetch", at_message=2, slow_seconds=3.0))
    with rig.asking(rig.new_salt()) as asking:
        assert asking.answer().served == ["live"]


@pytest.mark.parametrize("kind", ["corrupt", "cut"])
def test_a_transfer_that_is_spoilt(kind: str, rig: Rig) -> None:
    """From every holder. What was captured is stored all the same, and serves the next who asks."""
    salt = rig.new_salt()
    rig.at(lambda: Fault("Fetch", at_message=3, flips_byte=kind == "corrupt", cuts=kind == "cut"))
    with rig.asking(salt) as asking:
        assert asking.answer().served == ["live"]
    rig.cluster.restore()
    wait_until(lambda: rig.ask(salt).served != ["live"])


def test_a_slow_capture_is_done_elsewhere_too(rig: Rig) -> None:
    """Its events come late: the other prefill worker does it as well."""
    for name in PREFILL:
        rig.at(lambda: Fault("Capture", hold_seconds=8.0), (name,))
        rig.at(lambda: Fault("Fetch", hold_seconds=8.0), (name,))
        with rig.asking(rig.new_salt()) as asking:
            asking.answer()
        rig.cluster.restore()


@end
def test_the_combining_worker_is_lost_before_the_first_token(number: signal.Signals, rig: Rig) -> None:
    """The prompt is replayed on the other one."""
    faults = rig.at(held)
    with rig.asking(rig.new_salt()) as asking:
        reached(faults)
        lost = rig.running()
        rig.cluster.signal(lost, number)
        release(faults)
        answer = asking.answer()
    (other,) = set(COMBINE) - {lost}
    assert answer.raw["hypic"]["placing"]["worker"] == other


def read_after(rig: Rig, act: Callable[[], object], max_tokens: int = LONG_REPLY) -> tuple[str, StreamedReply]:
    """A stream's text, and its end after something happened under it."""
    began = time.monotonic()
    request = body(rig.cluster, [DOCUMENT], cache_salt=rig.new_salt(), max_tokens=max_tokens)
    with stream(rig.cluster, request) as response:
        lines = response.iter_lines()
        begun = read_stream(lines, until_texts=3)
        act()
        rest = read_stream(lines)
    assert time.monotonic() - began < DEADLINE_SECONDS
    return begun.text + rest.text, rest


@end
def test_the_combining_worker_is_lost_after_the_first_token(number: signal.Signals, rig: Rig) -> None:
    text, rest = read_after(rig, lambda: rig.cluster.signal(rig.running(), number))
    assert rest.is_ended
    assert (rest.error, rest.finish_reason) == ("unavailable", None)
    assert text.startswith(rig.composed) or rig.composed.startswith(text)


def test_a_draining_worker_finishes_its_stream_and_takes_nothing_new(rig: Rig) -> None:
    drained: list[str] = []

    def drain() -> None:
        name = rig.running()
        drained.append(name)
        rig.cluster.signal(name, signal.SIGTERM)
        for _ in range(3):
            answer = rig.ask(rig.new_salt())
            rig.check(answer)
            assert answer.raw["hypic"]["placing"]["worker"] != name

    text, rest = read_after(rig, drain, max_tokens=600)
    assert (rest.error, rest.finish_reason) == (None, "length")
    assert text.startswith(rig.composed)
    assert rig.cluster.wait_ended(drained[0]) == 0


def test_all_combining_workers_are_stopped(rig: Rig) -> None:
    """Only the deadline is left."""
    for name in COMBINE:
        rig.cluster.signal(name, signal.SIGSTOP)
    began = time.monotonic()
    response = rig.cluster.http.post(CHAT, json=body(rig.cluster, [DOCUMENT], cache_salt=rig.new_salt()))
    assert response.status_code in (503, 504)
    assert response.json()["error"]["code"] in ("unavailable", "deadline_exceeded")
    assert time.monotonic() - began < DEADLINE_SECONDS + 5


@pytest.mark.parametrize("service", ["cache", "redis"])
@end
def test_the_directory_is_lost(service: str, number: signal.Signals, rig: Rig) -> None:
    """Before the plan: everything is computed in its place. What was stored is a hit again when it is back."""
    salt = rig.new_salt()
    rig.check(rig.ask(salt))
    rig.cluster.signal(service, number)
    if number is signal.SIGKILL:
        rig.cluster.kill(service)
    with rig.asking(salt) as asking:
        answer = asking.answer()
    assert (answer.served, answer.segments[0]["reason"]) == (["live"], "cache_unavailable")
    rig.cluster.restore()
    wait_until(lambda: rig.ask(salt).served == ["hit"])


@pytest.mark.parametrize("service", ["cache", "redis"])
@end
def test_the_directory_is_lost_under_a_transfer(service: str, number: signal.Signals, rig: Rig) -> None:
    """What has been planned goes on; what could not be published is captured again by the next who asks."""
    faults = rig.at(held)
    salt = rig.new_salt()
    with rig.asking(salt) as asking:
        reached(faults)
        rig.cluster.signal(service, number)
        if number is signal.SIGKILL:
            rig.cluster.kill(service)
        release(faults)
        asking.answer()
    rig.cluster.restore()
    rig.check(rig.ask(salt))


@pytest.mark.parametrize("service", ["cache", "redis"])
def test_the_directory_is_lost_after_the_transfer(service: str, rig: Rig) -> None:
    """The stream does not need it."""
    text, rest = read_after(rig, lambda: rig.cluster.kill(service), max_tokens=200)
    assert (rest.error, rest.finish_reason) == (None, "length")
    assert text.startswith(rig.composed)


def test_the_router_is_killed_under_a_stream(rig: Rig) -> None:
    """The client sees a broken connection; the workers are free at once, and leases lapse."""
    request = body(rig.cluster, [DOCUMENT], cache_salt=rig.new_salt(), max_tokens=LONG_REPLY)
    with stream(rig.cluster, request) as response:
        lines = response.iter_lines()
        read_stream(lines, until_texts=3)
        rig.cluster.kill("router")
        with pytest.raises(httpx2.TransportError):
            read_stream(lines)
    wait_until(lambda: rig.cluster.gauge("workers", "hypic_worker_num_requests_running") == 0, 5)


def test_the_router_is_killed_under_a_transfer(rig: Rig) -> None:
    faults = rig.at(held)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rig.ask, rig.new_salt())
        reached(faults)
        rig.cluster.kill("router")
        with pytest.raises(httpx2.TransportError):
            asked.result(10)
        wait_until(lambda: rig.cluster.gauge("workers", "hypic_worker_num_requests_running") == 0, 5)


def test_a_router_that_is_told_to_end_finishes_its_streams(rig: Rig) -> None:
    request = body(rig.cluster, [DOCUMENT], cache_salt=rig.new_salt(), max_tokens=300)
    with stream(rig.cluster, request) as response:
        lines = response.iter_lines()
        begun = read_stream(lines, until_texts=3)
        rig.cluster.signal("router", signal.SIGTERM)
        rest = read_stream(lines)
    assert (rest.error, rest.finish_reason) == (None, "length")
    assert (begun.text + rest.text).startswith(rig.composed)
    assert rig.cluster.end("router") == 0


def ask_together(rig: Rig, salt: str, act: Callable[[], object], base_url: str, count: int = 12) -> list[Answer]:
    """The answers of many who ask for one new document at once, while something happens."""

    def one(_: int) -> Answer:
        asked = body(rig.cluster, [DOCUMENT], cache_salt=salt)
        response = httpx2.post(base_url + CHAT, json=asked, timeout=60)
        assert response.status_code == 200, response.text
        answer = Answer(response.json())
        rig.check(answer)
        return answer

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(one, index) for index in range(count)]
        act()
        return [answer.result(60) for answer in answers]


def captured(rig: Rig) -> float:
    return sum(rig.cluster.gauge(name, "hypic_worker_captures_total", 'outcome="stored"') for name in PREFILL)


def test_many_who_ask_for_one_new_document_share_its_capture(rig: Rig) -> None:
    before = captured(rig)
    answers = ask_together(rig, rig.new_salt(), lambda: None, rig.cluster.base_url)
    assert captured(rig) == before + 1
    assert "hit" in [answer.served[0] for answer in answers]


@pytest.mark.parametrize("moment", ["captured", "fetched"])
@end
def test_who_captures_for_many_is_lost(moment: str, number: signal.Signals, rig: Rig) -> None:
    faults = rig.at(held if moment == "fetched" else lambda: Fault("Capture", hold_seconds=8.0))

    def lose() -> None:
        rig.cluster.signal(reached(faults), number)
        release(faults)

    answers = ask_together(rig, rig.new_salt(), lose, rig.cluster.base_url)
    assert len(answers) == 12


def test_the_router_of_the_one_whom_many_wait_for_is_killed(rig: Rig) -> None:
    """They ask by another router, and do not wait for its lease for ever."""
    faults = rig.at(held)
    salt = rig.new_salt()
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(rig.ask, salt)
        reached(faults)
        answers = ask_together(rig, salt, lambda: rig.cluster.kill("router"), rig.cluster.second_url)
        with pytest.raises(httpx2.TransportError):
            owner.result(10)
    assert {answer.segments[0]["planned"] for answer in answers} <= {"pending", "cold", "hit"}
