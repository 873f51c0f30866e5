"""Combines on a GPU, recorded once for prompts of about one size and replayed: one launch for several layers.

A layer of a combine is some thirty small launches, which cost the host more time than the device. What changes from pass to
pass (positions, pages, slots, the order of chunks and bodies and where these lie) stands in tensors that keep their place; a
recorded pass has room for more tokens and parts than it was recorded with, and what is in the room reaches nothing else.
"""

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import torch

from services.worker.engine.combine import CombineRows
from services.worker.engine.context import EngineContext
from services.worker.engine.packed_prompts import BodyPlaces, locate_bodies
from services.worker.engine.recorder import Recorder, Recording, create_recorder
from services.worker.engine.sweep import Sweep
from services.worker.mixers.batch import CombineBatch, LinearSnapshot
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.columns import FixedColumns
from services.worker.ops.device import has_kernels
from services.worker.ops.layout import PartWalk, PassAddresses, WalkRoom
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.dispatch import takes_kernel
from services.worker.ops.paged_attention.launch import fixed_launches
from services.worker.ops.recurrence.chunks import walk_chunk_tokens

__all__ = ["RECORDED_PASSES", "RECORDED_TOKENS", "CombineGraphs", "choose_combine_graphs", "room_of"]

_log = logging.getLogger(__name__)

# Live tokens beyond which the device takes longer than the host needs for its launches.
RECORDED_TOKENS = 4096
# Layers of one recorded piece, save the first: between pieces the engine may do something else.
_LAYERS = 5
RECORDED_PASSES = 24


