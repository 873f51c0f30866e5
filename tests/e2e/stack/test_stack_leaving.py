"""Clients that go away, and more clients than fit: nothing stays behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager

import httpx2
import pytest

from tests.e2e.stack.asking import CHAT, ask, body, document, read_stream, stream
from tests.e2e.stack.served import ServedStack, wait_until

LONG_REPLY = 3000
NUM_CANCELLED = 200


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
    source = random.Random(3)
    documents = [document(f"leaving {index}", 400) for index in range(40)]

    def draw_request() -> dict[str, object]:
        asked = source.sample(documents, source.randint(0, 3))
        modes = {
            "reuse": source.choice(["compose", "compose", "exact", "off"]),
            "cold": source.choice(["parallel", "live"]),
        }
        return body(empty, asked, max_tokens=source.choice([2, 300]), stream=source.random() < 0.5, **modes)

    async def leave_somewhere(client: httpx2.AsyncClient, request: dict[str, object], seconds: float) -> int:
        try:
            async with asyncio.timeout(seconds):
                return (await client.post(CHAT, json=request)).status_code
        except TimeoutError:
            return 0

    async def run() -> list[int]:
        async with crowd(empty) as client:
            draws = [(draw_request(), source.uniform(0.0, 0.25)) for _ in range(NUM_CANCELLED)]
            return await asyncio.gather(*(leave_somewhere(client, *draw) for draw in draws))

    statuses = asyncio.run(run())
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(0) >= NUM_CANCELLED / 10
    # A document that somebody gave up capturing is captured by the next one who asks.
    empty.wait_idle()
    for name in range(0, 40, 13):
        assert "live" not in ask(empty, [documents[name]]).served


@asynccontextmanager
async def crowd(stack: ServedStack) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of eight connections, so that a request's wait for one counts as well."""
    limits = httpx2.Limits(max_connections=8)
    async with httpx2.AsyncClient(base_url=stack.base_url, limits=limits, timeout=60) as client:
        yield client


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
