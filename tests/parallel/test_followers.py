"""The processes of further ranks, as the leader has them."""

from pathlib import Path

import pytest

from services.worker.adapters.followers import Followers, LostRank
from services.worker.mixers.share import Share


async def test_a_fault_of_one_rank_is_told_by_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """2 where starting again would not help: here its checkpoint is not there."""
    monkeypatch.setenv("HYPIC_WORKER_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("HYPIC_WORKER_TENSOR_PARALLEL", "2")
    followers = await Followers.start(2, revision="read by the leader")
    assert followers.place.share == Share(0, 2)
    assert await followers.lost() == LostRank(rank=1, status=2)
    await followers.stop()
    assert f"hypic worker, rank 1: {tmp_path}/config.json: missing" in capfd.readouterr().err
    assert not followers.place.rendezvous.parent.exists()


async def test_ranks_end_with_whoever_leads_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While they wait for a group that never comes together."""
    demo = Path(__file__).parents[2] / "models" / "demo"
    monkeypatch.setenv("HYPIC_WORKER_CHECKPOINT", str(demo))
    monkeypatch.setenv("HYPIC_WORKER_TENSOR_PARALLEL", "2")
    followers = await Followers.start(2, revision="read by the leader")
    followers.lead.close()
    lost = await followers.lost()
    assert lost == LostRank(rank=1, status=0)
    await followers.stop()
