"""Whatever a client sends, the stack refuses it in words or answers it, and loses nothing."""

import json
from collections.abc import Iterator

import httpx2
import pytest

from bench.fuzz.senders import send_generated, send_mutated
from bench.fuzz.tally import Tally, check_envelope
from tests.bad_requests import BadRequest, bad_requests
from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.served import ServedStack

NUM_MUTATED = 300
NUM_GENERATED = 60


@pytest.fixture(scope="module")
def context_length(stack: ServedStack) -> int:
    return int(stack.http.get("/v1/models").json()["data"][0]["max_model_len"])


@pytest.fixture(autouse=True, scope="module")
def unharmed(stack: ServedStack) -> Iterator[None]:
    """After all tests of this module the stack answers as before and holds nothing more."""
    asked = [document("unharmed")]
    expected = ask(stack, asked).text
    stack.wait_idle()
    pids = stack.pids()
    yield
    assert ask(stack, asked).text == expected
    stack.wait_idle()
    assert stack.pids() == pids


def test_bad_input_is_refused_with_the_field_named(stack: ServedStack, context_length: int) -> None:
    for bad in bad_requests(stack.model, context_length):
        response = _send(stack, bad)
        assert response.status_code == bad.status, (bad.name, response.text)
        assert check_envelope(response.json()), bad.name
        error = response.json()["error"]
        assert bad.field in (error["param"] or "") or bad.field in error["message"], bad.name
    assert ask(stack, [document("after bad input")]).served == ["cold"]


def _send(stack: ServedStack, bad: BadRequest) -> httpx2.Response:
    content = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
    return stack.http.request(bad.method, bad.path, content=content)


def test_generated_requests_never_fail_inside(stack: ServedStack) -> None:
    tally = Tally()
    send_mutated(stack.base_url, stack.model, NUM_MUTATED, 11, tally)
    # The pass means something only when both kinds were among them.
    assert tally.statuses[200] > NUM_MUTATED / 20
    assert tally.statuses[400] > NUM_MUTATED / 4
    send_generated(stack.base_url, stack.model, NUM_GENERATED, 11, tally)
    assert tally.statuses.total() > NUM_MUTATED + NUM_GENERATED / 2
    assert not tally.faults, json.dumps(tally.examples, indent=1)
