"""Many prompts at once through the engine's layers: combine, continue along given tokens, decode greedily."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from eval.layout import Layout, SideRun
from eval.rig import PAGE_TOKENS, Rig
from services.worker.engine.refreshed_rows import fade
from services.worker.engine.states import page_rows
from services.worker.mixers.batch import CombineBatch, DecodeBatch, LinearSnapshot, Mixer
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageRow, PageTable

__all__ = ["PromptBatch"]

Watcher = Callable[[Mixer, torch.Tensor, CombineBatch], None]


@dataclass(frozen=True, slots=True)
class _Sides:
    """Refreshed blocks of all prompts: their rows in the packed tokens, their slots and runs."""

    rows: torch.Tensor
    runs: tuple[SideRun, ...]
    parts: tuple[int, ...]
    slots: torch.Tensor
    batch: CombineBatch


class PromptBatch:
    """Prompts of any settings in slots 0, 1, …; side runs take the slots behind them."""

    def __init__(self, rig: Rig, layouts: Sequence[Layout]) -> None:
        self._rig = rig
        self._layouts = layouts
        self._slots = rig.integers(range(len(layouts)))
        self._cu_rows = (0, *accumulate(len(layout.token_ids) for layout in layouts))
        self._used = [0] * len(layouts)
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def combine(self, num_layers: int | None = None, watch: Watcher | None = None) -> torch.Tensor:
        """All prompts through the first `num_layers` layers; returns every last token's logits `[B, vocabulary]`.

        watch: sees every layer's mixer, its normed input `[N, hidden]` and the batch, after the layer's keys are written.
        """
        rig = self._rig
        for slots in rig.memory.linear_slots:
            slots.states[self._slots] = 0.0
            slots.tails[self._slots] = 0.0
        main_rows = [
            first + row for first, own in zip(self._cu_rows, self._layouts, strict=False) for row in own.main_rows
        ]
        batch = self._main_batch()
        sides = self._side_batch()
        main = None if sides is None else rig.integers(main_rows)

        def mix(mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
            if isinstance(mixer, LinearMixer) and sides is not None and main is not None:
                mixed = torch.empty_like(normed)
                mixed[main] = mixer.combine(normed[main], batch)
                self._start_sides(mixer, batch, sides)
                mixed[sides.rows] = mixer.combine(normed[sides.rows], sides.batch)
            else:
                mixed = mixer.combine(normed, batch)
            if watch is not None:
                watch(mixer, normed, batch)
            return mixed

        hidden = rig.model.embed(rig.integers([token for own in self._layouts for token in own.token_ids]))
        for layer in rig.model.layers[:num_layers]:
            hidden = layer.run(hidden, mix)
        return rig.model.logits(hidden[rig.integers([end - 1 for end in self._cu_rows[1:]])])

    def save(self) -> None:
        """Remember the states behind the prompts."""
        self._saved = [
            (slots.states[self._slots].clone(), slots.tails[self._slots].clone())
            for slots in self._rig.memory.linear_slots
        ]

    def restore(self) -> None:
        """Return to the states that `save` remembered."""
        for slots, (states, tails) in zip(self._rig.memory.linear_slots, self._saved, strict=True):
            slots.states[self._slots] = states
            slots.tails[self._slots] = tails

    def snapshots(self, index: int) -> tuple[LinearSnapshot, ...]:
        """One prompt's exact state, as stored snapshots."""
        return tuple(
            LinearSnapshot(slots.states[index].clone(), slots.tails[index].clone())
            for slots in self._rig.memory.linear_slots
        )

    def advance(self, continuations: Sequence[Sequence[int]]) -> torch.Tensor:
        """Continue every prompt for good; returns every last token's logits `[B, vocabulary]`."""
        logits = torch.stack([own[-1] for own in self.extend(continuations)])
        self._used = [used + len(tokens) for used, tokens in zip(self._used, continuations, strict=True)]
        return logits

    @torch.inference_mode()
    def extend(self, continuations: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Every prompt continued by its tokens (at least one); returns logits `[n, vocabulary]` of each, in order.

        The states advance; `restore` takes them back.
        """
        rig, lengths = self._rig, [len(tokens) for tokens in continuations]
        places = [(index, token) for index, count in enumerate(lengths) for token in range(count)]
        cu_rows = (0, *accumulate(lengths))
        batch = CombineBatch(
            walk=PartWalk(cu_rows, tuple(range(len(lengths) + 1))),
            queries=PagedQueries(
                rig.integers([self._position(index, token) for index, token in places]),
                cu_rows,
                [self._table(index, count) for index, count in enumerate(lengths)],
            ),
            write_slots=rig.integers([self._write_slot(index, token) for index, token in places]),
            slots=self._slots,
            planes=[None] * len(lengths),
            body_positions=[0] * len(lengths),
        )
        hidden = rig.model.embed(rig.integers([token for tokens in continuations for token in tokens]))
        for layer in rig.model.layers:
            hidden = layer.run(hidden, lambda mixer, normed: mixer.combine(normed, batch))
        return list(rig.model.logits(hidden).split(lengths))

    @torch.inference_mode()
    def greedy(
        self, indices: Sequence[int], first_tokens: Sequence[int], end_id: int, limit: int
    ) -> list[tuple[int, ...]]:
        """Greedy answers of some prompts, given each one's first token; an answer ends with `end_id` or at the limit."""
        answers = [[token] for token in first_tokens]
        tables = {index: self._table(index, 0) for index in indices}
        for count in range(limit - 1):
            running = [row for row, answer in enumerate(answers) if answer[-1] != end_id]
            if not running:
                break
            prompts = [indices[row] for row in running]
            for index in prompts:
                self._append(tables[index], index, count)
            tokens = self._decode_step(prompts, [answers[row][-1] for row in running], tables, count)
            for row, token in zip(running, tokens, strict=True):
                answers[row].append(token)
        return [tuple(answer) for answer in answers]

    def _decode_step(
        self, prompts: Sequence[int], tokens: Sequence[int], tables: dict[int, PageTable], count: int
    ) -> list[int]:
        rig = self._rig
        batch = DecodeBatch(
            queries=PagedQueries(
                rig.integers([self._position(index, count) for index in prompts]),
                range(len(prompts) + 1),
                [tables[index] for index in prompts],
            ),
            write_slots=rig.integers([self._write_slot(index, count) for index in prompts]),
            slots=rig.integers(prompts),
        )
        hidden = rig.model.embed(rig.integers(tokens))
        for layer in rig.model.layers:
            hidden = layer.run(hidden, lambda mixer, normed: mixer.decode(normed, batch))
        return [int(token) for token in rig.model.logits(hidden).argmax(-1).tolist()]

    def _position(self, index: int, token: int) -> int:
        return self._layouts[index].length + self._used[index] + token

    def _write_slot(self, index: int, token: int) -> int:
        return self._layouts[index].reserved.start * PAGE_TOKENS + self._used[index] + token

    def _table(self, index: int, extra: int) -> PageTable:
        """A prompt's pages and `extra` tokens behind it."""
        layout = self._layouts[index]
        table = PageTable(PAGE_TOKENS)
        table.extend(layout.rows)
        table.extend(page_rows(layout.reserved, PAGE_TOKENS, 0, layout.length, self._used[index] + extra))
        return table

    def _append(self, table: PageTable, index: int, token: int) -> None:
        """Enter the `token`-th token behind the prompt into its table."""
        layout, place = self._layouts[index], self._used[index] + token
        if place % PAGE_TOKENS:
            table.grow_last()
        else:
            page = layout.reserved[place // PAGE_TOKENS]
            table.extend([PageRow(page, 0, layout.length + place, 1)])

    def _main_batch(self) -> CombineBatch:
        """Positions, slots and tables of all rows; the walk of the main rows."""
        rig, layouts = self._rig, self._layouts
        parts = [part for layout in layouts for part in layout.parts]
        return CombineBatch(
            walk=PartWalk(
                (0, *accumulate(part.num_tokens for part in parts)),
                (0, *accumulate(len(layout.parts) for layout in layouts)),
            ),
            queries=PagedQueries(
                rig.integers([place for layout in layouts for place in layout.positions]),
                self._cu_rows,
                [self._table(index, 0) for index in range(len(layouts))],
            ),
            write_slots=rig.integers([slot for layout in layouts for slot in layout.write_slots]),
            slots=self._slots,
            planes=[part.planes for part in parts],
            body_positions=[0] * len(parts),
            keep_after=frozenset(index for index, part in enumerate(parts) if part.keep),
        )

    def _side_batch(self) -> _Sides | None:
        rig, layouts = self._rig, self._layouts
        cu_parts = (0, *accumulate(len(layout.parts) for layout in layouts))
        found = [(index, side) for index, layout in enumerate(layouts) for side in layout.sides]
        if not found:
            return None
        cu_rows = (0, *accumulate(len(side.rows) for _, side in found))
        slots = rig.integers(range(len(layouts), len(layouts) + len(found)))
        unused = rig.integers(())
        batch = CombineBatch(
            walk=PartWalk(cu_rows, tuple(range(len(found) + 1))),
            queries=PagedQueries(unused, (), ()),
            write_slots=unused,
            slots=slots,
            planes=[None] * len(found),
            body_positions=[0] * len(found),
        )
        rows = [self._cu_rows[index] + row for index, side in found for row in side.rows]
        parts = tuple(cu_parts[index] + side.part for index, side in found)
        return _Sides(rig.integers(rows), tuple(side for _, side in found), parts, slots, batch)

    def _start_sides(self, mixer: LinearMixer, batch: CombineBatch, sides: _Sides) -> None:
        """Each block starts from the composed state at the body's head, faded to the first replayed token.

        The convolution's history is known only where the block begins at the body's head.
        """
        layer = mixer.slots.index
        heads = [batch.kept[part][layer] for part in sides.parts]
        decays = torch.stack([side.planes[layer].decay for side in sides.runs])
        fractions = torch.tensor([side.fraction for side in sides.runs]).to(decays.device)
        mixer.slots.states[sides.slots] = fade(torch.stack([head.state for head in heads]), decays, fractions)
        mixer.slots.tails[sides.slots] = torch.stack(
            [
                torch.zeros_like(head.tail) if side.fraction else head.tail
                for head, side in zip(heads, sides.runs, strict=True)
            ]
        )
