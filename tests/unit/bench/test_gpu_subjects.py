"""Every subject of the GPU benchmark runs on a CPU, on a tiny random model; what it says there means nothing."""

import json
import math
from pathlib import Path

import pytest
import torch
import typer

from bench.gpu import parallel, ttft
from bench.gpu.__main__ import SUBJECTS, ResultWriter, read_sizes, run, select
from bench.gpu.rig import Rig
from bench.gpu.sizes import TINY, TRUE
from bench.results import Row, read_results

CONFIG = Path("bench/gpu/tiny")
# The other process of `recompute` takes seconds to import what it measures.
QUICK = [subject for subject in SUBJECTS if subject != "recompute"]


def tiny_rig() -> Rig:
    return Rig(CONFIG, TINY, torch.device("cpu"), seed=1)


def test_every_subject_gives_rows() -> None:
    kept: dict[str, list[Row]] = {}
    failed = run(tiny_rig(), QUICK, lambda subject, rows: kept.update({subject: list(rows)}))
    assert failed == []
    assert list(kept) == QUICK
    for subject, rows in kept.items():
        assert all(math.isfinite(row.value) for row in rows), subject
        assert len({row.measure for row in rows}) == len(rows), subject


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    config = json.loads((CONFIG / "config.json").read_text())
    config["text_config"]["linear_num_key_heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RuntimeError, match=r"(?s)rank [01] ended with 1: .*1 linear key heads cannot be split over 2 ranks"
    ):
        list(parallel.measure(Rig(tmp_path, TINY, torch.device("cpu"), seed=1)))


def test_the_table_of_what_is_aimed_at_is_whole() -> None:
    rows = list(ttft.measure(tiny_rig()))
    assert sorted(row.reach for row in rows if row.reach is not None) == [0.35, 1.8, 1.8, 20.0, 70.0]


def test_nothing_is_kept_behind_a_gate_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(rig: Rig) -> None:
        raise RuntimeError("wrong")

    monkeypatch.setitem(SUBJECTS, "gate", fail)
    kept: list[str] = []
    assert run(tiny_rig(), ["gate", "memory", "attention"], lambda subject, rows: kept.append(subject)) == ["gate"]
    assert kept == ["attention"]


def test_subjects_run_in_their_order_and_behind_the_gate() -> None:
    assert select(["decode", "recompute"]) == ["recompute", "gate", "decode"]
    assert select(["attention"]) == ["attention"]
    assert select(["all"]) == list(SUBJECTS)
    with pytest.raises(typer.BadParameter, match="speed"):
        select(["speed"])


def test_sizes_are_changed_by_name() -> None:
    assert read_sizes(TRUE, ["seam_window=32", "rounds=2"]).seam_window == 32
    for wrong in ("seam=32", "rounds", "rounds=few", "recomputed=3"):
        with pytest.raises(typer.BadParameter, match="name=number"):
            read_sizes(TRUE, [wrong])


def test_rows_of_a_subject_replace_its_own(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    writer = ResultWriter(path, "first", "a GPU", is_fresh=False)
    writer.keep("ttft", [Row("hits", 2.0, "ms")])
    writer.keep("decode", [Row("rate", 3.0, "tokens/s")])
    ResultWriter(path, "second", "a GPU", is_fresh=False).keep("ttft", [Row("hits", 1.0, "ms")])
    result = read_results(path)
    assert [(row.measure, row.value) for row in result.rows] == [("decode: rate", 3.0), ("ttft: hits", 1.0)]
    assert result.command == "first; second"


@pytest.mark.parametrize(("device", "is_fresh"), [("another GPU", False), ("a GPU", True)])
def test_nothing_stays_of_another_device_or_an_earlier_whole_run(tmp_path: Path, device: str, is_fresh: bool) -> None:
    path = tmp_path / "gpu.json"
    ResultWriter(path, "first", "a GPU", is_fresh=False).keep("ttft", [Row("hits", 2.0, "ms")])
    ResultWriter(path, "second", device, is_fresh).keep("decode", [Row("rate", 3.0, "tokens/s")])
    result = read_results(path)
    assert [row.measure for row in result.rows] == ["decode: rate"]
    assert (result.command, result.device) == ("second", device)
