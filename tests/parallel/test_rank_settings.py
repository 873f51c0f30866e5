"""What the settings of a group are held to before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.common.settings import SettingsError
from services.worker.adapters.engine_builder import RankPlace, build_engine
from services.worker.adapters.served_model import read_served_model
from services.worker.engine.sampling import Sampler
from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import measure_sizes
from services.worker.mixers.share import Share
from services.worker.models.checkpoint import read_json
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import find_family
from services.worker.settings import WorkerSettings

DEMO = Path(__file__).parents[2] / "models" / "demo"
CONFIG = Path(__file__).parents[1] / "data" / "configs" / "Qwen3.5-122B-A10B"


def test_one_gpu_is_not_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPIC_WORKER_DEVICE", "cuda:1")
    monkeypatch.setenv("HYPIC_WORKER_TENSOR_PARALLEL", "2")
    with pytest.raises(SettingsError, match=r"HYPIC_WORKER_DEVICE: cuda:1 is one GPU .* CUDA_VISIBLE_DEVICES"):
        WorkerSettings.from_environment(checkpoint=DEMO)


def test_a_process_alone_is_no_group() -> None:
    settings = WorkerSettings(checkpoint=DEMO, tensor_parallel=2)
    with pytest.raises(CheckpointError, match="only `hypic worker` starts several ranks"):
        build_engine(settings, read_served_model(settings))


def test_too_few_gpus_are_said_ahead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    settings = WorkerSettings(checkpoint=DEMO, device="cuda", tensor_parallel=2)
    with pytest.raises(CheckpointError, match="HYPIC_WORKER_TENSOR_PARALLEL is 2 but torch sees 1 GPUs"):
        build_engine(settings, read_served_model(settings), RankPlace(Share(0, 2), DEMO, Sampler))


def test_a_rank_counts_its_own_bytes() -> None:
    """Half of everything but embedding, head, norms, routers and the few rows that all ranks have."""
    fields = read_json(CONFIG / "config.json")
    family = find_family(CONFIG, fields)
    whole_spec = family.read_spec(fields)
    spec = replace(whole_spec, layers=whole_spec.layers[:4])
    whole, own = (
        measure_sizes(spec, record_requests(family, spec, torch.bfloat16, frozenset(), share), 2, share)
        for share in (Share(), Share(1, 2))
    )
    assert own.parameters == whole.parameters
    assert own.active_parameters == whole.active_parameters
    assert own.token == whole.token / 2
    assert own.segment.total == whole.segment.total / 2
    assert own.request_state == whole.request_state / 2
    assert own.weights == pytest.approx((whole.weights + 4 * spec.vocab_size * spec.hidden_size) / 2, rel=1e-3)
