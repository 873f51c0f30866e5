"""The worker is killed or stopped under requests. Each answer is one of two that are known: computed whole or composed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx2
import openai
import pytest

from services.cli.ports import free_port
from tests.e2e.stack.asking import CHAT, Answer, ask, body, document, read_stream, stream
from tests.e2e.stack.served import ServedStack, wait_until

LONG_REPLY = 3000


@dataclass(frozen=True, slots=True)
class Known:
    """A document and its answers, one for each way to serve it."""

    document: dict[str, str]
    composed: str
    recomputed: str

    def check(self, answer: Answer) -> None:
        """The answer fits the way in which it says that it was served."""
        expected = self.recomputed if answer.served == ["live"] else self.composed
        assert answer.text == expected


def know(stack: ServedStack, name: str) -> Known:
    asked = document(name)
    known = Known(asked, ask(stack, [asked]).text, ask(stack, [asked], reuse="off").text)
    # Else a wrong state could pass for a right one.
    assert known.composed != known.recomputed
    return known


def test_a_request_waits_for_a_killed_worker(fragile: ServedStack) -> None:
    known = know(fragile, "killed idle")
    killed = fragile.kill("worker")
    # The directory still lists the copy that died with the worker.
    known.check(ask(fragile, [known.document]))
    fragile.wait_restarted("worker", killed)
    wait_until(lambda: ask(fragile, [known.document]).served == ["hit"])
    known.check(ask(fragile, [known.document]))
    fragile.wait_idle()


def test_a_worker_killed_under_a_stream_ends_it_with_an_error(fragile: ServedStack) -> None:
    known = know(fragile, "killed streaming")
    request = body(fragile, [known.document], max_tokens=LONG_REPLY)
    client = openai.OpenAI(base_url=f"{fragile.base_url}/v1", api_key="none", max_retries=0)
    with client, stream(fragile, request) as response:
        chunks = client.chat.completions.create(
            model=fragile.model, messages=request["messages"], max_tokens=LONG_REPLY, temperature=0, stream=True
        )
        next(iter(chunks))
        lines = response.iter_lines()
        begun = read_stream(lines, until_texts=3)
        killed = fragile.kill("worker")
        rest = read_stream(lines)
        with pytest.raises(openai.APIError):
            list(chunks)
    assert rest.is_ended
    assert rest.finish_reason is None
    assert rest.error == "unavailable"
    text = begun.text + rest.text
    assert text.startswith(known.composed) or known.composed.startswith(text)
    known.check(ask(fragile, [known.document]))
    fragile.wait_restarted("worker", killed)
    known.check(ask(fragile, [known.document]))
    fragile.wait_idle()


def test_a_stopped_worker_runs_into_the_deadline(fragile: ServedStack) -> None:
    known = know(fragile, "stopped worker")
    with hasty_router(fragile, seconds=2.0) as url:
        fragile.signal("worker", signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(2) as pool:
                late = [pool.submit(httpx2.post, url + CHAT, json=one, timeout=30) for one in both_kinds(fragile)]
                for reply in late:
                    assert reply.result().status_code == 504
                    assert reply.result().json()["error"]["code"] == "deadline_exceeded"
        finally:
            fragile.signal("worker", signal.SIGCONT)
        assert httpx2.post(url + CHAT, json=body(fragile, [known.document]), timeout=30).status_code == 200
    known.check(ask(fragile, [known.document]))
    fragile.wait_idle()


def both_kinds(stack: ServedStack) -> list[dict[str, object]]:
    """One request that has something to capture, and one that has nothing."""
    return [body(stack, [document("never seen")]), body(stack, [], reuse="off")]


@contextmanager
def hasty_router(stack: ServedStack, seconds: float) -> Iterator[str]:
    """One more router before the same services, with a short deadline."""
    port = free_port()
    variables = {"HYPIC_ROUTER_PORT": str(port), "HYPIC_ROUTER_REQUEST_TIMEOUT_SECONDS": str(seconds)}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "router"],
        env={**stack.environment(), **variables},
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx2.get(f"{url}/health/ready").status_code == 200
        except httpx2.TransportError:
            return False

    try:
        wait_until(is_ready)
        yield url
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
