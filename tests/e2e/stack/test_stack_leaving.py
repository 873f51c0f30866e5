"""Clients that go away, and more clients than fit: nothing stays behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import pytest

from tests.e2e.stack.asking import CHAT, ask, body, document, read_stream, stream
from tests.e2e.stack.leaving import leave_anywhere
from tests.e2e.stack.served import ServedStack, wait_until

LONG_REPLY = 3000


@pytest.fixture
def empty(fragile: ServedStack) -> Iterator[ServedStack]:
    """A stack whose memory, after the test, is to be as free as at its start."""
    yield fragile
    fragile.wait_idle()
    ask(fragile, [document("leaving last")])
    fragile.forget_everything()


def running(stack: ServedStack) -> float:
    return stack.gauge("worker", "hypic_worker_num_requests_running")


def waiting(stack: ServedStack) -> float:
    return stack.gauge("worker", "hypic_worker_num_requests_waiting")


def test_leaving_a_stream_frees_the_worker(empty: ServedStack) -> None:
    request = body(empty, [document("leaving")], max_tokens=LONG_REPLY)
    with stream(empty, request) as response:
        # Kept: an iterator that is forgotten closes its response.
        lines = response.iter_lines()
        read_stream(lines, until_texts=2)
        wait_until(lambda: running(empty) == 1)
    wait_until(lambda: running(empty) == 0)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(empty.base_url + CHAT, json=request, timeout=0.3)


def test_two_hundred_clients_that_leave_anywhere(empty: ServedStack) -> None:
    documents = [document(f"leaving {index}", 400) for index in range(40)]
    statuses = leave_anywhere(empty, documents, 200)
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(0) >= 20
    # A document that somebody gave up capturing is captured by the next one who asks.
    empty.wait_idle()
    for name in range(0, 40, 13):
        assert "live" not in ask(empty, [documents[name]]).served


def test_more_requests_than_fit_are_told_to_come_again(empty: ServedStack) -> None:
    """Four run, four wait: what comes then is refused at once, and the others are answered."""
    request = body(empty, [], max_tokens=1500, reuse="off")
    with ExitStack() as streams, ThreadPoolExecutor(4) as pool:
        held = [streams.enter_context(stream(empty, request | {"max_tokens": LONG_REPLY})) for _ in range(4)]
        lines = [response.iter_lines() for response in held]
        for each in lines:
            read_stream(each, until_texts=1)
        patient = [pool.submit(ask, empty, [], max_tokens=5, reuse="off") for _ in range(4)]
        wait_until(lambda: waiting(empty) == 4)
        for is_stream in (False, True):
            refused = empty.http.post(CHAT, json=request | {"stream": is_stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "overloaded"
        streams.close()
        assert len({reply.result().text for reply in patient}) == 1
