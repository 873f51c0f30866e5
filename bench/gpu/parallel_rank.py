"""`python -m bench.gpu.parallel_rank INDEX COUNT FOLDER CONFIG DEVICE SEED SIZES`: one rank of the subject `parallel`.

The first rank writes rows, one JSON object a line, into the folder. A gate of its own comes first: behind the first layers of
each kind, the ranks together say what one of them says that holds these layers whole, and sums that are left out are seen.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

from bench.engine_runs import capture_together, generate, key
from bench.gpu.families import measure_shape
from bench.gpu.gate import Agreement, last_logits, mean_error
from bench.gpu.rig import Rig
from bench.gpu.sizes import Sizes
from bench.results import Row
from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.ranks import RankGroup
from services.worker.engine.requests import PromptPart, Serving
from services.worker.mixers.share import Ranks, Share

__all__ = ["compare_ranks"]

_QUESTIONS, _SUMS = 4, 50
# Weights leave a card little room: captures are packed less tightly than where they are measured.
_PACKED_TOKENS = 1 << 13


@dataclass(slots=True)
class _Forgetful:
    """Ranks that add nothing up: the negative control. See `Ranks`."""

    ranks: Ranks
    share: Share = field(init=False)

    def __post_init__(self) -> None:
        self.share = self.ranks.share

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        return partial


def compare_ranks(rig: Rig, ranks: Ranks) -> Agreement:
    """Logits of a composed prompt behind the first layers: the ranks' against one's, whose `composed` they are; and,
    as `mistaken`, those of ranks that add nothing up."""
    whole, together, apart = (_compose(rig, held) for held in (None, ranks, _Forgetful(ranks)))
    return Agreement(mean_error(together, whole), mean_error(apart, whole))


def _compose(rig: Rig, held: Ranks | None) -> Sequence[torch.Tensor]:
    """One segment from its state behind the prime, several questions; the layers leave the device behind it."""
    sizes = rig.sizes
    own = Rig(rig.config, sizes, rig.device, rig.seed, held, rig.first_of_each_kind)
    engine = own.engine(4 * sizes.short_tokens, 16)
    ids = own.ids(1, sizes.short_tokens)
    capture_together(engine, {key(0): ids})
    part = CombinePart(ids, engine.context.store.get_segment(key(0), ids))
    logits = [last_logits(own, engine, [part], number) for number in range(_QUESTIONS)]
    del engine, part
    own.release()
    return logits


def _measure(rig: Rig, ranks: RankGroup) -> Iterator[Row]:
    name = f"{rig.config.name} on {ranks.share.count} ranks"
    agreement = compare_ranks(rig, ranks)
    yield Row(f"{name} / error against one rank", agreement.composed, "", better="lower")
    yield Row(f"{name} / the same, nothing added up", agreement.mistaken, "")
    yield Row(f"{name} / logits that differ between ranks", _count_unlike(rig, ranks), "", better="lower")
    if not agreement.is_good:
        raise RuntimeError(f"{agreement}: this run measures nothing")
    started = time.perf_counter()
    _ = rig.model
    _wait(rig)
    yield Row(f"{name} / weights drawn, s", time.perf_counter() - started, "s", better="lower")
    yield from measure_shape(rig, name)
    rig.clear()
    yield Row(f"{name} / decode at {rig.sizes.prompt_tokens:,}, tokens/s", _decode_rate(rig), "tokens/s")
    for tokens in (1, rig.sizes.segments * rig.sizes.seam_window + rig.sizes.question_tokens):
        yield Row(f"{name} / a sum of {tokens} rows, µs", 1e6 * _sum_seconds(rig, ranks, tokens), "µs", better="lower")


def _count_unlike(rig: Rig, ranks: RankGroup) -> int:
    """Behind the first layers, of all questions: every rank computes them from sums of the same bits.

    Of two ranks' numbers the sum is twice one's where they are alike, and nowhere else.
    """
    logits = torch.stack([*_compose(rig, ranks)])
    return int((ranks.sum(logits.clone()) != ranks.share.count * logits).sum())


def _decode_rate(rig: Rig) -> float:
    """One request behind a prompt of hits."""
    sizes = rig.sizes
    engine = rig.engine(2 * sizes.prompt_tokens + sizes.question_tokens, 3 * sizes.segments + 8)
    segments = {key(number): rig.ids(number, sizes.segment_tokens) for number in range(sizes.segments)}
    capture_together(engine, segments)
    parts = tuple(PromptPart(ids, Serving.SEGMENT, name) for name, ids in segments.items())
    runs = [generate(engine, (*parts, rig.question(0)), sizes.decode_steps) for _ in range(3)]
    return runs[-1].decode_rate


def _sum_seconds(rig: Rig, ranks: RankGroup, tokens: int) -> float:
    """One after the other, as layers have them, the host ahead of the device."""
    rows = torch.zeros(tokens, rig.spec.hidden_size, dtype=rig.dtype, device=rig.device)
    times = []
    for _ in range(4):
        _wait(rig)
        started = time.perf_counter()
        for _ in range(_SUMS):
            ranks.sum(rows)
        _wait(rig)
        times.append((time.perf_counter() - started) / _SUMS)
    return median(times[1:])


def _wait(rig: Rig) -> None:
    if rig.device.type == "cuda":
        torch.cuda.synchronize(rig.device)


def main() -> None:
    """Measure beside the other ranks."""
    index, count, folder, config, kind, seed, sizes = sys.argv[1:]
    share, device = Share(int(index), int(count)), torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", share.index)
        torch.cuda.set_device(device)
    ranks = RankGroup.join(share, device, Path(folder) / "meeting")
    given = json.loads(sizes)
    drawn = Sizes(**{**given, "recomputed": tuple(given["recomputed"])})
    rig = Rig(Path(config), drawn, device, int(seed), ranks, packed_tokens=_PACKED_TOKENS)
    with (Path(folder) / f"rows{'' if share.index == 0 else f'.{index}'}").open("w", buffering=1) as out:
        for row in _measure(rig, ranks):
            out.write(json.dumps(asdict(row)) + "\n")
    # Nobody leaves while another still reads from its memory.
    ranks.sum(torch.ones(1, device=device)).item()


if __name__ == "__main__":
    status = 0
    try:
        main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # Destructors of recorded passes and of the group would wait for each other.
    os._exit(status)
