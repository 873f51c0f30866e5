"""What is said of a checkpoint is what a worker that loads it finds, reads and keeps."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.inspection.capacity import CapacityAssumptions, measure_capacity
from services.worker.inspection.decays import BODY_TOKENS, DecaySource
from services.worker.inspection.families import FAMILY_NOTES
from services.worker.inspection.report import CheckpointReport, inspect_checkpoint
from services.worker.inspection.requests import record_requests
from services.worker.inspection.sizes import Sizes, StateBytes, measure_sizes
from services.worker.models.registry import FAMILIES, find_family, read_checkpoint_spec
from tests.exactness.rig import PassRig, create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory, Variant

SEAM = CaptureProfile(SeamWindow(4), ())
NORM = "model.norm.weight"


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(VARIANTS[0]), tmp_path / "checkpoint"))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> CheckpointReport:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return inspect_checkpoint(directory)


def edit_config(directory: Path, **changes: Any) -> CheckpointReport:  # noqa: ANN401 # any JSON
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return inspect_checkpoint(directory)


def test_what_the_public_implementation_writes_is_complete(checkpoints: CheckpointFactory, variant: Variant) -> None:
    report = inspect_checkpoint(checkpoints.directory(variant))
    assert report.weights is not None
    assert report.weights.is_servable
    assert report.weights.unexpected == ()
    assert report.unknown_fields == ()


def test_parameters_are_those_that_are_stored(checkpoints: CheckpointFactory, variant: Variant, tmp_path: Path) -> None:
    """With weights, and from the config alone. A public class that ties nothing stores a tied head all the same."""
    stored = checkpoints.directory(variant)
    shutil.copy(stored / "config.json", tmp_path)
    tensors = load_file(stored / "model.safetensors")
    report = inspect_checkpoint(stored)
    if report.tied_head:
        tensors.pop("lm_head.weight", None)
    expected = sum(tensor.numel() for tensor in tensors.values())
    assert report.sizes.parameters == inspect_checkpoint(tmp_path).sizes.parameters == expected


def test_sizes_are_those_of_the_loaded_model(
    checkpoints: CheckpointFactory, variant: Variant, device: torch.device
) -> None:
    directory = checkpoints.directory(variant)
    config = json.loads((directory / "config.json").read_text())
    spec = read_checkpoint_spec(directory)
    requests = record_requests(find_family(directory, config), spec, torch.float32, frozenset())
    sizes = measure_sizes(spec, requests, itemsize=4)
    context = create_context(directory, device, SEAM)
    (state,) = PassRig(context).capture(draw_ids(40, 3))
    slots = context.memory.linear_slots
    assert sizes.token == context.memory.bytes_per_token
    assert sizes.segment.total == state.plane_bytes
    assert sizes.segment.transitions == sum(plane.transition.nbytes for plane in state.planes)
    assert sizes.request_state == sum(layer.states[0].nbytes + layer.tails[0].nbytes for layer in slots)


def test_decays_are_those_of_the_gates_at_rest(
    checkpoints: CheckpointFactory, variant: Variant, device: torch.device
) -> None:
    """A hidden state of zeros adds nothing to any gate."""
    directory = checkpoints.directory(variant)
    report = inspect_checkpoint(directory)
    model = create_context(directory, device, SEAM).model
    hidden = torch.zeros(1, model.spec.hidden_size, device=device)
    projections = [mixer.projection for mixer in model.linear_mixers]
    projected = [(projection, projection.project(hidden)) for projection in projections]
    logs = [projection.inputs(own.rows, own).log_decay[0] for projection, own in projected]
    slowest = [log.amax(dim=-1) if log.ndim == 2 else log for log in logs]
    if not slowest:
        assert report.decays is None
        return
    assert report.decays is not None
    heads = torch.cat(slowest).double().cpu()
    assert report.decays.num_heads == heads.numel()
    for body, each in zip(BODY_TOKENS, report.decays.spectra, strict=True):
        decays = (heads * body).exp()
        assert each.num_remembering == int((decays > 0.01).sum())
        assert each.quantiles[0] == pytest.approx(float(decays.min()), rel=1e-4)
        assert each.quantiles[-1] == pytest.approx(float(decays.max()), rel=1e-4)


def test_decays_that_the_config_fixes_need_no_weights(
    checkpoints: CheckpointFactory, variant: Variant, tmp_path: Path
) -> None:
    stored = checkpoints.directory(variant)
    shutil.copy(stored / "config.json", tmp_path)
    with_weights, without = inspect_checkpoint(stored).decays, inspect_checkpoint(tmp_path).decays
    if with_weights is not None and with_weights.source is DecaySource.FIXED:
        assert without == with_weights
    else:
        assert without is None


def test_files_that_serving_needs_beside_the_weights_are_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{}")
    assert inspect_checkpoint(directory).missing_files == ("tokenizer.json",)
    (directory / "tokenizer.json").write_text("{}")
    assert inspect_checkpoint(directory).missing_files == ()


def test_a_missing_tensor_is_named(directory: Path) -> None:
    report = edit_tensors(directory, lambda tensors: tensors.pop(NORM))
    assert report.weights is not None
    assert report.weights.missing == (NORM,)
    assert not report.weights.is_servable


def test_a_wrong_shape_is_named(directory: Path) -> None:
    report = edit_tensors(directory, lambda tensors: tensors.update({NORM: torch.zeros(7)}))
    assert report.weights is not None
    (fault,) = report.weights.wrong_shape
    assert (fault.name, fault.found, fault.implied) == (NORM, (7,), (48,))
    assert not report.weights.is_servable


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_not_read_is_named(dtype: torch.dtype, directory: Path) -> None:
    """The config announces no quantisation."""
    report = edit_tensors(directory, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    assert report.weights is not None
    assert [name.split()[0] for name in report.weights.unreadable] == [NORM]
    assert not report.weights.is_servable


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("model.layers.0.linear_attn.extra.weight", False),
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("mtp.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.4.mlp.gate_proj.weight", True),
        ("lm_head.weight", True),
    ],
)
def test_tensors_that_nobody_asks_for(name: str, is_known: bool, directory: Path) -> None:
    """What is left out on purpose is counted, anything else is named; the checkpoint is servable either way."""
    report = edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    assert report.weights is not None
    assert report.weights.is_servable
    assert report.weights.unexpected == (() if is_known else (name,))
    assert report.weights.num_ignored == int(is_known)


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"sliding_window": 512}, ["sliding_window"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "factor": 2.0}}, ["rope_parameters.factor"]),
        ({"partial_rotary_factor": 0.25}, []),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"mamba_ssm_dtype": "bfloat16"}, ["mamba_ssm_dtype"]),
        ({"mamba_ssm_dtype": "float32"}, []),
        ({"full_attention_interval": 3}, []),
        ({"vision_config": {"depth": 2}, "attention_dropout": 0.1, "image_token_id": 3, "sliding_window": None}, []),
    ],
)  # fmt: skip
def test_fields_that_nobody_reads(changes: dict[str, Any], unknown: list[str], directory: Path) -> None:
    assert list(edit_config(directory, **changes).unknown_fields) == unknown


def test_a_multimodal_config_is_read_inside(directory: Path) -> None:
    path = directory / "config.json"
    inner = json.loads(path.read_text()) | {"softcap": 30.0}
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": inner, "vision_config": {"depth": 1}}))
    assert inspect_checkpoint(directory).unknown_fields == ("text_config.softcap",)


@pytest.mark.parametrize("gpu_bytes", [10_000_000, 50_000_000, 2_000_000_000])
def test_what_fits_is_the_most_that_fits(gpu_bytes: int) -> None:
    sizes = Sizes(
        parameters=5_000_000,
        active_parameters=5_000_000,
        weights=10_000_000,
        token=1000,
        segment=StateBytes(300_000, 300_000, 100, 900),
        request_state=301_000,
    )
    assumed = CapacityAssumptions(reserved_share=0.2, request_tokens=500, body_tokens=700, num_running=3)
    found = measure_capacity(sizes, gpu_bytes, assumed)
    segment, request = 601_000 + 700 * 1000, 301_000 + 500 * 1000

    def fits(bytes_beside: int) -> bool:
        return 10_000_000 + bytes_beside <= gpu_bytes * 0.8

    assert fits(0) == (found.free >= 0)
    for number, each, beside in (
        (found.tokens or 0, 1000, 0),
        (found.running_requests, request, 0),
        (found.segments, segment, 0),
        (found.segments_beside_running, segment, 3 * request),
    ):
        assert number == 0 or fits(number * each + beside)
        assert not fits((number + 1) * each + beside)
    assert (found.gpus_for_weights - 1) * gpu_bytes * 0.8 < 10_000_000 <= found.gpus_for_weights * gpu_bytes * 0.8


def test_the_report_is_json(checkpoints: CheckpointFactory, variant: Variant) -> None:
    report = asdict(inspect_checkpoint(checkpoints.directory(variant), gpu_bytes=1 << 30))
    assert json.loads(json.dumps(report))["sizes"]["parameters"] > 0


def test_the_table_of_families_is_complete() -> None:
    noted = [model_type for notes in FAMILY_NOTES for model_type in notes.model_types]
    served = {model_type for family in FAMILIES for model_type in family.model_types}
    assert len(noted) == len(set(noted))
    assert set(noted) == served


def test_the_table_of_families_is_right(checkpoints: CheckpointFactory, variant: Variant) -> None:
    directory = checkpoints.directory(variant)
    spec = read_checkpoint_spec(directory)
    (notes,) = [notes for notes in FAMILY_NOTES if notes.name == spec.family]
    assert json.loads((directory / "config.json").read_text())["model_type"] in notes.model_types
    assert {state.transition for state in spec.states} == ({notes.transition} - {None})
    if notes.verified_by.startswith("transformers"):
        assert version("transformers").startswith(notes.verified_by.split()[1])
