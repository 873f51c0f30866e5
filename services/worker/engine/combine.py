"""The combine pass: composes stored states and runs the live tokens of one prompt through the model, layer by layer."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.states import PrefixState, SegmentState, page_rows
from services.worker.mixers.batch import CombineBatch
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageTable

__all__ = ["CombinePart", "CombinePass", "CombinePlan", "Prompt"]


@dataclass(frozen=True, slots=True)
class CombinePart:
    """One part as the pass sees it: live from `live_start` on for `live_ids`, then a stored body where there is one.

    keep: a snapshot is wanted behind this part.
    """

    token_ids: tuple[int, ...]
    state: SegmentState | None = None
    keep: bool = False

    @property
    def live_ids(self) -> tuple[int, ...]:
        """The tokens that run through the model."""
        return self.token_ids if self.state is None else self.token_ids[: self.state.seam_window]


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """A prompt to combine: an exact prefix, then parts; the last part is live. `max_tokens` pages are reserved behind it."""

    prefix: PrefixState | None
    parts: tuple[CombinePart, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.parts or not self.parts[-1].token_ids or self.parts[-1].state is not None:
            raise ValueError("the last part of a prompt is live and has at least one token")

    @property
    def prefix_tokens(self) -> int:
        """Tokens that the prefix covers."""
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    @property
    def num_live(self) -> int:
        """Tokens that run through the model."""
        return sum(len(part.live_ids) for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return self.prefix_tokens + sum(len(part.token_ids) for part in self.parts)

    def pages_needed(self, page_size: int) -> int:
        """Pages for live and generated tokens; each run starts a page of its own."""
        lengths = [len(run.token_ids) for run in _runs(self)]
        return sum(pages_for(length, page_size) for length in [*lengths[:-1], lengths[-1] + self.max_tokens])


@dataclass(slots=True)
class Prompt:
    """A combined prompt, ready to decode. Owns its slot, `owned` pages, and one reference to `shared` pages.

    spare: reserved pages behind the last live token; length: tokens so far, generated ones included.
    """

    slot: int
    table: PageTable
    owned: tuple[int, ...]
    shared: tuple[int, ...]
    spare: list[int]
    length: int

    def append_slot(self) -> int:
        """The flat page slot of the next token, entered into the page table."""
        last = self.table.rows[-1]
        if last.count < self.table.page_size:
            self.table.grow_last()
        else:
            self.table.extend(page_rows([self.spare.pop(0)], self.table.page_size, 0, self.length, 1))
        self.length += 1
        last = self.table.rows[-1]
        return last.page * self.table.page_size + last.count - 1

    def release(self, context: EngineContext) -> None:
        """Give back everything."""
        context.slots.release(self.slot)
        context.pages.release(self.owned)
        context.pages.release(self.shared)


@dataclass(frozen=True, slots=True)
class _Run:
    """Live tokens at true positions from `first` on; `part` is the index of the last part in it."""

    token_ids: tuple[int, ...]
    first: int
    part: int


def _runs(plan: CombinePlan) -> list[_Run]:
    """Live runs in order: neighbouring live parts join unless a snapshot stands between them."""
    runs: list[_Run] = []
    position = plan.prefix_tokens
    joinable = False
    for index, part in enumerate(plan.parts):
        if joinable:
            runs[-1] = _Run(runs[-1].token_ids + part.live_ids, runs[-1].first, index)
        else:
            runs.append(_Run(part.live_ids, position, index))
        joinable = part.state is None and not part.keep
        position += len(part.token_ids)
    return runs


class _Layout:
    """Where the live tokens of one prompt stand: pages, positions, and the order of runs and bodies."""

    def __init__(self, context: EngineContext, plan: CombinePlan, owned: Sequence[int]) -> None:
        self._size = context.pages.page_size
        self.table = PageTable(self._size)
        self.positions: list[int] = []
        self.write_slots: list[int] = []
        self.rows_after: dict[int, int] = {}
        self._pages = list(owned)
        if plan.prefix is not None:
            self.table.extend(plan.prefix.rows)
        self.runs = _runs(plan)
        for run in self.runs:
            self._place(run, plan.parts[run.part])
        self.spare = self._pages

    def _place(self, run: _Run, part: CombinePart) -> None:
        length = len(run.token_ids)
        pages = [self._pages.pop(0) for _ in range(pages_for(length, self._size))]
        self.table.extend(page_rows(pages, self._size, 0, run.first, length))
        self.positions.extend(range(run.first, run.first + length))
        self.write_slots.extend(
            page * self._size + offset
            for page, start in zip(pages, range(0, length, self._size), strict=True)
            for offset in range(min(self._size, length - start))
        )
        if part.state is not None:
            start = run.first + length - part.state.seam_window
            self.table.extend(part.state.rows(start, self._size))
        self.rows_after[run.part] = len(self.table.rows)


class CombinePass:
    """One prompt on its way through the layers. Creating it reserves everything that it will need.

    prompt: ready to decode once `run` has returned; snapshots: exact states behind the parts that asked for one.

    Raises:
        NoRoomError: pages or state slots are missing; nothing is taken.
    """

    def __init__(self, context: EngineContext, plan: CombinePlan) -> None:
        self._context = context
        self._plan = plan
        self.snapshots: dict[int, PrefixState] = {}
        owned = context.pages.allocate(plan.pages_needed(context.pages.page_size))
        try:
            slot = context.slots.allocate()
        except NoRoomError:
            context.pages.release(owned)
            raise
        shared = [page for part in plan.parts if part.state is not None for page in part.state.pages]
        if plan.prefix is not None:
            shared.extend(plan.prefix.pages)
        context.pages.retain(shared)
        self._layout = _Layout(context, plan, owned)
        self.prompt = Prompt(slot, self._layout.table, owned, tuple(shared), self._layout.spare, plan.num_tokens)

    def run(self) -> Generator[None, None, torch.Tensor]:
        """Yields after every layer; returns the last token's logits `[vocabulary]`."""
        context, layout = self._context, self._layout
        batch = self._batch()
        self._load_slot()
        token_ids = [token for run in layout.runs for token in run.token_ids]
        hidden = context.model.embed(context.integers(token_ids))
        for layer in context.model.layers:
            hidden = layer.run(hidden, lambda mixer, normed: mixer.combine(normed, batch))
            yield
        self._keep(batch)
        return context.model.logits(hidden[-1:])[0]

    def _batch(self) -> CombineBatch:
        context, layout, plan = self._context, self._layout, self._plan
        cu_runs = (0, *accumulate(len(run.token_ids) for run in layout.runs))
        states = [plan.parts[run.part].state for run in layout.runs]
        return CombineBatch(
            walk=PartWalk(cu_runs, (0, len(layout.runs))),
            queries=PagedQueries(context.integers(layout.positions), (0, cu_runs[-1]), [layout.table]),
            write_slots=context.integers(layout.write_slots),
            slots=context.integers([self.prompt.slot]),
            planes=[None if state is None else state.planes for state in states],
            body_positions=[run.first + len(run.token_ids) for run in layout.runs],
            keep_after=frozenset(index for index, run in enumerate(layout.runs) if plan.parts[run.part].keep),
        )

    def _load_slot(self) -> None:
        """The state slot begins with the prefix's state, or from nothing."""
        prefix, slot = self._plan.prefix, self.prompt.slot
        for layer, slots in enumerate(self._context.memory.linear_slots):
            if prefix is None:
                slots.states[slot].zero_()
                slots.tails[slot].zero_()
            else:
                slots.states[slot] = prefix.snapshots[layer].state
                slots.tails[slot] = prefix.snapshots[layer].tail

    def _keep(self, batch: CombineBatch) -> None:
        """Snapshots share the prompt's pages: the run behind a snapshot starts a page of its own."""
        prefix_ids = () if self._plan.prefix is None else self._plan.prefix.token_ids
        for index in sorted(batch.keep_after):
            part = self._layout.runs[index].part
            token_ids = prefix_ids + tuple(
                token for before in self._plan.parts[: part + 1] for token in before.token_ids
            )
            rows = tuple(self._layout.table.rows[: self._layout.rows_after[part]])
            state = PrefixState(token_ids, tuple(batch.kept.get(index, ())), rows)
            self._context.pages.retain(state.pages)
            self.snapshots[part] = state
