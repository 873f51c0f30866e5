"""What `hypic up` keeps between two runs."""

import stat
from pathlib import Path

import pytest

from services.cli.state import default_state_directory, state_variables


def test_the_secret_is_made_once(tmp_path: Path) -> None:
    first = state_variables(tmp_path / "state", {})
    assert first == state_variables(tmp_path / "state", {})
    assert len(first["HYPIC_CACHE_SECRET"]) == 64
    assert first["HYPIC_CACHE_SECRET"] != state_variables(tmp_path / "other", {})["HYPIC_CACHE_SECRET"]
    assert first["HYPIC_CACHE_JOURNAL_FILE"] == str(tmp_path / "state" / "directory.journal")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "state" / "secret").stat().st_mode) == 0o600


def test_the_environment_comes_first(tmp_path: Path) -> None:
    given = {"HYPIC_CACHE_SECRET": "given", "HYPIC_CACHE_JOURNAL_FILE": "elsewhere"}
    assert state_variables(tmp_path, given) == {"HYPIC_CACHE_SECRET": "given"}
    assert not list(tmp_path.iterdir())
    assert "HYPIC_CACHE_JOURNAL_FILE" not in state_variables(tmp_path, {"HYPIC_CACHE_DIRECTORY": "redis"})


def test_a_folder_for_each_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_state_directory(8000) == Path("/home/someone/.local/state/hypic/8000")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert default_state_directory(8001) == Path("/elsewhere/hypic/8001")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        state_variables(tmp_path / "file" / "state", {})
