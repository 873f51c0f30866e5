"""Where the tokens of one prompt stand under one setting: live runs, stored bodies, refreshed blocks, page rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from eval.capture import MIN_BODY, CapturedSegment, Planes, body_end, page_end
from eval.prompts import EvalPrompt
from eval.rig import PAGE_TOKENS, Rig
from eval.settings import Mode, Setting
from services.worker.engine.refresh import Refreshed, Side, sides_of
from services.worker.engine.states import page_rows
from services.worker.mixers.batch import LinearPlane
from services.worker.ops.paged_attention import PageRow

__all__ = ["Layout", "Part", "SideRun", "lay_out"]


@dataclass(slots=True)
class Part:
    """`num_tokens` live tokens, then a stored body where there is one. keep: the state behind it is wanted."""

    num_tokens: int
    planes: Planes | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True)
class SideRun:
    """Tokens of a refreshed block with its replay, rows `[rows.start, rows.stop)` of the layout.

    It starts from the state behind part `part`, the head of a body with `planes`, of which `fraction` lies before it.
    """

    rows: range
    part: int
    planes: Planes
    fraction: float


@dataclass(slots=True)
class Layout:
    """One prompt under one setting. Token rows stand in order of position.

    main_rows: rows of the main walk, whose runs are `parts`; reserved: pages of the tokens that follow the prompt.
    """

    rig: Rig
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    write_slots: list[int] = field(default_factory=list)
    main_rows: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    sides: list[SideRun] = field(default_factory=list)
    rows: list[PageRow] = field(default_factory=list)
    length: int = 0
    live_document_tokens: int = 0
    reserved: range = range(0)

    def add_live(self, token_ids: Sequence[int]) -> None:
        """Tokens of the main walk; they join the run before them where nothing stands between."""
        self.main_rows.extend(range(len(self.token_ids), len(self.token_ids) + len(token_ids)))
        if not self.parts or self.parts[-1].planes is not None or self.parts[-1].keep:
            self.parts.append(Part(0))
        self.parts[-1].num_tokens += len(token_ids)
        self._place(token_ids, self.length, fresh_from=0)
        self.length += len(token_ids)

    def add_body(self, planes: Planes) -> None:
        """A stored body behind the last run; its page rows come apart."""
        if self.parts[-1].planes is not None or self.parts[-1].keep:
            self.parts.append(Part(0))
        self.parts[-1].planes = planes

    def add_stored_rows(self, segment: CapturedSegment, first: int, places: range, base: int) -> None:
        """Page rows of stored places of a segment that begins at position `first`; they begin where a page or a body does."""
        if places and places.start % PAGE_TOKENS:
            head = range(places.start, min(page_end(places.start), places.stop))
            pages = [segment.heads[places.start]]
            self.rows.extend(page_rows(pages, PAGE_TOKENS, base, first + head.start, len(head)))
            places = range(head.stop, places.stop)
        whole = segment.pages[places.start // PAGE_TOKENS :]
        self.rows.extend(page_rows(whole, PAGE_TOKENS, base, first + places.start, len(places)))

    def add_side(self, segment: CapturedSegment, first: int, body: range, side: Side) -> None:
        """A refreshed block: tokens before `side.fresh` only replay, and their keys are thrown away."""
        begin_row = len(self.token_ids)
        token_ids = segment.token_ids[side.begin : side.end]
        self._place(token_ids, first + side.begin, fresh_from=side.fresh - side.begin)
        rows = range(begin_row, begin_row + len(token_ids))
        planes = segment.planes[body.start, body.stop]
        self.sides.append(SideRun(rows, len(self.parts) - 1, planes, (side.begin - body.start) / len(body)))

    def reserve(self, num_tokens: int) -> None:
        """Pages for what follows the prompt."""
        self.reserved = self.rig.arena.take(num_tokens)

    def _place(self, token_ids: Sequence[int], first: int, fresh_from: int) -> None:
        self.token_ids.extend(token_ids)
        self.positions.extend(range(first, first + len(token_ids)))
        for begin, end in ((0, fresh_from), (fresh_from, len(token_ids))):
            pages = self.rig.arena.take(end - begin)
            slot = pages.start * PAGE_TOKENS
            self.write_slots.extend(range(slot, slot + end - begin))
            if begin == fresh_from:
                self.rows.extend(page_rows(pages, PAGE_TOKENS, 0, first + begin, end - begin))


def lay_out(
    rig: Rig,
    prompt: EvalPrompt,
    setting: Setting,
    segments: Sequence[CapturedSegment],
    refreshed: Refreshed | None,
    reserve: int,
) -> Layout:
    """A prompt under a setting. `segments` is empty for modes that recompute; `exact` holds the opening alone."""
    layout = Layout(rig)
    layout.add_live(prompt.opening)
    if setting.mode is Mode.EXACT:
        layout.live_document_tokens = prompt.document_tokens
        layout.reserve(prompt.document_tokens + len(prompt.closing) + reserve)
        return layout
    if setting.mode is Mode.OFF:
        for document in prompt.documents:
            _add_live_document(layout, document)
    elif setting.mode is Mode.TAIL_REPLAY:
        _add_replayed_tail(layout, prompt, setting, segments)
    elif setting.mode is Mode.COMPOSE:
        for index, segment in enumerate(segments):
            _add_composed(layout, setting, segment, index, refreshed)
    else:
        for index, segment in enumerate(segments):
            _add_ablated(layout, setting.mode, segment, last=index == len(segments) - 1)
    layout.add_live(prompt.closing)
    layout.reserve(reserve)
    return layout


def _add_live_document(layout: Layout, document: Sequence[int]) -> None:
    layout.add_live(document)
    layout.live_document_tokens += len(document)


def _add_composed(
    layout: Layout, setting: Setting, segment: CapturedSegment, index: int, refreshed: Refreshed | None
) -> None:
    length = len(segment.token_ids)
    seam, end = setting.seam_window.tokens(length), body_end(length, setting.tail_tokens)
    if end - seam < MIN_BODY or (refreshed is not None and index in refreshed.whole):
        _add_live_document(layout, segment.token_ids)
        return
    first = layout.length
    layout.add_live(segment.token_ids[:seam])
    replay = 0 if setting.refresh is None else setting.refresh.replay_tokens
    sides = [] if refreshed is None else sides_of(refreshed.blocks[index], range(seam, end), replay)
    if sides:
        # The state at the body's head is wanted, so the body is a part of its own.
        layout.parts[-1].keep = True
    place = seam
    for side in sides:
        layout.add_stored_rows(segment, first, range(place, side.fresh), first)
        layout.add_side(segment, first, range(seam, end), side)
        place = side.end
    layout.add_stored_rows(segment, first, range(place, end), first)
    layout.add_body(segment.planes[seam, end])
    layout.length = first + end
    if end < length:
        layout.add_live(segment.token_ids[end:])
    layout.live_document_tokens += seam + length - end + sum(side.end - side.begin for side in sides)


def _add_ablated(layout: Layout, mode: Mode, segment: CapturedSegment, last: bool) -> None:
    """A whole segment as stored, with the state composed as the ablation says."""
    first, length = layout.length, len(segment.token_ids)
    if length < MIN_BODY:
        _add_live_document(layout, segment.token_ids)
        return
    planes = segment.planes[0, length]
    if mode is Mode.ADDITION:
        planes = tuple(_with_transition(plane, _identity(plane)) for plane in planes)
    elif mode is Mode.LAST_STATE and last:
        planes = tuple(_with_transition(plane, torch.zeros_like(plane.transition)) for plane in planes)
    base = 0 if mode in (Mode.ADDITION, Mode.TRANSITION) else first
    layout.add_body(planes)
    layout.add_stored_rows(segment, first, range(length), base)
    layout.length += length


def _add_replayed_tail(
    layout: Layout, prompt: EvalPrompt, setting: Setting, segments: Sequence[CapturedSegment]
) -> None:
    """Stored keys everywhere, nothing in the state, then the last tokens before the question run through."""
    replayed = round(setting.replay_share * (len(prompt.opening) + prompt.document_tokens))
    behind = prompt.document_tokens
    emptied = False
    for segment in segments:
        length = len(segment.token_ids)
        behind -= length
        cut = min(length, max(0, length - (replayed - behind))) // PAGE_TOKENS * PAGE_TOKENS
        cut = length if behind >= replayed else cut
        layout.add_stored_rows(segment, layout.length, range(cut), layout.length)
        layout.length += cut
        if cut < length:
            if not emptied:
                planes = segment.planes[0, length]
                layout.add_body(tuple(_emptied(plane) for plane in planes))
                emptied = True
            layout.add_live(segment.token_ids[cut:])
            layout.live_document_tokens += length - cut


def _with_transition(plane: LinearPlane, transition: torch.Tensor) -> LinearPlane:
    return LinearPlane(transition, plane.end_state, plane.tail, plane.decay)


def _identity(plane: LinearPlane) -> torch.Tensor:
    size = plane.transition.shape[-1]
    return torch.eye(size, device=plane.transition.device).expand_as(plane.transition)


def _emptied(plane: LinearPlane) -> LinearPlane:
    return LinearPlane(
        *(torch.zeros_like(part) for part in (plane.transition, plane.end_state, plane.tail, plane.decay))
    )
