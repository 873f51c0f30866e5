"""Which tiers the settings switch on, and what stops the start."""

from pathlib import Path

import pytest

from services.worker.adapters.tier_builder import TierError, build_stores
from services.worker.settings import WorkerSettings


def _settings(**fields: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"checkpoint": "somewhere", **fields})


def test_nothing_is_on_by_default() -> None:
    assert build_stores(_settings()) == []
    assert build_stores(_settings(disk_directory="")) == []


def test_the_nearest_comes_first(tmp_path: Path) -> None:
    """A Redis that does not answer is an empty one."""
    stores = build_stores(_settings(host_bytes=1000, redis_url="redis://127.0.0.1:1/0", disk_directory=tmp_path))
    assert [store.tier for store in stores] == ["host", "redis", "disk"]
    for store in stores:
        store.close()


@pytest.mark.parametrize("worker_id", ["worker-0", "../..", "a/b", ".", "ü %2F"])
def test_a_worker_stays_in_its_folder(worker_id: str, tmp_path: Path) -> None:
    for store in build_stores(_settings(disk_directory=tmp_path / "states", worker_id=worker_id)):
        store.close()
    (folder,) = (tmp_path / "states").iterdir()
    assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_what_stops_the_start(tmp_path: Path) -> None:
    """The message names the variable and the remedy."""
    (store,) = build_stores(_settings(disk_directory=tmp_path))
    with pytest.raises(TierError, match=r"HYPIC_WORKER_DISK_DIRECTORY: .* HYPIC_WORKER_WORKER_ID"):
        build_stores(_settings(disk_directory=tmp_path))
    store.close()
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match=r"HYPIC_WORKER_DISK_DIRECTORY: .* may be written"):
        build_stores(_settings(disk_directory=tmp_path / "file"))
    with pytest.raises(TierError, match=r"HYPIC_WORKER_REDIS_URL: .* redis://"):
        build_stores(_settings(redis_url="nowhere"))
    with pytest.raises(TierError, match=r"HYPIC_WORKER_TENSOR_PARALLEL: .* leave out"):
        build_stores(_settings(tensor_parallel=2, device="cuda", host_bytes=1000))
