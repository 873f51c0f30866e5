"""Router, cache service, combine worker and vLLM together: replies are our own engine's, over stored states in any order."""

from collections.abc import Iterator

import pytest

from bench.vllm.answers import ask_all
from bench.vllm.server import find_python
from bench.vllm.stack import Pair, serve_pair


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    python = find_python()
    assert python is not None
    with serve_pair(python) as running:
        yield running


def test_first_tokens_are_our_own_engines(pair: Pair) -> None:
    answers = ask_all(pair, scenes=4, orders=4)
    assert answers.asked == answers.from_state == 16
    assert answers.hits > answers.segments // 2
    assert answers.beyond_noise == 0, answers.differing
    assert answers.first_equal + len(answers.differing) == answers.asked
    # One reply of sixteen may go another way behind a near tie.
    assert abs(answers.right_theirs - answers.right_own) <= 1
