"""Sweeps on a GPU, recorded once for rows of about one size and replayed: one launch for several layers.

A layer of a combine is some thirty small launches, one of a capture as many, which cost the host more time than the device.
`fixed_batches.py` has what changes from pass to pass.
"""

import logging
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from services.worker.engine.capture_rows import CaptureRows
from services.worker.engine.combine import CombineRows
from services.worker.engine.context import EngineContext
from services.worker.engine.fixed_batches import FixedCapture, FixedCombine, capture_room, combine_room
from services.worker.engine.kernel_passes import runs_kernel_passes
from services.worker.engine.recorder import Recorder, Recording, create_recorder
from services.worker.engine.sweep import Rows, Sweep
from services.worker.mixers.batch import Mixer
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.layout import WalkRoom
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.launch import fixed_launches

__all__ = ["RECORDED_PASSES", "RECORDED_TOKENS", "SweepGraphs", "SweepRoom", "choose_sweep_graphs", "room_of"]

_log = logging.getLogger(__name__)

# Rows beyond which the device takes longer than the host needs for its launches.
RECORDED_TOKENS = 6144
# Layers of one recorded piece, save the first: between pieces the engine may do something else.
_LAYERS = 5
RECORDED_PASSES = 32

_Members = tuple[CaptureRows | CombineRows, ...]


@dataclass(frozen=True, slots=True)
class SweepRoom:
    """What a sweep is recorded with room for: of captures, and of the prompts behind them, None without any."""

    captured: WalkRoom | None
    combined: WalkRoom | None

    @property
    def tokens(self) -> int:
        """Rows."""
        return sum(room.tokens for room in (self.captured, self.combined) if room is not None)


def room_of(members: _Members, of_channels: bool) -> SweepRoom:
    """Few different rooms serve rows of all sizes."""
    captured = next((capture_room(rows, of_channels) for rows in members if isinstance(rows, CaptureRows)), None)
    prompts = (rows for rows in members if isinstance(rows, CombineRows))
    combined = next((combine_room(rows, of_channels, captured is not None) for rows in prompts), None)
    return SweepRoom(captured, combined)


def choose_sweep_graphs(context: EngineContext) -> "SweepGraphs | None":
    """Recorded sweeps where kernels run all of them."""
    return SweepGraphs(context, create_recorder(context)) if runs_kernel_passes(context) else None


def _members(rows: Sequence[Rows]) -> _Members | None:
    """What can be recorded: prompts, whole segments, or such segments ahead of such prompts."""
    members = tuple(one for one in rows if isinstance(one, CaptureRows | CombineRows))
    kinds = [isinstance(one, CombineRows) for one in members]
    is_known = len(members) == len(rows) and kinds in ([True], [False], [False, True])
    is_recordable = all(one.is_recordable if isinstance(one, CombineRows) else one.is_whole for one in members)
    return members if is_known and is_recordable else None


def _ahead_of_attention(context: EngineContext) -> int:
    """Layers ahead of the first one that reads page tables."""
    kinds = [isinstance(layer.mixer, LinearMixer) for layer in context.model.layers]
    return kinds.index(False) if False in kinds else len(kinds)


def _cut_layers(num_ahead: int, count: int) -> list[range]:
    """The layers of every piece."""
    ahead = [range(num_ahead)] if num_ahead else []
    return ahead + [range(first, min(first + _LAYERS, count)) for first in range(num_ahead, count, _LAYERS)]


_Own = TypeVar("_Own", contravariant=True)
_Batch = TypeVar("_Batch")


class _Fixed(Protocol[_Own, _Batch]):
    """`FixedCombine` or `FixedCapture`, each over rows and batches of its own kind."""

    token_ids: torch.Tensor

    @property
    def queries(self) -> PagedQueries: ...

    def refill(self, rows: _Own) -> None: ...

    def asked(self, rows: _Own) -> PagedQueries: ...

    def over(self, queries: PagedQueries) -> _Batch: ...

    def mix(self, mixer: Mixer, normed: torch.Tensor, batch: _Batch) -> torch.Tensor: ...

    def kept(self, batch: _Batch) -> list[torch.Tensor]: ...

    def end(self, rows: _Own, hidden: torch.Tensor, kept: Sequence[torch.Tensor]) -> None: ...

    def note_done(self, rows: _Own, layers: int) -> None: ...


