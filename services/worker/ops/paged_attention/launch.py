"""What all layers of one pass launch alike: their work on the device, in tensors that may stay where they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.ops.columns import send_into
from services.worker.ops.paged_attention.types import PagedQueries
from services.worker.ops.paged_attention.work import BLOCK_FIELDS, HeadTiles, Tiles, Work, room_for

__all__ = ["FixedLaunch", "Launch", "fixed_launches", "prepare"]

# Groups and rows of page tables that any recorded launch has room for: a few kilobytes.
_LEAST_GROUPS, _LEAST_ROWS = (256, 256), 2048


@dataclass(frozen=True, slots=True)
class Launch:
    """What all layers of one pass launch alike: the columns of `Work` on the device."""

    tiles: Tiles
    num_partial: int
    blocks: torch.Tensor
    group_base: torch.Tensor
    group_rows: torch.Tensor
    row_slot: torch.Tensor
    row_first: torch.Tensor
    row_count: torch.Tensor
    cu_partial: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Programs a key head."""
        return len(self.blocks) // BLOCK_FIELDS

    @classmethod
    def of(cls, asked: PagedQueries, tiles: Tiles) -> "Launch":
        """Cut the work on the host and send it in one transfer: a small copy costs what a large one does."""
        work = Work.cut(asked, tiles)
        sizes = tuple(len(column) for column in work.columns)
        return cls.over(tiles, work.num_partial, work.joined(sizes).to(asked.positions.device), sizes)

    @classmethod
    def over(cls, tiles: Tiles, num_partial: int, joined: torch.Tensor, sizes: Sequence[int]) -> "Launch":
        """Views of columns that lie one behind the other."""
        return cls(tiles, num_partial, *joined.split(list(sizes)))


class FixedLaunch:
    """A launch whose tensors stay where they are, for passes that are recorded once and replayed.

    Columns have room to grow; `refresh` says where they have outgrown it. Tables are cut into splits anew every time, so that
    longer ones make no more programs.
    """

    def __init__(self, asked: PagedQueries, heads: HeadTiles, page_size: int) -> None:
        self._heads, self._page_size = heads, page_size
        self._tiles = Tiles.of(asked, heads, page_size)
        work = Work.cut(asked, self._tiles)
        # The last column has a number for every query that there is room for, and one more.
        least = [0, *_LEAST_GROUPS, *[_LEAST_ROWS] * 3, room_for(len(asked.positions))]
        self._sizes = tuple(max(room_for(len(column)), size) for column, size in zip(work.columns, least, strict=True))
        # Without partial results the recorded launch has no second kernel.
        self._num_partial = room_for(work.num_partial) if work.num_partial else 0
        self._joined = torch.empty(sum(self._sizes), dtype=torch.int32, device=asked.positions.device)
        self.launch = Launch.over(self._tiles, self._num_partial, self._joined, self._sizes)
        self._send(work)

    def refresh(self, asked: PagedQueries) -> bool:
        """Take over what the tables say now; False, with nothing changed, where there is no room for it."""
        work = Work.cut(asked, self._tiles.cut_anew(asked, self._heads, self._page_size))
        fits = all(len(column) <= size for column, size in zip(work.columns, self._sizes, strict=True))
        if not fits or work.num_partial > self._num_partial:
            return False
        self._send(work)
        return True

    def _send(self, work: Work) -> None:
        send_into(self._joined, work.joined(self._sizes))


def fixed_launches(asked: PagedQueries) -> dict[str, FixedLaunch]:
    """What a pass over fixed queries has prepared and a recorded one goes on with."""
    return {key: prepared for key, prepared in asked.prepared.items() if isinstance(prepared, FixedLaunch)}


def prepare(key: str, asked: PagedQueries, heads: HeadTiles, page_size: int) -> Launch:
    """The launch that a key names within a pass; cut where no layer has asked for it yet."""
    if asked.is_fixed:
        return asked.prepare(key, lambda: FixedLaunch(asked, heads, page_size)).launch
    return asked.prepare(key, lambda: Launch.of(asked, Tiles.of(asked, heads, page_size)))
