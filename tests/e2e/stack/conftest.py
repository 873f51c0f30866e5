"""Served stacks: one for requests that end well, one whose processes are killed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack.callers import key_sections
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.e2e.stack.observed import OBSERVED_KEYS, Observed, observe, observed_variables
from tests.e2e.stack.otlp import Collector
from tests.e2e.stack.served import ServedStack

_DEMO = Path(__file__).parents[3] / "models" / "demo"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform != "linux":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip("needs Linux's /proc to find the stack's processes"))


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose greedy replies always run to `max_tokens`."""
    directory = tmp_path_factory.mktemp("checkpoint") / "endless"
    write_random_checkpoint(directory, _DEMO)
    return directory


@pytest.fixture(scope="session")
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """The demo model when its weights are there, else the random one."""
    if (_DEMO / "model.safetensors").exists():
        return _DEMO
    found: Path = request.getfixturevalue("random_checkpoint")
    return found


@pytest.fixture(scope="session")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """A stack that no test harms."""
    log = tmp_path_factory.mktemp("stack") / "log"
    with ServedStack(checkpoint, log, {"HYPIC_ROUTER_DEFAULT_MAX_TOKENS": "16"}) as served:
        yield served


@pytest.fixture(scope="session")
def fragile(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStack]:
    """A stack whose services are stopped and killed; few requests fill it. Each test leaves it ready."""
    log = tmp_path_factory.mktemp("fragile") / "log"
    variables = {
        "HYPIC_WORKER_MAX_RUNNING": "4",
        "HYPIC_WORKER_MAX_WAITING": "4",
        # Segments of many requests share a capture pass, which some of them leave.
        "HYPIC_WORKER_CAPTURE_TOKENS": "8192",
        "HYPIC_ROUTER_WORKER_WAIT_SECONDS": "40",
        "HYPIC_ROUTER_LEASE_SECONDS": "4",
        "HYPIC_CACHE_TICKET_SECONDS": "4",
    }
    with ServedStack(random_checkpoint, log, variables) as served:
        yield served


@pytest.fixture(scope="session")
def observed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Two workers, a role each, and tenants with little room, after traffic of every kind; for whoever looks from outside."""
    folder = tmp_path_factory.mktemp("observed")
    (folder / "keys.toml").write_text(key_sections(OBSERVED_KEYS))
    log = folder / "log"
    with (
        Collector() as collector,
        ServedStack(checkpoint, log, observed_variables(folder, collector.endpoint), ("prefill", "combine")) as served,
    ):
        seen = observe(served, collector, log)
        yield seen
        seen.close()
