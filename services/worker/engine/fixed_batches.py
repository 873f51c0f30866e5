"""Batches over tensors that keep their place, for passes that are recorded once and replayed.

What changes from pass to pass (positions, pages, slots, the order of chunks and bodies and where these lie) stands in columns
with room for more tokens and parts than there were when it was recorded. Behind their content stand numbers that exist, of rows
that nobody has: what is in the room reaches nothing else.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from services.worker.engine.capture_rows import CaptureRows
from services.worker.engine.combine import CombineRows
from services.worker.engine.context import EngineContext
from services.worker.mixers.batch import CaptureBatch, CombineBatch, LinearSnapshot, Mixer, WholeSegments
from services.worker.ops.columns import FixedColumns
from services.worker.ops.layout import BODY_ALIGNMENT, BodyAddresses, PartWalk, PassAddresses, WalkRoom
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.recurrence.chunks import CHANNEL_CHUNK_TOKENS, CHUNK_TOKENS, walk_chunk_tokens

__all__ = ["FixedCapture", "FixedCombine", "capture_room", "combine_room"]


# Of a prompt's rows beside captures, and segments of one pass: fewer are recorded as so many.
_LEAST_BESIDE, _LEAST_SEGMENTS = 128, 4


def combine_room(rows: CombineRows, of_channels: bool, beside_captures: bool) -> WalkRoom:
    """What a combine is recorded with room for: few different rooms serve prompts of all sizes."""
    packed = rows.packed
    runs = [len(run.token_ids) for run in packed.runs]
    chunk_tokens, parts = walk_chunk_tokens(runs, of_channels), _up(len(runs), 16)
    tokens = _up(rows.num_tokens, _LEAST_BESIDE) if beside_captures else _up_by_a_quarter(rows.num_tokens, 64)
    return WalkRoom(
        tokens=tokens,
        parts=parts,
        # Every run ends in a chunk of its own.
        chunks=tokens // chunk_tokens + parts,
        requests=len(packed.slots),
        kept=len(packed.keep_after),
        chunk_tokens=chunk_tokens,
    )


def capture_room(rows: CaptureRows, of_channels: bool) -> WalkRoom:
    """What captures are recorded with room for; requests: segments."""
    segments = max(_LEAST_SEGMENTS, len(rows.packed.seam_tokens))
    chunk_tokens = CHANNEL_CHUNK_TOKENS if of_channels else CHUNK_TOKENS
    room, requests = _up(rows.num_tokens, _step_captured(rows.num_tokens)), 1 << (segments - 1).bit_length()
    return WalkRoom(
        tokens=room,
        parts=requests,
        # A seam and a body end in a chunk of their own each.
        chunks=room // chunk_tokens + 2 * requests,
        requests=requests,
        kept=0,
        chunk_tokens=chunk_tokens,
    )


def _step_captured(tokens: int) -> int:
    """Recording costs more than computing what stands empty, which is a quarter of the tokens on average at most."""
    return 256 if tokens <= 1024 else 512 if tokens <= 2048 else 1024


def _up(count: int, step: int) -> int:
    return -(-max(1, count) // step) * step


def _up_by_a_quarter(count: int, least: int) -> int:
    """In steps of `least`, or a quarter of what stands below where that is more."""
    return _up(count, max(least, (1 << (max(1, count - 1).bit_length() - 1)) // 4))


class FixedCombine:
    """The live tokens of prompts in one room. `refill` makes it other prompts'."""

    def __init__(self, context: EngineContext, room: WalkRoom, of_channels: bool) -> None:
        from services.worker.ops.recurrence.triton import FixedWalk
        from services.worker.ops.recurrence.triton_compose import joins_bodies
        from services.worker.ops.short_conv.triton import FixedRows

        device, places = context.device, (len(context.model.linear_mixers), 3, room.parts)
        tokens, requests = room.tokens, room.requests
        self._columns = FixedColumns(
            (tokens, tokens, tokens, requests, requests, requests, prod(places), room.parts),
            (0, 0, -1, 0, 0, 0, 0, 0),
            device,
            torch.int64,
        )
        self.token_ids, positions, write_slots, slots, self._is_fresh_column, self._last_rows, table, body_positions = (
            self._columns.tensors
        )
        self._is_fresh = torch.zeros(requests, dtype=torch.bool, device=device)
        self._places = places
        mixer, history = context.model.linear_mixers[0], context.model.spec.conv_history
        joins = mixer.projection.erases and joins_bodies(context.memory.dtype, of_channels, mixer.shape.key_dim)
        self._walks: list[FixedWalk | FixedRows] = [FixedWalk(of_channels, room, device, joins)]
        if history:
            self._walks.append(FixedRows(history, room, device))
        self._batch = CombineBatch(
            walk=PartWalk((0, tokens), tuple(range(requests + 1))),
            queries=PagedQueries(positions, (), (), is_fixed=True),
            write_slots=write_slots,
            slots=slots,
            planes=(),
            body_positions=(),
            keep_after=frozenset(range(room.kept)),
            addresses=PassAddresses(table.view(places), is_aligned=True, positions=body_positions),
            is_fresh=self._is_fresh,
        )
        for walk in self._walks:
            walk.prepare(self._batch.walk)

    @staticmethod
    def takes(rows: CombineRows) -> bool:
        """Stored bodies lie as wide loads want them."""
        return rows.places is not None and rows.places.is_aligned

    @property
    def queries(self) -> PagedQueries:
        """Over the fixed positions, of no prompts."""
        return self._batch.queries

    def refill(self, rows: CombineRows) -> None:
        """Take over everything of other prompts but what attention has prepared; the rows go on over these tensors.

        Raises:
            ValueError: `takes` says no to them.
        """
        if rows.places is None:
            raise ValueError("stored bodies are not where kernels read them")
        rows.load_slots()
        packed, batch = rows.packed, self._batch
        table = np.zeros(self._places, dtype=np.int64)
        table[..., : rows.places.table.shape[-1]] = rows.places.table
        self._columns.refill(
            (
                packed.token_ids, packed.positions, packed.write_slots, packed.slots, packed.is_fresh, packed.last_rows,
                table.ravel(), rows.places.positions,
            )
        )  # fmt: skip
        self._is_fresh.copy_(self._is_fresh_column)
        stored = [run.state is not None for run in packed.runs]
        for walk in self._walks:
            walk.refill(packed.walk, stored, sorted(packed.keep_after))
        rows.batch = packed.batch(self.asked(rows), batch.write_slots, batch.slots, self._is_fresh)
        rows.last_rows = self._last_rows

    def asked(self, rows: CombineRows) -> PagedQueries:
        """The prompts' queries over the fixed positions."""
        return rows.packed.queries(self.queries.positions)

    def over(self, queries: PagedQueries) -> CombineBatch:
        """The batch with other queries over the same positions, and nothing kept yet."""
        return replace(self._batch, queries=queries, kept={})

    def mix(self, mixer: Mixer, normed: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """The pass's own part of a layer."""
        return mixer.combine(normed, batch)

    def kept(self, batch: CombineBatch) -> list[torch.Tensor]:
        """State and tail of all snapshots, layer by layer."""
        layered = zip(*(batch.kept.get(part, ()) for part in sorted(batch.keep_after)), strict=True)
        return [tensor for kept in layered for one in kept for tensor in (one.state, one.tail)]

    def end(self, rows: CombineRows, hidden: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
        """Hand the rows what a pass leaves."""
        parts = sorted(rows.batch.keep_after)
        snapshots = [LinearSnapshot(*pair) for pair in zip(kept[::2], kept[1::2], strict=True)]
        rows.hidden = hidden
        rows.batch.kept = {part: snapshots[place :: len(parts)] for place, part in enumerate(parts)}

    def note_done(self, rows: CombineRows, layers: int) -> None:
        """Nobody looks at prompts on their way."""


class FixedCapture:
    """Whole segments in one room. `refill` makes it other segments'."""

    def __init__(self, context: EngineContext, room: WalkRoom, of_channels: bool, first: CaptureRows) -> None:
        from services.worker.ops.recurrence.triton import FixedCaptures
        from services.worker.ops.short_conv.triton import FixedRows

        device, segments = context.device, room.requests
        self._targets = (len(context.model.linear_mixers), segments, 4)
        self._columns = FixedColumns(
            (room.tokens, room.tokens, room.tokens, prod(self._targets), segments, segments),
            (0, 0, -1, 0, 0, 0),
            device,
            torch.int64,
        )
        self.token_ids, positions, write_slots, targets, firsts, counts = self._columns.tensors
        self._course = FixedCaptures(of_channels, room, device)
        self._conv = FixedRows(context.model.spec.conv_history, room, device)
        nowhere = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self._batch = CaptureBatch(
            walk=PartWalk((*[0] * segments, room.tokens), tuple(range(segments + 1))),
            seam_tokens=(0,) * segments,
            queries=PagedQueries(positions, (), (), is_fixed=True),
            base=first.packed.base,
            write_slots=write_slots,
            whole=WholeSegments(
                begin=first.begin,
                targets=targets.view(self._targets),
                is_aligned=True,
                firsts=firsts,
                counts=counts,
                no_bodies=BodyAddresses(nowhere, is_aligned=True),
            ),
        )
        for walk in (self._course, self._conv):
            walk.prepare(self._batch.walk)

    @staticmethod
    def takes(rows: CaptureRows) -> bool:
        """Their planes lie as wide stores want them."""
        return bool((rows.targets % BODY_ALIGNMENT == 0).all())

    @property
    def queries(self) -> PagedQueries:
        """Over the fixed positions, of no segments."""
        return self._batch.queries

    def refill(self, rows: CaptureRows) -> None:
        """Take over everything of other segments but what attention has prepared."""
        packed = rows.packed
        targets = np.zeros(self._targets, dtype=np.int64)
        targets[:, : rows.targets.shape[1]] = rows.targets
        self._columns.refill(
            (
                packed.token_ids, packed.positions, packed.write_slots, targets.ravel(), packed.firsts, packed.counts
            )
        )  # fmt: skip
        self._course.refill(packed.walk.cu_runs, packed.seam_tokens)
        self._conv.refill(packed.walk, [False] * len(packed.seam_tokens), ())

    def asked(self, rows: CaptureRows) -> PagedQueries:
        """The segments' queries over the fixed positions."""
        return rows.packed.queries(self.queries.positions)

    def over(self, queries: PagedQueries) -> CaptureBatch:
        """The batch with other queries over the same positions."""
        return replace(self._batch, queries=queries)

    def mix(self, mixer: Mixer, normed: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """The pass's own part of a layer."""
        return mixer.capture(normed, batch)

    def kept(self, batch: CaptureBatch) -> list[torch.Tensor]:
        """Planes lie where they stay."""
        del batch
        return []

    def end(self, rows: CaptureRows, hidden: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
        """Hand the rows what a pass leaves."""
        del kept
        rows.hidden = hidden

    def note_done(self, rows: CaptureRows, layers: int) -> None:
        """Layers may be read."""
        rows.note_done(layers)
