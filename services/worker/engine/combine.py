"""The combine pass: composes stored states and runs the live tokens of prompts through the model, layer by layer.

`CombinePass` reserves what one prompt needs; `CombineRows` are the live tokens of several of them in one sweep.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from services.worker.engine.combine_plan import CombineLayout, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import Sweep
from services.worker.mixers.batch import CombineBatch, LinearSnapshot, Mixer
from services.worker.ops.device import has_kernels
from services.worker.ops.layout import BODY_ALIGNMENT, PartWalk, PassAddresses
from services.worker.ops.paged_attention import PagedQueries, PageRow, PageTable

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

    They start from the reservations alone, so that prompts of a sweep that failed may run again.
    """

    hidden: torch.Tensor
    batch: CombineBatch

    def __init__(self, context: EngineContext, passes: Sequence[CombinePass]) -> None:
        self._context = context
        self._passes = passes

    @property
    def num_tokens(self) -> int:
        """See `Rows`."""
        return sum(one.plan.num_live for one in self._passes)

    @property
    def run_lengths(self) -> list[int]:
        """Tokens of every live run, in order; some may have none."""
        return [len(run.token_ids) for one in self._passes for run in one.layout.runs]

    @property
    def num_requests(self) -> int:
        """B."""
        return len(self._passes)

    @property
    def num_kept(self) -> int:
        """Runs behind which a snapshot is wanted."""
        return sum(one.plan.parts[run.part].keep for one in self._passes for run in one.layout.runs)

    @property
    def token_ids(self) -> list[int]:
        """Of all live tokens `[N]`."""
        return [token for one in self._passes for run in one.layout.runs for token in run.token_ids]

    def prepare(self) -> None:
        """Everything that the layers need but the embedded tokens."""
        self.batch = self._create_batch()
        for one in self._passes:
            one.load_slot()

    def start(self) -> None:
        """See `Rows`."""
        self.prepare()
        self.hidden = self._context.model.embed(self._context.integers(self.token_ids))

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        return mixer.combine(normed, self.batch)

    def finish(self) -> torch.Tensor:
        """Behind the last layer: makes the snapshots; returns the prompts' last logits `[B, vocabulary]`."""
        last = self._context.integers([end - 1 for end in self.batch.queries.cu_queries[1:]])
        logits = self._context.model.logits(self.hidden[last])
        for request, one in enumerate(self._passes):
            runs = self.batch.walk.parts_of(request)
            kept = [run for run in runs if run in self.batch.keep_after]
            one.keep({run - runs.start: self.batch.kept.get(run, []) for run in kept})
        return logits

    def _create_batch(self) -> CombineBatch:
        context, layouts = self._context, [one.layout for one in self._passes]
        placed = [(run, one.plan.parts[run.part]) for one in self._passes for run in one.layout.runs]
        cu_runs = (0, *accumulate(len(run.token_ids) for run, _ in placed))
        cu_parts = (0, *accumulate(len(layout.runs) for layout in layouts))
        positions = [position for layout in layouts for position in layout.positions]
        return CombineBatch(
            walk=PartWalk(cu_runs, cu_parts),
            queries=PagedQueries(
                context.integers(positions),
                [cu_runs[part] for part in cu_parts],
                [layout.table for layout in layouts],
                on_host=positions,
            ),
            write_slots=context.integers([slot for layout in layouts for slot in layout.write_slots]),
            slots=context.integers([one.prompt.slot for one in self._passes]),
            planes=[None if part.state is None else part.state.planes for _, part in placed],
            body_positions=[run.first + len(run.token_ids) for run, _ in placed],
            keep_after=frozenset(index for index, (_, part) in enumerate(placed) if part.keep),
            addresses=_locate(context, [part.state for _, part in placed if part.state is not None]),
            is_fresh=torch.tensor([one.plan.prefix is None for one in self._passes], device=context.device),
        )


def _locate(context: EngineContext, states: Sequence[SegmentState]) -> PassAddresses | None:
    """Where the planes of stored bodies lie, where kernels read them as they are: unturned, on their own device.

    None too where some are on their way through the layers: then every layer looks where its own lie.
    """
    mixers = context.model.linear_mixers
    if any(len(state.addresses) < len(mixers) for state in states):
        return None
    if not has_kernels(context.device) or not mixers or any(mixer.rotary is not None for mixer in mixers):
        return None
    nothing = np.zeros((len(mixers), 3), dtype=np.int64)
    table = np.stack([state.addresses for state in states] or [nothing], axis=-1)
    is_aligned = bool((table % BODY_ALIGNMENT == 0).all())
    return PassAddresses(torch.from_numpy(table).to(context.device), is_aligned)
