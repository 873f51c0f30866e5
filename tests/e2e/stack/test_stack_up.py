"""`hypic up` as its user sees it: how it ends, and what it leaves behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack.asking import body, document, read_stream, stream
from tests.e2e.stack.served import ServedStack, is_running, wait_until


def test_sigterm_finishes_the_stream(random_checkpoint: Path, tmp_path: Path) -> None:
    with ServedStack(random_checkpoint, tmp_path / "log", {}) as served:
        family = served.pids()
        request = body(served, [document("sigterm")], max_tokens=400)
        with stream(served, request) as response:
            expected = read_stream(response.iter_lines()).text
        with stream(served, request) as response:
            lines = response.iter_lines()
            begun = read_stream(lines, until_texts=3)
            served.process.terminate()
            rest = read_stream(lines)
        assert rest.is_ended
        assert rest.error is None
        assert rest.finish_reason == "length"
        assert begun.text + rest.text == expected
        assert served.process.wait(30) == 0
        assert not any(map(is_running, family))


def test_a_killed_supervisor_leaves_no_orphans(random_checkpoint: Path, tmp_path: Path) -> None:
    with ServedStack(random_checkpoint, tmp_path / "log", {}) as served:
        family = served.pids()
        assert all(map(is_running, family))
        os.kill(served.process.pid, signal.SIGKILL)
        served.process.wait(10)
        wait_until(lambda: not any(map(is_running, family)))


def test_a_missing_checkpoint_is_said_in_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "up", "--checkpoint", str(tmp_path / "none"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_state_folder_that_cannot_be_used_is_said_in_words(random_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "services.cli.main", "up", "--checkpoint", str(random_checkpoint), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command += ["--state", str(tmp_path / "file" / "state")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--state" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_stacks_cannot_share_a_state_folder(random_checkpoint: Path, tmp_path: Path) -> None:
    with ServedStack(random_checkpoint, tmp_path / "log", {}, state=tmp_path / "state"):
        other = ServedStack(random_checkpoint, tmp_path / "other", {}, state=tmp_path / "state")
        with pytest.raises(AssertionError, match="is used by a cache service that runs"), other:
            pass
