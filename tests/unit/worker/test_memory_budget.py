"""How a device's memory is shared: everything is counted, and a worker starts with what the shares say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.settings import SettingsError
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import read_served_model
from services.worker.inspection.budget import PassSizes, share_memory, workspace_bytes
from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import Sizes, measure_sizes
from services.worker.models.checkpoint import read_json
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import find_family
from services.worker.models.spec import ModelSpec
from services.worker.settings import WorkerSettings

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
DEMO = Path(__file__).parents[3] / "models" / "demo"
PASSES = PassSizes(65536, 4096, max_running=16, recorded_passes=24, recorded_tokens=4096)


def _read(name: str) -> tuple[ModelSpec, Sizes]:
    directory = CONFIGS / name
    fields = read_json(directory / "config.json")
    family = find_family(directory, fields)
    spec = family.read_spec(fields)
    return spec, measure_sizes(spec, record_requests(family, spec, torch.bfloat16, frozenset()), 2)


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "Kimi-Linear-48B-A3B", "Ring-mini-linear-2.0"])
def test_shares_add_up_to_the_whole(name: str) -> None:
    spec, sizes = _read(name)
    shares = share_memory(128 << 30, spec, sizes, 2, PASSES)
    assert shares.fixed + shares.pages + shares.states == 128 << 30
    assert shares.weights == sizes.weights
    assert shares.slots == 16 * sizes.request_state
    segments = shares.states / sizes.segment.total
    assert segments == pytest.approx(shares.pages / (2048 * sizes.token), rel=1e-6)


def test_the_work_of_a_pass_is_what_a_gpu_was_seen_to_take() -> None:
    """7.486 GiB for 32,768 captured tokens (docs/benchmarks.md): counted no lower, and not much higher."""
    spec, _ = _read("Qwen3.5-35B-A3B")
    assert 1.0 <= workspace_bytes(spec, 2, 32768) / (7.486 * 2**30) <= 1.25


@given(
    total=st.integers(1, 1 << 40),
    pass_tokens=st.integers(1, 1 << 18),
    capture_tokens=st.integers(1, 1 << 15),
    max_running=st.integers(1, 256),
)
def test_more_work_leaves_less(total: int, pass_tokens: int, capture_tokens: int, max_running: int) -> None:
    spec, sizes = _read("Ring-mini-linear-2.0")
    passes = PassSizes(pass_tokens, capture_tokens, max_running)
    left = _left(total, spec, sizes, passes)
    for field in ("pass_tokens", "capture_tokens", "max_running", "recorded_tokens"):
        assert _left(total, spec, sizes, replace(passes, **{field: 2 * getattr(passes, field) + 4096})) < left


def _left(total: int, spec: ModelSpec, sizes: Sizes, passes: PassSizes) -> int:
    shares = share_memory(total, spec, sizes, 2, passes)
    return shares.pages + shares.states


def test_a_worker_starts_with_its_shares() -> None:
    settings = WorkerSettings(checkpoint=DEMO, memory_bytes=1 << 30, context_length=4096)
    engine = build_engine(settings, read_served_model(settings))
    store, pages = engine.context.store, engine.context.pages
    held = store.capacity_bytes + pages.num_pages * pages.page_size * engine.context.memory.bytes_per_token
    assert 0.5 * 2**30 < held < 2**30
    assert store.capacity_bytes > 0


def test_a_budget_that_leaves_nothing_says_what_took_it() -> None:
    settings = WorkerSettings(checkpoint=DEMO, memory_bytes=64 << 20)
    with pytest.raises(
        CheckpointError, match=r"HYPIC_WORKER_MEMORY_BYTES of 67108864 leaves nothing .* lower HYPIC_WORKER_C"
    ):
        build_engine(settings, read_served_model(settings))


@pytest.mark.parametrize("name", ["PAGE", "STATE"])
def test_a_share_beside_the_budget_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPIC_WORKER_MEMORY_BYTES", str(1 << 30))
    monkeypatch.setenv(f"HYPIC_WORKER_{name}_BYTES", str(1 << 28))
    with pytest.raises(SettingsError, match=r"^Value error, HYPIC_WORKER_MEMORY_BYTES shares memory itself; leave out"):
        WorkerSettings.from_environment(checkpoint=DEMO)
