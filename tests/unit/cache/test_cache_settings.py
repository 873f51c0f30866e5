"""Settings of the cache service."""

from pathlib import Path

import pytest

from services.cache.settings import CacheSettings
from services.common.settings import SettingsError


def test_the_defaults_start_an_embedded_service() -> None:
    settings = CacheSettings.from_environment()
    assert settings.listen_address == "127.0.0.1:7101"
    assert settings.directory == "memory"
    assert settings.limits().budget_bytes == 2 << 30


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HYPIC_CACHE_DIRECTORY", "redis", "secret is required"),
        ("HYPIC_CACHE_SECRET", "short", "at least 16"),
        ("HYPIC_CACHE_JOURNAL_FILE", "state/journal", "secret is required with journal_file"),
        ("HYPIC_CACHE_BUDGET_BYTES", "0", "BUDGET_BYTES"),
        ("HYPIC_CACHE_LISTEN_ADDRESS", "nowhere", "LISTEN_ADDRESS"),
        ("HYPIC_CACHE_REDIS_PREFIX", "a{b}", "REDIS_PREFIX"),
        ("HYPIC_CACHE_BUGDET_BYTES", "1", "unknown variable"),
    ],
)
def test_a_bad_variable_stops_the_start(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        CacheSettings.from_environment()


def test_a_journal_is_for_the_memory_directory(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="journal_file is for directory=memory"):
        CacheSettings.from_environment(directory="redis", secret="s" * 16, journal_file=tmp_path / "journal")


def test_the_secret_is_not_shown() -> None:
    settings = CacheSettings.from_environment(secret="a secret of the tests")
    assert "a secret of the tests" not in repr(settings)
