"""`hypic eval` tells of its user's faults in one line, before minutes are spent."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eval.cli import app

DEMO = Path("models/demo")


def _fault(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    return result.output.strip()


@pytest.mark.parametrize("command", ["run", "oracle"])
def test_no_checkpoint(command: str, tmp_path: Path) -> None:
    message = _fault(command, "--checkpoint", tmp_path, "--workers", 1)
    assert message.startswith(f"hypic eval {command}: {tmp_path / 'config.json'}: missing")


def test_a_checkpoint_that_speaks_another_format(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    renamed = (DEMO / "tokenizer.json").read_text().replace("im_end", "turn_end")
    (tmp_path / "tokenizer.json").write_text(renamed)
    message = _fault("run", "--checkpoint", tmp_path)
    assert f"{tmp_path / 'tokenizer.json'}: not usable" in message
    assert "hypic eval passages" in message


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_is_not_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert f"--device {device}" in _fault("run", "--device", device)


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf"])
def test_a_scale_that_asks_for_nothing(scale: str) -> None:
    assert "--scale must lie above 0" in _fault("run", "--scale", scale)


@pytest.mark.parametrize("command", ["run", "oracle"])
def test_an_output_that_cannot_be_written(command: str, tmp_path: Path) -> None:
    """Told before the first question is asked."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "outcomes.json.gz"
    assert f"--out {out}: cannot be written" in _fault(command, "--out", out, "--workers", 1)


@pytest.mark.parametrize("command", ["report", "budget"])
@pytest.mark.parametrize("content", [None, b"text", gzip.compress(b"{}"), gzip.compress(b"[1]")[:-4]])
def test_a_record_that_is_none(command: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "record.json.gz"
    if content is not None:
        path.write_bytes(content)
    assert f"{path}: not readable as a record" in _fault(command, path)


def test_questions_without_an_answer_in_a_passage(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps([{"question": "where?", "answers": ["Port Louis"], "ctxs": [{"text": "nowhere"}]}]))
    out = tmp_path / "out.json"
    message = _fault("passages", "--questions", path, "--checkpoint", DEMO, "--out", out)
    assert f"{path}: no question was asked" in message
    assert not out.exists()


def test_passages_too_short_for_a_segment(tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps([{"question": "where?", "answers": ["here"], "ctxs": [{"text": "it is here."}]}]))
    message = _fault("passages", "--questions", path, "--checkpoint", DEMO, "--out", tmp_path / "out.json")
    assert "question 0: no passage is long enough" in message


def test_a_checkpoint_whose_replies_would_not_end(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(DEMO, tmp_path / "checkpoint"))
    (directory / "generation_config.json").unlink()
    for name, field in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((directory / name).read_text())
        content.pop(field, None)
        (directory / name).write_text(json.dumps(content))
    questions = tmp_path / "questions.json"
    questions.write_text("[]")
    message = _fault("passages", "--questions", questions, "--checkpoint", directory, "--out", tmp_path / "out.json")
    assert f"{directory / 'generation_config.json'}: eos_token_id is missing" in message
