"""The combine pass: composes stored states and runs the live tokens of prompts through the model, layer by layer.

`CombinePass` reserves what one prompt needs; `CombineRows` are the live tokens of several of them in one sweep.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from services.worker.engine.combine_plan import CombineLayout, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.packed_prompts import BodyPlaces, PackedPrompts, PlacedPrompt, locate_bodies
from services.worker.engine.pages import NoRoomError
from services.worker.engine.states import PrefixState
from services.worker.engine.sweep import ALL_LAYERS, Sweep
from services.worker.mixers.batch import CombineBatch, LinearSnapshot, Mixer
from services.worker.ops.columns import send_columns
from services.worker.ops.paged_attention import PageRow, PageTable

__all__ = ["CombinePass", "CombineRows", "Prompt"]


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
        last, size = self.table.last, self.table.page_size
        if last.offset + last.count < size * len(last.pages):
            self.table.grow_last()
        else:
            self.table.extend([PageRow(self.spare.pop(0), 0, self.length, 1)])
        self.length += 1
        last = self.table.last
        return last.pages[-1] * size + (last.offset + last.count - 1) % size

    def release(self, context: EngineContext) -> None:
        """Give back everything."""
        context.slots.release(self.slot)
        context.pages.release(self.owned)
        context.pages.release(self.shared)


class CombinePass:
    """One prompt to combine. Creating it reserves everything that it will need.

    prompt: ready to decode behind the last layer; snapshots: exact states behind the parts that asked for one.

    Raises:
        NoRoomError: pages or state slots are missing; nothing is taken.
    """

    def __init__(self, context: EngineContext, plan: CombinePlan) -> None:
        self._context = context
        self.plan = plan
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
        self.layout = CombineLayout(context, plan, owned)
        self.prompt = Prompt(slot, self.layout.table, owned, tuple(shared), self.layout.spare, plan.num_tokens)

    def run(self) -> Generator[None, None, torch.Tensor]:
        """The prompt alone: yields after every layer; returns the last token's logits `[vocabulary]`."""
        rows = CombineRows(self._context, [self])
        yield from Sweep(self._context, [rows]).run()
        return rows.finish()[0]

    def refresh(self, plan: CombinePlan) -> None:
        """Go on with a plan in which blocks are refreshed, in what is reserved; nothing that has run counts any more."""
        self.plan = plan
        self.layout = CombineLayout(self._context, plan, self.prompt.owned)
        self.prompt.table, self.prompt.spare = self.layout.table, self.layout.spare

    def load_slot(self) -> None:
        """The state slot begins with the prefix's state where there is one."""
        prefix, slot = self.plan.prefix, self.prompt.slot
        layers = self._context.memory.linear_slots
        if prefix is not None and layers:
            own = [kept for slots in layers for kept in (slots.states[slot], slots.tails[slot])]
            torch._foreach_copy_(own, [kept for one in prefix.snapshots for kept in (one.state, one.tail)])

    def keep(self, kept: Mapping[int, Sequence[LinearSnapshot]]) -> None:
        """Make snapshots of the states behind runs, by index of the run.

        They share the prompt's pages; what is written behind a snapshot is none of its rows'.
        """
        prefix_ids = () if self.plan.prefix is None else self.plan.prefix.token_ids
        for index, snapshots in sorted(kept.items()):
            part = self.layout.runs[index].part
            token_ids = prefix_ids + tuple(
                token for before in self.plan.parts[: part + 1] for token in before.token_ids
            )
            rows = tuple(self.layout.table.entries[: self.layout.rows_after[part]])
            state = PrefixState(token_ids, tuple(_own(snapshot) for snapshot in snapshots), rows)
            self._context.pages.retain(state.pages)
            self.snapshots[part] = state

    def drop_snapshots(self) -> None:
        """Give back what `keep` has made."""
        for state in self.snapshots.values():
            self._context.pages.release(state.pages)
        self.snapshots.clear()

    def release(self) -> None:
        """Give back everything."""
        self.drop_snapshots()
        self.prompt.release(self._context)


def _own(snapshot: LinearSnapshot) -> LinearSnapshot:
    """A copy: what a sweep keeps may be a view of all that ran in it, which must not live as long as the snapshot."""
    return LinearSnapshot(snapshot.state.clone(), snapshot.tail.clone())


class CombineRows:
    """The live tokens of reserved prompts, packed in order. See `Rows`.

    They start from the reservations alone, so that prompts of a sweep that failed may run again. batch: there from `start` on.
    """

    hidden: torch.Tensor
    batch: CombineBatch
    last_rows: torch.Tensor

    def __init__(self, context: EngineContext, passes: Sequence[CombinePass]) -> None:
        self._context = context
        self._passes = passes
        self._num_tokens = sum(one.plan.num_live for one in passes)

    @property
    def num_tokens(self) -> int:
        """See `Rows`."""
        return self._num_tokens

    @property
    def num_layers(self) -> int:
        """See `Rows`."""
        return ALL_LAYERS

    @property
    def is_recordable(self) -> bool:
        """Whether a pass may be recorded for them and others like them."""
        return True

    @cached_property
    def packed(self) -> PackedPrompts:
        """On the host."""
        return PackedPrompts.of([PlacedPrompt(one.plan, one.layout, one.prompt.slot) for one in self._passes])

    @cached_property
    def places(self) -> BodyPlaces | None:
        """Where stored bodies lie, if kernels read them there. Of a pass that captures too: ask once its planes are there."""
        return locate_bodies(self._context, self.packed)

    def load_slots(self) -> None:
        """The prompts' state slots as they are ahead of the pass."""
        for one in self._passes:
            one.load_slot()

    def start(self) -> None:
        """See `Rows`."""
        packed, device = self.packed, self._context.device
        columns = (
            packed.token_ids,
            packed.positions,
            packed.write_slots,
            packed.slots,
            packed.is_fresh,
            packed.last_rows,
        )
        token_ids, positions, write_slots, slots, is_fresh, self.last_rows = send_columns(columns, device, torch.int64)
        sent = None if self.places is None else self.places.send(device)
        self.batch = packed.batch(packed.queries(positions), write_slots, slots, is_fresh.bool(), sent)
        self.load_slots()
        self.hidden = self._context.model.embed(token_ids)

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return mixer.combine(normed, self.batch)

    def finish(self) -> torch.Tensor:
        """Behind the last layer: makes the snapshots; returns the prompts' last logits `[B, vocabulary]`."""
        logits = self._context.model.logits(self.hidden[self.last_rows])
        for request, one in enumerate(self._passes):
            runs = self.batch.walk.parts_of(request)
            kept = [run for run in runs if self.packed.runs[run].keep]
            one.keep({run - runs.start: self.batch.kept.get(run, []) for run in kept})
        return logits
