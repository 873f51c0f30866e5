"""A model without linear layers through router, cache service and worker: its segments are keys and values alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.checkpoint import write_attention_checkpoint
from tests.e2e.stack.served import ServedStack

DOCUMENTS = [document(f"attention {index}") for index in range(3)]


@pytest.fixture(scope="module")
def attention_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """A stack over a tiny Llama."""
    root = tmp_path_factory.mktemp("attention")
    write_attention_checkpoint(root / "llama", Path("models/demo"))
    with ServedStack(root / "llama", root / "log", {}) as served:
        yield served


def test_cold_then_hits_in_another_order(attention_stack: ServedStack) -> None:
    cold = ask(attention_stack, DOCUMENTS)
    assert cold.served == ["cold"] * 3
    warm = ask(attention_stack, DOCUMENTS[::-1])
    assert warm.served == ["hit"] * 3
    assert all(part["reused_tokens"] > part["live_tokens"] > 0 for part in warm.segments)
    again = ask(attention_stack, DOCUMENTS)
    assert again.served == ["hit"] * 3
    assert again.text == cold.text
    assert again.text != warm.text


def test_a_prefix_continues_exactly(attention_stack: ServedStack) -> None:
    off = ask(attention_stack, DOCUMENTS, reuse="off")
    first = ask(attention_stack, DOCUMENTS, reuse="exact")
    second = ask(attention_stack, DOCUMENTS, reuse="exact")
    assert first.text == second.text == off.text
    assert second.served == ["prefix"] * 3


def test_worker_and_directory_agree_and_everything_can_be_forgotten(attention_stack: ServedStack) -> None:
    ask(attention_stack, DOCUMENTS)
    attention_stack.wait_idle()
    attention_stack.forget_everything()
    assert ask(attention_stack, DOCUMENTS).served == ["cold"] * 3
