"""A model without linear layers: its segments are pages alone, and the directory counts them as the worker does."""

from pathlib import Path

from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.checkpoint import write_attention_checkpoint
from tests.e2e.stack.served import ServedStack, wait_until

DOCUMENTS = [document(f"attention {index}") for index in range(3)]


def test_pages_are_counted_and_given_back(tmp_path: Path) -> None:
    write_attention_checkpoint(tmp_path / "llama", Path("models/demo"))
    with ServedStack(tmp_path / "llama", tmp_path / "log", {}) as stack:
        assert ask(stack, DOCUMENTS).served == ["cold"] * 3
        assert ask(stack, DOCUMENTS, reuse="exact").served == ["live"] * 3
        assert ask(stack, DOCUMENTS, reuse="exact").served == ["prefix"] * 3
        # Gauges are refreshed from time to time: both are zero until the requests have been counted.
        wait_until(lambda: stack.gauge("worker", "hypic_worker_state_bytes") > 0)
        stack.wait_idle()
        stack.forget_everything()
        assert ask(stack, DOCUMENTS).served == ["cold"] * 3