def room_of(rows: CombineRows, of_channels: bool) -> WalkRoom:
    """What a pass is recorded with room for: few different rooms serve prompts of all sizes."""
    packed, tokens = rows.packed, rows.num_tokens
    runs = [len(run.token_ids) for run in packed.runs]
    chunk_tokens = walk_chunk_tokens(runs, of_channels)
    return WalkRoom(
        tokens=_up(tokens, 64 if tokens <= 1024 else 256),
        parts=_up(len(runs), 16),
        chunks=_up(sum(-(-run // chunk_tokens) for run in runs), 16),
        requests=len(packed.slots),
        kept=len(packed.keep_after),
        chunk_tokens=chunk_tokens,
    )


def _up(count: int, step: int) -> int:
    return -(-max(1, count) // step) * step


def choose_combine_graphs(context: EngineContext) -> "CombineGraphs | None":
    """Recorded combines where kernels run all of them, alike in every layer."""
    mixers, page_tokens = context.model.linear_mixers, context.pages.page_size
    kinds = {
        (mixer.projection.decays_channels, mixer.projection.erases, mixer.shape.conv_taps, mixer.shape.key_dim)
        for mixer in mixers
    }
    takes_attention = all(
        takes_kernel(context.device, shape.key_dim, page_tokens, shape.latent_dim) for shape in context.model.spec.pages
    )
    if not (has_kernels(context.device) and len(kinds) == 1 and takes_attention):
        return None
    return CombineGraphs(context, create_recorder(context))


def _ahead_of_attention(context: EngineContext) -> int:
    """Layers ahead of the first one that reads page tables."""
    kinds = [isinstance(layer.mixer, LinearMixer) for layer in context.model.layers]
    return kinds.index(False) if False in kinds else len(kinds)


def _cut_layers(num_ahead: int, count: int) -> list[range]:
    """The layers of every piece."""
    ahead = [range(num_ahead)] if num_ahead else []
    return ahead + [range(first, min(first + _LAYERS, count)) for first in range(num_ahead, count, _LAYERS)]


class _Fixed:
    """The batch of one room, over tensors that keep their place. `refill` makes it that of other prompts.

    Behind their tokens stand numbers that exist, of rows that no part has.
    """

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
        self.batch = CombineBatch(
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
            walk.prepare(self.batch.walk)

    def refill(self, rows: CombineRows, places: BodyPlaces) -> None:
        """Take over everything of other prompts but what attention has prepared; the rows go on over these tensors."""
        packed, batch = rows.packed, self.batch
        table = np.zeros(self._places, dtype=np.int64)
        table[..., : places.table.shape[-1]] = places.table
        self._columns.refill(
            (
                packed.token_ids, packed.positions, packed.write_slots, packed.slots, packed.is_fresh, packed.last_rows,
                table.ravel(), places.positions,
            )
        )  # fmt: skip
        self._is_fresh.copy_(self._is_fresh_column)
        stored = [run.state is not None for run in packed.runs]
        for walk in self._walks:
            walk.refill(packed.walk, stored, sorted(packed.keep_after))
        rows.batch = packed.batch(
            packed.queries(batch.queries.positions), batch.write_slots, batch.slots, self._is_fresh
        )
        rows.last_rows = self._last_rows

    def over(self, queries: PagedQueries) -> CombineBatch:
        """The batch with other queries over the same positions, and nothing kept yet."""
        return replace(self.batch, queries=queries, kept={})


@dataclass(frozen=True, slots=True)
class _Recorded:
    """pieces: of some layers each, with the hidden states `[tokens, hidden]` behind them and what they keep."""

    fixed: _Fixed
    queries: PagedQueries
    pieces: Sequence[Recording]

    @property
    def hidden(self) -> torch.Tensor:
        """Behind the last layer."""
        return self.pieces[-1].outputs[0]

    def kept(self, count: int) -> dict[int, list[LinearSnapshot]]:
        """The snapshots of every linear layer behind `count` kept parts."""
        flat = [tensor for piece in self.pieces for tensor in piece.outputs[1:]]
        snapshots = [LinearSnapshot(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)]
        return {part: snapshots[part::count] for part in range(count)}

    def refill_tables(self, rows: CombineRows) -> bool:
        """Take over other prompts' page tables, which `_Fixed.refill` leaves; False where there is no room for them."""
        return all(launch.refresh(rows.batch.queries) for launch in fixed_launches(self.queries).values())


class CombineGraphs:
    """The recorded combines of one engine, the least recently used first. One pass runs at a time.

    A room that is met for the first time is a sweep like any other; the second time it runs over tensors that keep their
    place, which compiles and loads every kernel, and is recorded. Recording runs nothing, so no state moves; where it fails,
    rooms are sweeps from then on.
    """

    def __init__(self, context: EngineContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder
        self._recorded: OrderedDict[WalkRoom, _Recorded | None] = OrderedDict()
        self._is_given_up = False
        self._num_ahead = _ahead_of_attention(context)
        self._pieces = _cut_layers(self._num_ahead, len(context.model.layers))
        self._of_channels = context.model.linear_mixers[0].projection.decays_channels

    def run(self, rows: CombineRows) -> Generator[None, None, None]:
        """As `Sweep.run` of these rows alone; what is too large, lies as no wide load wants it, or is new, is a sweep."""
        room = room_of(rows, self._of_channels)
        if room.tokens > RECORDED_TOKENS or self._is_given_up or not self._has_met(room):
            yield from Sweep(self._context, [rows]).run()
            return
        places, recorded = locate_bodies(self._context, rows.packed), self._recorded[room]
        if places is None or not places.is_aligned:
            yield from Sweep(self._context, [rows]).run()
        elif recorded is None or not (yield from self._replay(recorded, rows, places)):
            yield from self._run_and_record(room, rows, places)

    def _has_met(self, room: WalkRoom) -> bool:
        """Whether a room came before; from now on it has."""
        is_known = room in self._recorded
        self._recorded.setdefault(room, None)
        self._recorded.move_to_end(room)
        if len(self._recorded) > RECORDED_PASSES:
            self._recorded.popitem(last=False)
        return is_known

    def _replay(self, recorded: _Recorded, rows: CombineRows, places: BodyPlaces) -> Generator[None, None, bool]:
        """False where page tables have outgrown the recorded ones; slots may have moved by then.

        While the device runs the layers ahead of the first attention layer, the host works out the tables.
        """
        rows.load_slots()
        recorded.fixed.refill(rows, places)
        has_tables = False
        for layers, piece in zip(self._pieces, recorded.pieces, strict=True):
            if not has_tables and layers.stop > self._num_ahead:
                has_tables = recorded.refill_tables(rows)
                if not has_tables:
                    return False
            piece.replay()
            for _ in layers:
                yield
        rows.hidden = recorded.hidden
        rows.batch.kept = _by_part(recorded.kept(len(rows.batch.keep_after)), rows.batch)
        return True

    def _run_and_record(self, room: WalkRoom, rows: CombineRows, places: BodyPlaces) -> Generator[None, None, None]:
        fixed = _Fixed(self._context, room, self._of_channels)
        rows.load_slots()
        fixed.refill(rows, places)
        queries = replace(rows.batch.queries, is_fixed=True, prepared={})
        batch = fixed.over(queries)
        hidden = self._context.model.embed(fixed.token_ids)
        for index in range(len(self._context.model.layers)):
            hidden = self._run_layers(range(index, index + 1), hidden, batch)
            yield
        rows.hidden, rows.batch.kept = hidden, _by_part(batch.kept, rows.batch)
        try:
            self._recorded[room] = yield from self._record(fixed, queries)
        except Exception:  # whatever a device refuses to record, the prompts have their result
            _log.exception("combines could not be recorded; they run as they are from now on")
            self._is_given_up = True

    def _record(self, fixed: _Fixed, asked: PagedQueries) -> Generator[None, None, _Recorded]:
        """Yields after every piece."""
        # The page tables of the prompts that are there do not live as long as the graphs.
        queries = replace(fixed.batch.queries, prepared={**fixed_launches(asked)})
        pieces: list[Recording] = []
        for layers in self._pieces:
            before = pieces[-1].outputs[0] if pieces else None
            pieces.append(self._recorder.record(partial(self._run_piece, layers, before, fixed, queries)))
            yield
        return _Recorded(fixed, queries, pieces)

    def _run_piece(
        self, layers: range, before: torch.Tensor | None, fixed: _Fixed, queries: PagedQueries
    ) -> list[torch.Tensor]:
        """Layers behind the hidden states of those before; returns theirs, then state and tail of all that is kept."""
        batch = fixed.over(queries)
        hidden = self._context.model.embed(fixed.token_ids) if before is None else before
        hidden = self._run_layers(layers, hidden, batch)
        layered = zip(*(batch.kept.get(part, ()) for part in sorted(batch.keep_after)), strict=True)
        return [hidden, *(tensor for kept in layered for one in kept for tensor in (one.state, one.tail))]

    def _run_layers(self, layers: range, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        for index in layers:
            hidden = self._context.model.layers[index].run(hidden, lambda mixer, normed: mixer.combine(normed, batch))
        return hidden


def _by_part(kept: dict[int, list[LinearSnapshot]], batch: CombineBatch) -> dict[int, list[LinearSnapshot]]:
    """What a recorded pass keeps in order, by the parts of these prompts."""
    return {part: kept[index] for index, part in enumerate(sorted(batch.keep_after))}
