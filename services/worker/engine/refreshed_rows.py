"""The two passes of a refreshing prompt: the first finds what the question attends to, the second runs the chosen blocks too."""

from dataclasses import dataclass, replace

import torch

from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import SideRun
from services.worker.engine.context import EngineContext
from services.worker.engine.question import question_attention
from services.worker.mixers.batch import CombineBatch, LinearSlots, LinearSnapshot, Mixer
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.ops.columns import send_columns
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries

__all__ = ["AttendingRows", "RefreshedRows", "attention_depth", "fade"]


def attention_depth(context: EngineContext) -> int:
    """Layers up to the last one with full attention; 0 where there is none."""
    kinds = [isinstance(layer.mixer, PagedAttention) for layer in context.model.layers]
    return len(kinds) - kinds[::-1].index(True) if True in kinds else 0


def fade(states: torch.Tensor, decays: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """States `[n, H, K, V]` from the heads of bodies to places behind `fractions` `[n]` of these.

    decays `[n, H]`: products over whole bodies, which are taken to be even over their tokens.
    """
    return states * decays.float().pow(fractions[:, None])[:, :, None, None]


class AttendingRows(CombineRows):
    """One prompt's live tokens through all full-attention layers.

    attention `[positions]`: what of its last `question_tokens` tokens falls on each token, the sum of these layers.
    """

    def __init__(self, context: EngineContext, one: CombinePass, question_tokens: int) -> None:
        super().__init__(context, [one])
        self._question_tokens = question_tokens
        self._depth = attention_depth(context)
        self.attention = torch.zeros(one.plan.num_tokens, device=context.device)

    @property
    def num_layers(self) -> int:
        """See `Rows`."""
        return self._depth

    @property
    def is_recordable(self) -> bool:
        """See `CombineRows`."""
        return False

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        mixed = super().mix(mixer, normed)
        if isinstance(mixer, PagedAttention):
            (found,) = question_attention(mixer, normed, self.batch, [self._question_tokens])
            self.attention += found
        return mixed


@dataclass(frozen=True, slots=True)
class _Sides:
    """What runs beside the walk. heads: the run before every one's body; fractions `[n]`: how much of that body lies before it.

    is_first `[n, 1, 1]`: it begins where the body does, so that the convolution's history is known.
    """

    runs: tuple[SideRun, ...]
    rows: torch.Tensor
    batch: CombineBatch
    fractions: torch.Tensor
    is_first: torch.Tensor

    def start(self, mixer: LinearMixer, heads: list[LinearSnapshot]) -> LinearSlots:
        """States of their own: those behind the heads, faded."""
        index = mixer.slots.index
        decays = torch.stack([run.state.planes[index].decay for run in self.runs])
        states = fade(torch.stack([head.state for head in heads]), decays, self.fractions)
        tails = torch.stack([head.tail for head in heads])
        return LinearSlots(index, states, tails.where(self.is_first, torch.zeros_like(tails)))


class RefreshedRows(CombineRows):
    """One prompt's live tokens, refreshed blocks among them.

    Linear layers run the walk first, whose state follows stored bodies as ever, then every block from the state at its
    body's head; attention layers run all of them, in order of position.
    """

    _walked: torch.Tensor
    _attending: CombineBatch
    _sides: _Sides

    def __init__(self, context: EngineContext, one: CombinePass) -> None:
        super().__init__(context, [one])
        self._one = one

    @property
    def is_recordable(self) -> bool:
        """See `CombineRows`."""
        return False

    def start(self) -> None:
        """See `Rows`."""
        packed, layout, device = self.packed, self._one.layout, self._context.device
        side_rows = [row for run in layout.sides for row in run.rows]
        columns = (
            layout.token_ids,
            layout.positions,
            layout.write_slots,
            packed.slots,
            packed.is_fresh,
            [len(layout.token_ids) - 1],
            layout.walked_rows,
            side_rows,
        )
        token_ids, positions, write_slots, slots, is_fresh, self.last_rows, self._walked, sides = send_columns(
            columns, device, torch.int64
        )
        sent = None if self.places is None else self.places.send(device)
        walked = PagedQueries(positions[self._walked], (), ())
        self.batch = packed.batch(walked, write_slots, slots, is_fresh.bool(), sent)
        queries = PagedQueries(positions, (0, len(layout.positions)), packed.tables, on_host=layout.positions)
        self._attending = replace(self.batch, queries=queries)
        self._sides = self._beside(sides, PagedQueries(positions[sides], (), ()), write_slots)
        self.load_slots()
        self.hidden = self._context.model.embed(token_ids)

    def _beside(self, rows: torch.Tensor, queries: PagedQueries, write_slots: torch.Tensor) -> _Sides:
        runs, device = tuple(self._one.layout.sides), self._context.device
        cu_rows = [0]
        for run in runs:
            cu_rows.append(cu_rows[-1] + len(run.rows))
        batch = CombineBatch(
            walk=PartWalk(tuple(cu_rows), tuple(range(len(runs) + 1))),
            queries=queries,
            write_slots=write_slots,
            slots=self._context.integers(range(len(runs))),
            planes=[None] * len(runs),
            body_positions=[0] * len(runs),
        )
        before = [(run.side.begin - run.state.seam_window) / run.state.body_tokens for run in runs]
        fractions = torch.tensor(before, dtype=torch.float32).to(device)
        return _Sides(runs, rows, batch, fractions, (fractions == 0)[:, None, None])

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        if not isinstance(mixer, LinearMixer):
            return mixer.combine(normed, self._attending)
        mixed = torch.empty_like(normed)
        mixed[self._walked] = mixer.combine(normed[self._walked], self.batch)
        # Only snapshots are kept to the end.
        heads = {run: self.batch.kept.pop(run)[0] for run in dict.fromkeys(side.head for side in self._sides.runs)}
        slots = self._sides.start(mixer, [heads[side.head] for side in self._sides.runs])
        beside = replace(mixer, slots=slots)
        mixed[self._sides.rows] = beside.combine(normed[self._sides.rows], self._sides.batch)
        return mixed
