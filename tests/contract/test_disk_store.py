"""The disk store outlives its process, however that ends, and keeps no half of anything."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from services.worker.tiers.disk import DiskStore
from tests.contract.test_blob_stores import CAPACITY, blob, key, read


def test_blobs_survive_a_restart_in_order_of_use(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, CAPACITY)
    for number in (1, 2, 3):
        store.put(key(number), blob(number, 300))
        os.utime(tmp_path / f"{key(number).hex()}.safetensors", ns=(number, number))
    read(store, 1)
    store.close()
    again = DiskStore(tmp_path, CAPACITY)
    assert list(again.sizes()) == [key(2), key(3), key(1)]
    assert read(again, 2) == b"".join(blob(2, 300))
    again.check_integrity()
    again.close()
    smaller = DiskStore(tmp_path, 650)
    assert set(smaller.sizes()) == {key(1), key(2)}
    smaller.check_integrity()
    smaller.close()


@pytest.mark.parametrize("dies_in", ["fsync", "rename"])
def test_a_process_killed_while_it_writes_leaves_no_half(dies_in: str, tmp_path: Path) -> None:
    """Killed with all bytes written but not named, and before they are on the medium; what was there before stays."""
    script = f"""
        import os, signal, sys
        from pathlib import Path
        from services.worker.tiers.disk import DiskStore
        store = DiskStore(Path(sys.argv[1]), 1000)
        store.put(bytes([1]) * 32, [b"old" * 10])
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync = die if "{dies_in}" == "fsync" else os.fsync
        Path.rename = die
        store.put(bytes([1]) * 32, [b"new" * 20])
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.unfinished"))
    store = DiskStore(tmp_path, CAPACITY)
    assert read(store, 1) == b"old" * 10
    assert not list(tmp_path.glob("*.unfinished"))
    store.check_integrity()
    store.close()


def test_nobody_else_may_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "states", CAPACITY)
    store.put(key(1), blob(1, 300))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in ((tmp_path / "states"), *(tmp_path / "states").iterdir())]
    assert modes == [0o700, 0o600, 0o600]
    store.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, CAPACITY)
    with pytest.raises(BlockingIOError):
        DiskStore(tmp_path, CAPACITY)
    store.close()
    DiskStore(tmp_path, CAPACITY).close()


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, CAPACITY)
    store.put(key(1), blob(1, 300))
    source = store.open(key(1))
    assert source is not None
    (tmp_path / f"{key(1).hex()}.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        source.read(0, 10)
    assert store.open(key(1)) is None
    assert not store.sizes()
    store.check_integrity()
    store.close()


def test_a_write_that_fails_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, CAPACITY)
    store.put(key(1), blob(1, 300))

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        store.put(key(1), blob(2, 600))
    monkeypatch.undo()
    assert read(store, 1) == b"".join(blob(1, 300))
    assert store.put(key(2), blob(2, 700))
    store.check_integrity()
    store.close()


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "notes.safetensors").write_text("mine too")
    store = DiskStore(tmp_path, CAPACITY)
    assert not store.sizes()
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "notes.safetensors").exists()
    store.close()