_AnyFixed = _Fixed[Any, Any]


class _Pass:
    """Fixed batches one behind the other; queries: of each, over its fixed positions."""

    def __init__(self, fixed: Sequence[_AnyFixed], queries: Sequence[PagedQueries]) -> None:
        self.fixed = fixed
        self.queries = queries
        self.sizes = [len(one.token_ids) for one in fixed]

    def batches(self) -> list[Any]:
        """With nothing kept yet."""
        return [one.over(queries) for one, queries in zip(self.fixed, self.queries, strict=True)]

    def embed(self, context: EngineContext) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` ahead of the first layer."""
        ids = [one.token_ids for one in self.fixed]
        return context.model.embed(ids[0] if len(ids) == 1 else torch.cat(ids))

    def run(self, context: EngineContext, layers: range, hidden: torch.Tensor, batches: Sequence[Any]) -> torch.Tensor:
        """Hidden states behind some layers."""

        def mix(mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
            placed = zip(self.fixed, normed.split(self.sizes), batches, strict=True)
            mixed = [one.mix(mixer, own, batch) for one, own, batch in placed]
            return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

        for index in layers:
            hidden = context.model.layers[index].run(hidden, mix)
        return hidden

    def kept(self, batches: Sequence[Any]) -> list[torch.Tensor]:
        """What the layers that have run keep."""
        return [tensor for one, batch in zip(self.fixed, batches, strict=True) for tensor in one.kept(batch)]

    def end(self, members: _Members, hidden: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
        """Hand the rows what the pass leaves."""
        for one, rows, own in zip(self.fixed, members, hidden.split(self.sizes), strict=True):
            one.end(rows, own, kept)

    def note_done(self, members: _Members, layers: int) -> None:
        """So many layers are behind all rows."""
        for one, rows in zip(self.fixed, members, strict=True):
            one.note_done(rows, layers)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """pieces: of some layers each, with what they keep."""

    own: _Pass
    pieces: Sequence[Recording]

    def kept(self) -> list[torch.Tensor]:
        """Over all pieces."""
        return [tensor for piece in self.pieces for tensor in piece.outputs]

    def refill_tables(self, members: _Members) -> bool:
        """Take over other rows' page tables, which `refill` leaves; False where there is no room for them."""
        return all(
            launch.refresh(asked)
            for one, rows, queries in zip(self.own.fixed, members, self.own.queries, strict=True)
            for asked in (one.asked(rows),)
            for launch in fixed_launches(queries).values()
        )


class SweepGraphs:
    """Recorded sweeps, the least recently used first. One of them runs at a time; what comes meanwhile is a sweep.

    A room that is met for the first time is a sweep like any other; the second time it runs over tensors that keep their
    place, which compiles and loads every kernel, and is recorded. Recording runs nothing, so no state moves; where it fails,
    rooms are sweeps from then on. Between pieces hidden states stand in one tensor that all recordings share.
    """

    def __init__(self, context: EngineContext, recorder: Recorder) -> None:
        self._context = context
        self._recorder = recorder
        self._recorded: OrderedDict[SweepRoom, _Recorded | None] = OrderedDict()
        self._is_given_up = False
        self._is_busy = False
        self._hidden: torch.Tensor | None = None
        self._num_ahead = _ahead_of_attention(context)
        self._pieces = _cut_layers(self._num_ahead, len(context.model.layers))
        self._of_channels = context.model.linear_mixers[0].projection.decays_channels

    def run(self, rows: Sequence[Rows]) -> Generator[None, None, None]:
        """As `Sweep.run`; what is too large, lies as no wide load wants it, or is new, is a sweep."""
        members = None if self._is_busy or self._is_given_up else _members(rows)
        room = None if members is None else room_of(members, self._of_channels)
        if members is None or room is None or room.tokens > RECORDED_TOKENS or not self._has_met(room):
            yield from Sweep(self._context, rows).run()
            return
        if not all(_takes(one) for one in members):
            yield from Sweep(self._context, rows).run()
            return
        self._is_busy = True
        try:
            recorded = self._recorded[room]
            if recorded is None or not (yield from self._replay(recorded, members)):
                yield from self._run_and_record(room, members)
        finally:
            self._is_busy = False

    def _has_met(self, room: SweepRoom) -> bool:
        """Whether a room came before; from now on it has."""
        is_known = room in self._recorded
        self._recorded.setdefault(room, None)
        self._recorded.move_to_end(room)
        if len(self._recorded) > RECORDED_PASSES:
            self._recorded.popitem(last=False)
        return is_known

    def _replay(self, recorded: _Recorded, members: _Members) -> Generator[None, None, bool]:
        """False where page tables have outgrown the recorded ones; slots may have moved by then, and planes been written.

        While the device runs the layers ahead of the first attention layer, the host works out the tables.
        """
        own = recorded.own
        for fixed, rows in zip(own.fixed, members, strict=True):
            fixed.refill(rows)
        has_tables = False
        for layers, piece in zip(self._pieces, recorded.pieces, strict=True):
            if not has_tables and layers.stop > self._num_ahead:
                has_tables = recorded.refill_tables(members)
                if not has_tables:
                    return False
            piece.replay()
            if has_tables:
                own.note_done(members, layers.stop)
            for _ in layers:
                yield
        own.note_done(members, self._pieces[-1].stop)
        own.end(members, self._held(own), recorded.kept())
        return True

    def _run_and_record(self, room: SweepRoom, members: _Members) -> Generator[None, None, None]:
        fixed = self._create(room, members)
        for one, rows in zip(fixed, members, strict=True):
            one.refill(rows)
        asked = [replace(one.asked(rows), is_fixed=True, prepared={}) for one, rows in zip(fixed, members, strict=True)]
        running = _Pass(fixed, asked)
        batches, hidden = running.batches(), running.embed(self._context)
        for index in range(len(self._context.model.layers)):
            hidden = running.run(self._context, range(index, index + 1), hidden, batches)
            running.note_done(members, index + 1)
            yield
        running.end(members, hidden, running.kept(batches))
        try:
            self._recorded[room] = yield from self._record(running)
        except Exception:  # whatever a device refuses to record, the rows have their result
            _log.exception("sweeps could not be recorded; they run as they are from now on")
            self._is_given_up = True

    def _create(self, room: SweepRoom, members: _Members) -> list[_AnyFixed]:
        fixed: list[_AnyFixed] = []
        for rows in members:
            if isinstance(rows, CaptureRows) and room.captured is not None:
                fixed.append(FixedCapture(self._context, room.captured, self._of_channels, rows))
            elif room.combined is not None:
                fixed.append(FixedCombine(self._context, room.combined, self._of_channels))
        return fixed

    def _record(self, asked: _Pass) -> Generator[None, None, _Recorded]:
        """Yields after every piece."""
        # The page tables of the rows that are there do not live as long as the graphs.
        queries = [
            replace(one.queries, prepared={**fixed_launches(own)})
            for one, own in zip(asked.fixed, asked.queries, strict=True)
        ]
        own, pieces = _Pass(asked.fixed, queries), list[Recording]()
        self._held(own)
        for layers in self._pieces:
            pieces.append(self._recorder.record(partial(self._run_piece, layers, own)))
            yield
        return _Recorded(own, pieces)

    def _run_piece(self, layers: range, own: _Pass) -> list[torch.Tensor]:
        """Layers behind those of the piece before; returns state and tail of all that is kept."""
        batches, held = own.batches(), self._held(own)
        hidden = own.run(self._context, layers, own.embed(self._context) if layers.start == 0 else held, batches)
        held.copy_(hidden)
        return own.kept(batches)

    def _held(self, own: _Pass) -> torch.Tensor:
        """Where hidden states stand between pieces."""
        if self._hidden is None:
            like = own.embed(self._context)
            self._hidden = like.new_empty(RECORDED_TOKENS, like.shape[1])
        return self._hidden[: sum(own.sizes)]


def _takes(rows: CaptureRows | CombineRows) -> bool:
    return FixedCapture.takes(rows) if isinstance(rows, CaptureRows) else FixedCombine.takes(rows)
