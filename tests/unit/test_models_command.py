"""`hypic models` as its user types it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from services.cli.main import app
from tests.models import VARIANTS, CheckpointFactory

DEMO = Path("models/demo")


def run(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(app, ["models", *map(str, arguments)])


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints.directory(VARIANTS[0]), tmp_path / "checkpoint"))


def test_families_in_a_table_and_as_json() -> None:
    table, listed = run().output.split("\n\n")[0].splitlines(), json.loads(run("--json").output)
    for line, family in zip(table[1:], listed["families"], strict=True):
        assert line.startswith(family["name"])
        assert all(model_type in line for model_type in family["model_types"])


def test_a_checkpoint_that_can_be_served(directory: Path) -> None:
    result = run("check", directory, "--gpu", "h200")
    assert result.exit_code == 0
    assert "gated delta" in result.output
    assert "heads above 0.01" in result.output
    assert "running requests" in result.output


def test_a_checkpoint_over_two_gpus() -> None:
    """Half of all but embedding and head, which every rank has, beside the runtime's tenth."""
    config = "tests/data/configs/Qwen3.5-122B-A10B"
    result = run("check", config, "--gpu", "h200", "--gpus", 2, "--json")
    capacity, sizes = (json.loads(result.output)[name] for name in ("capacity", "sizes"))
    looked_up = 2 * 2 * 248_320 * 3072
    own = 0.9 * capacity["gpu"] - capacity["free"]
    assert own == pytest.approx((sizes["weights"] + looked_up) / 2, rel=1e-3)
    assert capacity["segment"] < 0.6 * (sum(sizes["segment"].values()) + 2048 * sizes["token"])
    assert "each of 2 GPUs of 139 GiB" in run("check", config, "--gpu", "h200", "--gpus", 2).output
    assert "the weights need 2 of them" in run("check", config, "--gpu", "h200").output


def test_a_checkpoint_that_gpus_cannot_share() -> None:
    result = run("check", "tests/data/configs/Qwen3.5-35B-A3B", "--gpu", "h200", "--gpus", 3)
    assert result.exit_code == 2
    assert "16 linear key heads cannot be split over 3 ranks" in result.output


def test_the_same_as_json(directory: Path) -> None:
    report = json.loads(run("check", directory, "--gpu-bytes", 1 << 30, "--body-tokens", 500, "--json").output)
    assert report["capacity"]["gpu"] == 1 << 30
    assert report["capacity"]["assumptions"]["body_tokens"] == 500
    assert report["weights"]["missing"] == []


def test_a_config_alone(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    result = run("check", directory)
    assert result.exit_code == 0
    assert "none in the directory" in result.output


def test_a_tensor_that_no_file_could_hold(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 1 << 30, "hidden_size": 1 << 30}))
    result = run("check", directory)
    assert result.exit_code == 2
    assert result.output.startswith(
        "hypic models check: config.json: implies a tensor model.embed_tokens.weight of shape"
    )


def test_weights_that_do_not_match(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(3)
    save_file(tensors, directory / "model.safetensors")
    result = run("check", directory)
    assert result.exit_code == 1
    assert "model.norm.weight is [3], config.json implies [48]" in result.output


def test_real_text_is_measured() -> None:
    report = json.loads(run("check", DEMO, "--text", "README.md", "--json").output)
    assert report["decays"]["source"] == "measured"
    remembering = [each["num_remembering"] for each in report["decays"]["spectra"]]
    assert remembering == sorted(remembering, reverse=True)
    assert 0 < remembering[-1] < report["decays"]["num_heads"]


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "mamba9"}', '{"model_type": "qwen3_5"}'])
def test_what_cannot_be_read_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    result = run("check", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("hypic models check: ")
    assert result.stderr.count("\n") == 1
    assert "config.json" in result.stderr


def test_a_text_that_is_too_short_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("ten words")
    result = run("check", DEMO, "--text", tmp_path / "short.txt")
    assert result.exit_code == 2
    assert "longer text" in result.stderr


def test_one_gpu_is_named(directory: Path) -> None:
    result = run("check", directory, "--gpu", "h200", "--gpu-bytes", 1 << 30)
    assert result.exit_code == 2
    assert "not both" in result.stderr
