from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from tests.e2e.stack.asking import Answer, ask, document
from tests.e2e.stack.served import ServedStack

KINDS: list[dict[str, Any]] = [
    {"reuse": "compose"},
    {"reuse": "compose", "cache_salt": "concurrent"},
    {"reuse": "exact"},
    {"reuse": "off"},
]


def all_at_once(stack: ServedStack, requests: list[dict[str, Any]]) -> list[Answer]:
    barrier = Barrier(len(requests))

    def send(request: dict[str, Any]) -> Answer:
        barrier.wait(30)
        return ask(stack, **request)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, requests))


def test_sixteen_at_once_answer_as_one_after_the_other(stack: ServedStack) -> None:
    """Mixed modes over the same new documents in different orders."""
    asked = [document(f"sixteen {index}") for index in range(4)]
    requests = [
        {"documents": asked[turn:] + asked[:turn], "question": f"Question {turn}?"} | kind
        for turn in range(4)
        for kind in KINDS
    ]
    together = all_at_once(stack, requests)
    stack.wait_idle()
    for request, answer in zip(requests, together, strict=True):
        alone = ask(stack, **request)
        assert answer.text == alone.text, request
        if request["reuse"] == "compose":
            assert "live" not in answer.served


def test_twelve_requests_for_one_new_document_capture_it_once(stack: ServedStack) -> None:
    before = stack.captures()
    answers = all_at_once(stack, [{"documents": [document("single flight", 300)]}] * 12)
    assert len({answer.text for answer in answers}) == 1
    served = [answer.served[0] for answer in answers]
    assert served.count("cold") == 1
    assert served.count("hit") == 11
    assert stack.captures() == before + 1
