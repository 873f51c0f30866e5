import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, StubServices, free_port, wait_until
from tests.stub_worker import MODEL_NAME

CHAT = "/v1/chat/completions"
DOCUMENT = "The river city has a long history of trade, bridges and floods. " * 4
BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "documents": [DOCUMENT]}
LONG = BODY | {"max_tokens": 500}


@pytest.fixture
def stack() -> Iterator[RouterStack]:
    with RouterStack(RouterSettings(worker_wait_seconds=3, request_timeout_seconds=20)) as stack:
        stack.worker.num_repeats = 20
        yield stack
        wait_until(lambda: not stack.cache.leases)
        assert stack.worker.num_running == 0


def check_answers(stack: RouterStack) -> None:
    response = stack.http.post(CHAT, json=BODY | {"max_tokens": 5})
    assert response.status_code == 200, response.text


def test_leaving_a_stream_frees_everything(stack: RouterStack) -> None:
    stack.worker.token_delay_seconds = 0.02
    with stack.http.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        # Letting go of the iterator closes the connection.
        assert stack.worker.num_running == 1
    wait_until(lambda: stack.worker.num_cancelled == 1)


def test_leaving_before_the_reply_frees_everything(stack: RouterStack) -> None:
    stack.worker.token_delay_seconds = 0.05
    with pytest.raises(httpx2.TimeoutException):
        stack.http.post(CHAT, json=LONG, timeout=0.5)
    wait_until(lambda: stack.worker.num_cancelled == 1)


@pytest.mark.parametrize("is_stream", [True, False])
def test_leaving_while_segments_are_captured_frees_the_lease(stack: RouterStack, is_stream: bool) -> None:
    stack.worker.capture_delay_seconds = 30
    with pytest.raises(httpx2.TimeoutException):
        stack.http.post(CHAT, json=LONG | {"stream": is_stream}, timeout=0.5)
    wait_until(lambda: not stack.cache.leases)


def test_leaving_while_the_plan_is_made_frees_the_lease(stack: RouterStack) -> None:
    stack.cache.plan_delay_seconds = 0.6
    with pytest.raises(httpx2.TimeoutException):
        stack.http.post(CHAT, json=LONG, timeout=0.3)
    wait_until(lambda: bool(stack.cache.plans))
    wait_until(lambda: not stack.cache.leases)
    assert not stack.worker.captures


def test_a_worker_that_dies_before_the_first_token_is_tried_again(stack: RouterStack) -> None:
    stack.worker.deaths_before_first_token = 1
    check_answers(stack)
    assert len(stack.worker.requests) == 2
    stack.worker.deaths_before_first_token = 2
    response = stack.http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "unavailable"


def test_a_worker_that_dies_mid_stream_ends_it_with_an_error(stack: RouterStack) -> None:
    stack.worker.dies_after_tokens = 3
    response = stack.http.post(CHAT, json=BODY | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "unavailable"
    assert stack.http.post(CHAT, json=BODY).status_code == 503
    stack.worker.dies_after_tokens = -1
    check_answers(stack)


def test_a_worker_that_is_restarted_is_found_again(stack: RouterStack) -> None:
    stack.stop(stack.worker_server)
    wait_until(lambda: not stack.is_ready())
    response = stack.http.post(CHAT, json=BODY)
    assert response.status_code == 503
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stack.http.post, CHAT, json=BODY | {"max_tokens": 5})
        time.sleep(0.3)
        stack.start_worker()
        assert waiting.result(20).status_code == 200
    wait_until(stack.is_ready)


def test_another_template_is_taken_with_a_restart_and_a_bad_one_refused(stack: RouterStack) -> None:
    good = stack.worker.chat_template
    stack.stop(stack.worker_server)
    wait_until(lambda: not stack.is_ready())
    stack.worker.chat_template = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    server = stack.start_worker()
    wait_until(lambda: "chat template" in stack.http.get("/health/ready").json().get("reason", ""))
    assert stack.http.post(CHAT, json=BODY).status_code == 503
    stack.stop(server)
    stack.worker.chat_template = good
    stack.start_worker()
    wait_until(stack.is_ready, 15)
    check_answers(stack)


def test_a_cache_service_that_is_killed_and_restarted(stack: RouterStack) -> None:
    stack.stop(stack.cache_server)
    check_answers(stack)
    stack.start_cache()

    def is_asked_again() -> bool:
        check_answers(stack)
        return bool(stack.cache.plans)

    assert not stack.cache.plans
    wait_until(is_asked_again)


def test_the_deadline_holds() -> None:
    """Also while the worker captures as it combines."""
    with RouterStack(RouterSettings(request_timeout_seconds=0.6)) as stack:
        stack.worker.token_delay_seconds, stack.worker.num_repeats = 0.05, 50
        for capture_delay in (0, 5):
            stack.worker.capture_delay_seconds = capture_delay
            response = stack.http.post(CHAT, json=LONG)
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
        wait_until(lambda: not stack.cache.leases)


def test_captures_beside_a_reply_leave_it_half_the_time() -> None:
    with RouterStack(RouterSettings(request_timeout_seconds=6), can_capture=False) as stack:
        stack.worker.capture_delay_seconds = 30
        answered = stack.http.post(CHAT, json=BODY | {"documents": [DOCUMENT + "x"], "max_tokens": 3})
        assert answered.status_code == 200
        wait_until(lambda: not stack.cache.leases)


def test_leases_are_renewed_until_the_first_token() -> None:
    with RouterStack(RouterSettings(lease_seconds=0.3)) as stack:
        stack.worker.capture_delay_seconds = 0.8
        check_answers(stack)
        assert stack.cache.num_renewals >= 3
        wait_until(lambda: not stack.cache.leases)


def test_sigterm_finishes_the_stream_and_exits_with_0() -> None:
    with StubServices() as services:
        services.worker.token_delay_seconds, services.worker.num_repeats = 0.02, 3
        url = f"http://127.0.0.1:{(port := free_port())}"
        environment = {
            "HYPIC_ROUTER_PORT": str(port),
            "HYPIC_ROUTER_WORKERS": f"127.0.0.1:{services.worker_port}",
            "HYPIC_ROUTER_CACHE_ADDRESS": f"127.0.0.1:{services.cache_port}",
        }
        code = "from services.router.bootstrap import main; main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=subprocess.PIPE,
        )
        try:
            wait_until(lambda: _is_ready(url), 20)
            text, ended = _stream_while_terminating(url, process)
            assert text == services.worker.reply * 3
            assert ended
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.communicate()
        wait_until(lambda: not services.cache.leases)


def test_sigterm_during_the_start_ends_it_with_0() -> None:
    code = """
import os, signal
from services.router import bootstrap
create_app = bootstrap.create_app
def create_app_and_be_told_to_end(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return create_app(*arguments)
bootstrap.create_app = create_app_and_be_told_to_end
bootstrap.main()
"""
    environment = os.environ | {"HYPIC_ROUTER_PORT": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health/ready").status_code == 200
    except httpx2.TransportError:
        return False


def _stream_while_terminating(url: str, process: "subprocess.Popen[bytes]") -> tuple[str, bool]:
    texts: list[str] = []
    with httpx2.stream("POST", url + CHAT, json=BODY | {"stream": True}, timeout=20) as response:
        for index, line in enumerate(filter(None, response.iter_lines())):
            if index == 3:
                threading.Timer(0, process.send_signal, [signal.SIGTERM]).start()
            if line == "data: [DONE]":
                return "".join(texts), True
            choices = json.loads(line.removeprefix("data: "))["choices"]
            texts.append(choices[0]["delta"].get("content") or "")
    return "".join(texts), False
