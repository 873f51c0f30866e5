"""What ranks read of a tensor are the parts of the whole, whatever holds it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.worker.mixers.share import WHOLE, Share, SplitError
from services.worker.models.checkpoint import Checkpoint, CheckpointDirectory
from services.worker.models.cuts import Cut
from services.worker.models.errors import CheckpointError
from services.worker.models.quantisation import BlockScales
from services.worker.models.random_weights import RandomWeights

RANKS = 3
# A fused tensor of three runs, and a matrix that leads out of a block.
LENGTHS, ROWS, COLUMNS = (6, 6, 12), 24, 9


def cut(axis: int, lengths: tuple[int, ...], index: int) -> Cut:
    return Cut.of(lengths, Share(index, RANKS), axis)


def put_together(parts: list[torch.Tensor], axis: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """The whole of all ranks' parts: run by run, rank by rank."""
    runs = [part.split([length // RANKS for length in lengths], dim=axis) for part in parts]
    return torch.cat([own[run] for run in range(len(lengths)) for own in runs], dim=axis)


def check(sources: list[Checkpoint], name: str, shape: tuple[int, ...], axis: int, lengths: tuple[int, ...]) -> None:
    """`sources`: one that is read whole, then one a rank."""
    whole = sources[0].read(name, shape, torch.float32)
    parts = [own.read(name, shape, torch.float32, cut(axis, lengths, index)) for index, own in enumerate(sources[1:])]
    assert [part.shape for part in parts] == [cut(axis, lengths, 0).shape(shape)] * RANKS
    assert torch.equal(put_together(parts, axis, lengths), whole)
    assert all(part.is_contiguous() for part in parts)


def check_all(sources: list[Checkpoint]) -> None:
    check(sources, "rows.weight", (ROWS, COLUMNS), 0, LENGTHS)
    check(sources, "columns.weight", (ROWS, COLUMNS), 1, (COLUMNS,))
    check(sources, "experts.weight", (4, ROWS, COLUMNS), 1, (12, 12))


def test_files_are_read_in_parts(tmp_path: Path) -> None:
    tensors = {"rows.weight": torch.randn(ROWS, COLUMNS), "columns.weight": torch.randn(ROWS, COLUMNS)}
    save_file({**tensors, "experts.weight": torch.randn(4, ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    with CheckpointDirectory(tmp_path) as checkpoint:
        check_all([checkpoint] * (RANKS + 1))
        with pytest.raises(CheckpointError, match=r"shape \(24, 9\) where config.json implies \(24, 12\)"):
            checkpoint.read("rows.weight", (24, 12), torch.float32, cut(1, (12,), 0))


def test_parts_of_quantised_blocks_are_scaled_as_in_the_whole(tmp_path: Path) -> None:
    """Blocks of 5 rows and 4 columns lie across the edges of shares of 2, 2 and 4 rows, and of 3 columns."""
    blocks = BlockScales(5, 4)
    shapes = {"rows.weight": (ROWS, COLUMNS), "columns.weight": (ROWS, COLUMNS), "experts.weight": (4, ROWS, COLUMNS)}
    tensors = {name: torch.randn(shape).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    scales = {f"{name}_scale_inv": torch.rand(blocks.shape(shape)) + 0.5 for name, shape in shapes.items()}
    save_file({**tensors, **scales}, tmp_path / "model.safetensors")
    with CheckpointDirectory(tmp_path, blocks) as checkpoint:
        check_all([checkpoint] * (RANKS + 1))


def test_ranks_of_one_seed_draw_parts_of_one_model() -> None:
    """Gates and biases too; and behind one tensor the next is the same again."""
    sources: list[Checkpoint] = [RandomWeights(torch.device("cpu"), seed=3) for _ in range(RANKS + 1)]
    check_all(sources)
    for name in ("A_log", "dt_bias", "q_norm.weight"):
        check(sources, f"layers.0.{name}", (ROWS,), 0, (ROWS,))
    check_all(sources)


def test_runs_of_different_shares_stand_behind_each_other() -> None:
    """Queries of six heads, keys of one head that two ranks have, and rows that all have."""
    whole = torch.arange(12 + 4 + 2)[:, None]
    share = Share(1, 4)
    joined = Cut.of((12,), share) + Cut.of((4,), share.among(2, "heads")) + Cut.of((2,), WHOLE)
    assert joined.apply(whole).flatten().tolist() == [3, 4, 5, 12, 13, 16, 17]
    assert joined.length == 18
    assert not joined.is_whole


@pytest.mark.parametrize(
    ("number", "count", "expected"),
    [(2, 2, [Share(0, 2), Share(1, 2)]), (1, 2, [WHOLE, WHOLE]), (2, 4, [Share(0, 2)] * 2 + [Share(1, 2)] * 2)],
)
def test_heads_that_serve_all_ranks(number: int, count: int, expected: list[Share]) -> None:
    assert [Share(index, count).among(number, "heads") for index in range(count)] == expected


@pytest.mark.parametrize(("number", "count"), [(3, 2), (3, 4), (2, 3), (6, 4)])
def test_heads_that_cannot_be_shared_evenly(number: int, count: int) -> None:
    with pytest.raises(SplitError, match=f"config.json: {number} heads cannot be split over {count} ranks"):
        Share(0, count).among(number, "heads")
