"""Segments on their way through the layers, and one chunk of several of them as rows of a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from services.worker.engine.context import EngineContext
from services.worker.engine.kernel_passes import captures_whole
from services.worker.engine.planes import empty_planes
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import ALL_LAYERS
from services.worker.mixers.batch import (
    CaptureBatch,
    LinearCarry,
    LinearPlane,
    LinearSnapshot,
    Mixer,
    WholeSegments,
)
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.columns import send_columns
from services.worker.ops.layout import BODY_ALIGNMENT, PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageTable

__all__ = ["CaptureProgress", "CaptureRows", "CapturedSegment", "PackedSegments"]


@dataclass(slots=True)
class CapturedSegment:
    """One segment on its way: its pages, page table and carries, and its planes: of the layers that are done with it, or all of
    them from the start of a pass that takes it whole.

    layers_done: layers that are done with all of its tokens; is_given_up: no more will be.
    """

    token_ids: tuple[int, ...]
    seam_window: int
    seam_pages: tuple[int, ...]
    body_pages: tuple[int, ...]
    table: PageTable
    write_slots: list[int]
    carries: list[LinearCarry] = field(default_factory=list)
    planes: list[LinearPlane] = field(default_factory=list)
    layers_done: int = 0
    is_given_up: bool = False

    @property
    def state(self) -> SegmentState:
        """What is there of it."""
        return SegmentState(self.token_ids, self.seam_window, self.planes, self.body_pages)


class CaptureProgress:
    """A capture as others see it who want its state before it is whole. Ask on the engine's thread.

    state: of which `layers_done` layers may be read, while somebody holds on to its pages.
    """

    def __init__(self, segment: CapturedSegment) -> None:
        self._segment = segment
        self.state = segment.state

    @property
    def layers_done(self) -> int:
        """Layers that will not change any more."""
        return self._segment.layers_done

    @property
    def is_given_up(self) -> bool:
        """No more layers will come."""
        return self._segment.is_given_up


@dataclass(frozen=True, slots=True)
class PackedSegments:
    """What a pass needs of a chunk of segments, worked out on the host: their tokens in order, a run a segment.

    seam_tokens: how many leading tokens of each run belong to the seam window; base: the position of the segments' first token.
    """

    walk: PartWalk
    seam_tokens: tuple[int, ...]
    token_ids: Sequence[int]
    positions: Sequence[int]
    write_slots: Sequence[int]
    tables: Sequence[PageTable]
    base: int

    @classmethod
    def of(cls, segments: Sequence[CapturedSegment], runs: Sequence[range], base: int) -> "PackedSegments":
        """Tokens `runs` of every segment."""
        placed = list(zip(segments, runs, strict=True))
        cu_runs = (0, *accumulate(len(run) for run in runs))
        return cls(
            walk=PartWalk(cu_runs, tuple(range(len(cu_runs)))),
            seam_tokens=tuple(min(max(segment.seam_window - run.start, 0), len(run)) for segment, run in placed),
            token_ids=[token for segment, run in placed for token in segment.token_ids[run.start : run.stop]],
            positions=[base + token for run in runs for token in run],
            write_slots=[slot for segment, run in placed for slot in segment.write_slots[run.start : run.stop]],
            tables=[segment.table for segment in segments],
            base=base,
        )

    def queries(self, positions: torch.Tensor) -> PagedQueries:
        """Over positions on the device."""
        return PagedQueries(positions, self.walk.cu_runs, self.tables, on_host=self.positions)

    @property
    def firsts(self) -> list[int]:
        """The first token of every body."""
        return [start + seam for start, seam in zip(self.walk.cu_runs, self.seam_tokens, strict=False)]

    @property
    def counts(self) -> list[int]:
        """The tokens of every body."""
        return [end - first for first, end in zip(self.firsts, self.walk.cu_runs[1:], strict=True)]


class CaptureRows:
    """One chunk of several segments, packed. See `Rows`. tokens: which of every segment; prime: what they start from.

    Behind the mixer of a layer, the layer's planes of segments that end in this chunk are there for rows after these.
    """

    hidden: torch.Tensor
    _batch: CaptureBatch

    def __init__(
        self, context: EngineContext, segments: Sequence[CapturedSegment], tokens: range, prime: PrefixState | None
    ) -> None:
        self._context = context
        self._segments = segments
        self._runs = [range(tokens.start, min(tokens.stop, len(segment.token_ids))) for segment in segments]
        self._prime = prime
        self._ended = [
            segment for segment, run in zip(segments, self._runs, strict=True) if run.stop == len(segment.token_ids)
        ]

    @property
    def num_tokens(self) -> int:
        """See `Rows`."""
        return sum(len(run) for run in self._runs)

    @property
    def num_layers(self) -> int:
        """See `Rows`."""
        return ALL_LAYERS

    @cached_property
    def is_whole(self) -> bool:
        """The chunk holds its segments whole, and kernels leave their planes: it may be recorded."""
        begins = all(run.start == 0 for run in self._runs)
        return begins and len(self._ended) == len(self._segments) and captures_whole(self._context)

    @cached_property
    def packed(self) -> PackedSegments:
        """On the host."""
        base = 0 if self._prime is None else len(self._prime.token_ids)
        return PackedSegments.of(self._segments, self._runs, base)

    @cached_property
    def begin(self) -> Sequence[LinearSnapshot]:
        """With what every linear layer begins a segment."""
        if self._prime is not None:
            return self._prime.snapshots
        return [
            LinearSnapshot(torch.zeros_like(slots.states[0]), torch.zeros_like(slots.tails[0]))
            for slots in self._context.memory.linear_slots
        ]

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Where the planes of whole segments are to lie, `[layers, segments, 4]`; makes room for them."""
        for segment in self._segments:
            segment.planes[:] = segment.planes or empty_planes(self._context)
        addresses = [
            [[tensor.data_ptr() for tensor in plane.tensors] for plane in segment.planes] for segment in self._segments
        ]
        return np.array(addresses, dtype=np.int64).swapaxes(0, 1)

    def note_done(self, layers: int) -> None:
        """A recorded pass is through so many layers."""
        for segment in self._ended:
            segment.layers_done = layers

    def start(self) -> None:
        """See `Rows`."""
        if not self.is_whole:
            for segment, run in self._placed():
                if run.start == 0:
                    segment.carries = [LinearCarry(first.state, first.tail) for first in self.begin]
        packed, device = self.packed, self._context.device
        columns: list[ArrayLike] = [packed.token_ids, packed.positions, packed.write_slots]
        if self.is_whole:
            columns += [self.targets.ravel(), packed.firsts, packed.counts]
        token_ids, positions, write_slots, *whole = send_columns(columns, device, torch.int64)
        self._batch = CaptureBatch(
            walk=packed.walk,
            seam_tokens=packed.seam_tokens,
            queries=packed.queries(positions),
            base=packed.base,
            write_slots=write_slots,
            carries=[segment.carries for segment in self._segments],
            whole=self._whole(*whole) if self.is_whole else None,
        )
        self.hidden = self._context.model.embed(token_ids)

    def _whole(self, targets: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> WholeSegments:
        is_aligned = bool((self.targets % BODY_ALIGNMENT == 0).all())
        return WholeSegments(self.begin, targets.view(self.targets.shape), is_aligned, firsts, counts)

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`; advances the segments' carries."""
        mixed = mixer.capture(normed, self._batch)
        if isinstance(mixer, LinearMixer) and not self.is_whole:
            self._finish_layer(mixer)
        for segment in self._ended:
            segment.layers_done += 1
        return mixed

    def _finish_layer(self, mixer: LinearMixer) -> None:
        """The planes of segments that end here, together."""
        if self._ended:
            carries = [segment.carries[mixer.slots.index] for segment in self._ended]
            planes = mixer.finish(carries, [self.packed.base + segment.seam_window for segment in self._ended])
            for segment, plane in zip(self._ended, planes, strict=True):
                segment.planes.append(plane.stored_as(self._context.profile.encoding))

    def _placed(self) -> Iterator[tuple[CapturedSegment, range]]:
        return zip(self._segments, self._runs, strict=True)
