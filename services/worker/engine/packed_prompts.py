"""What a combine pass needs of its prompts, worked out on the host: their live tokens in order, and where stored bodies lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.combine_plan import CombineLayout, CombinePlan, Run
from services.worker.engine.context import EngineContext
from services.worker.engine.states import SegmentState
from services.worker.mixers.batch import CombineBatch
from services.worker.ops.columns import send_columns
from services.worker.ops.device import has_kernels
from services.worker.ops.layout import BODY_ALIGNMENT, PartWalk, PassAddresses
from services.worker.ops.paged_attention import PagedQueries, PageTable

__all__ = ["BodyPlaces", "PackedPrompts", "PlacedPrompt", "locate_bodies"]


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt with its state slot."""

    plan: CombinePlan
    layout: CombineLayout
    slot: int


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """What the layers need of packed prompts, as numbers on the host.

    token_ids, positions, write_slots `[N]`; slots, is_fresh, last_rows `[B]`: state slots, whether nothing stands in them yet,
    and the row of every last token.
    """

    walk: PartWalk
    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    slots: Sequence[int]
    is_fresh: Sequence[bool]
    last_rows: Sequence[int]
    tables: Sequence[PageTable]
    runs: Sequence[Run]

    @classmethod
    def of(cls, prompts: Sequence[PlacedPrompt]) -> "PackedPrompts":
        """In order."""
        layouts = [one.layout for one in prompts]
        runs = [run for layout in layouts for run in layout.runs]
        cu_runs = (0, *accumulate(len(run.token_ids) for run in runs))
        cu_parts = (0, *accumulate(len(layout.runs) for layout in layouts))
        return cls(
            walk=PartWalk(cu_runs, cu_parts),
            token_ids=[token for layout in layouts for token in layout.token_ids],
            positions=[position for layout in layouts for position in layout.positions],
            write_slots=[slot for layout in layouts for slot in layout.write_slots],
            slots=[one.slot for one in prompts],
            is_fresh=[one.plan.prefix is None for one in prompts],
            last_rows=[cu_runs[part] - 1 for part in cu_parts[1:]],
            tables=[layout.table for layout in layouts],
            runs=runs,
        )

    @property
    def keep_after(self) -> frozenset[int]:
        """Runs behind which the state is wanted."""
        return frozenset(index for index, run in enumerate(self.runs) if run.keep or run.is_head)

    @property
    def states(self) -> list[SegmentState]:
        """Of stored bodies, in order."""
        return [run.state for run in self.runs if run.state is not None]

    @property
    def body_positions(self) -> list[int]:
        """Where the tokens behind every run stand: a stored body's first."""
        return [run.first + len(run.token_ids) for run in self.runs]

    @property
    def stored_positions(self) -> list[int]:
        """Of stored bodies, in order."""
        return [place for run, place in zip(self.runs, self.body_positions, strict=True) if run.state is not None]

    def queries(self, positions: torch.Tensor) -> PagedQueries:
        """Over positions on the device."""
        cu_queries = [self.walk.cu_runs[part] for part in self.walk.cu_parts]
        return PagedQueries(positions, cu_queries, self.tables, on_host=self.positions)

    def batch(
        self,
        queries: PagedQueries,
        write_slots: torch.Tensor,
        slots: torch.Tensor,
        is_fresh: torch.Tensor,
        addresses: PassAddresses | None = None,
    ) -> CombineBatch:
        """Over tensors on the device."""
        return CombineBatch(
            walk=self.walk,
            queries=queries,
            write_slots=write_slots,
            slots=slots,
            planes=[None if run.state is None else run.state.planes for run in self.runs],
            body_positions=self.body_positions,
            keep_after=self.keep_after,
            addresses=addresses,
            is_fresh=is_fresh,
        )


@dataclass(frozen=True, slots=True)
class BodyPlaces:
    """Where the planes of stored bodies lie, on the host, as `PassAddresses` has them.

    table int64 `[layers, 3, n]`; positions: where the bodies stand, by which families with position turn their end states.
    """

    table: NDArray[np.int64]
    positions: Sequence[int]

    @property
    def is_aligned(self) -> bool:
        """All to what kernels read wide."""
        return bool((self.table % BODY_ALIGNMENT == 0).all())

    def send(self, device: torch.device) -> PassAddresses:
        """To the device."""
        flat, positions = send_columns([self.table.ravel(), self.positions], device, torch.int64)
        return PassAddresses(flat.view(self.table.shape), self.is_aligned, positions)


def locate_bodies(context: EngineContext, packed: PackedPrompts) -> BodyPlaces | None:
    """Where kernels read stored bodies as they are, on their own device.

    None too where some are on their way through the layers: then every layer looks where its own lie.
    """
    mixers, states = context.model.linear_mixers, packed.states
    if any(len(state.addresses) < len(mixers) for state in states):
        return None
    if not has_kernels(context.device) or not mixers:
        return None
    nothing = np.zeros((len(mixers), 3), dtype=np.int64)
    table = np.stack([state.addresses for state in states] or [nothing], axis=-1)
    return BodyPlaces(table, packed.stored_positions or [0])
