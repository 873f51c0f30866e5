"""What every service's settings share."""

from pathlib import Path

import pytest

from services.cache.settings import CacheSettings
from services.common.settings import ServiceSettings, SettingsError
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings

OPTIONAL_FILES = [
    (service, name)
    for service in (CacheSettings, RouterSettings, WorkerSettings)
    for name, field in service.model_fields.items()
    if field.annotation == Path | None
]


@pytest.mark.parametrize(("service", "name"), OPTIONAL_FILES)
def test_an_empty_path_is_none(monkeypatch: pytest.MonkeyPatch, service: type[ServiceSettings], name: str) -> None:
    if service is WorkerSettings:
        monkeypatch.setenv("HYPIC_WORKER_CHECKPOINT", "models/demo")
    monkeypatch.setenv(f"{service.model_config['env_prefix']}{name.upper()}", "")
    assert getattr(service.from_environment(), name) is None


def test_a_path_that_is_needed_may_not_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPIC_WORKER_CHECKPOINT", "")
    with pytest.raises(SettingsError, match=r"HYPIC_WORKER_CHECKPOINT: .*is empty; give a path"):
        WorkerSettings.from_environment()
