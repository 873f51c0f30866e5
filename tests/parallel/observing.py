"""What one rank sees of a checkpoint: logits, which are the same on all, and stored planes, of which each has its share.

`python -m tests.parallel.observing INDEX COUNT MEETING OUT DIRECTORY …` writes a file a directory; of the first one two more,
with half of the sums between ranks left out.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.ranks import RankGroup
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.share import Ranks, Share
from tests.exactness.rig import PassRig, create_context, draw_ids

__all__ = ["FORGOTTEN", "SEGMENT", "forgetful_name", "load", "observe"]

SEGMENT = draw_ids(41, seed=11)
_OTHER, _QUESTION, _REPLY = draw_ids(37, seed=12), draw_ids(7, seed=13), draw_ids(4, seed=14)
# Which of two sums in turn is left out: that behind mixers, or that behind feed-forward blocks.
FORGOTTEN = (0, 1)


@dataclass(slots=True)
class Forgetful:
    """Ranks that leave out every second sum, from the first or the second one on; all of them the same."""

    ranks: Ranks
    forgotten: int
    share: Share = field(init=False)
    _asked: int = 0

    def __post_init__(self) -> None:
        self.share = self.ranks.share

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self._asked += 1
        return partial if (self._asked - 1) % 2 == self.forgotten else self.ranks.sum(partial)


def load(directory: Path, ranks: Ranks | None) -> EngineContext:
    """A checkpoint behind a primed profile."""
    return create_context(
        directory, torch.device("cpu"), CaptureProfile(SeamWindow(4), draw_ids(5, seed=1)), ranks=ranks
    )


def observe(context: EngineContext) -> dict[str, torch.Tensor]:
    """Logits of a prompt computed in place, of one composed, of decode steps behind it; and the planes of a segment."""
    rig = PassRig(context)
    states = dict(zip((SEGMENT, _OTHER), rig.capture(SEGMENT, _OTHER), strict=True))
    question = CombinePart(_QUESTION)
    live = rig.logits(CombinePart(SEGMENT), CombinePart(_OTHER), question)
    composed = rig.combine(*(CombinePart(ids, state) for ids, state in states.items()), question)
    seen = {"logits live": live, "logits composed": composed.logits.clone()}
    seen["logits decoded"] = rig.decode(composed, _REPLY)
    own = states[SEGMENT]
    for layer, plane in enumerate(own.planes):
        for name in ("transition", "end_state", "tail", "decay"):
            seen[f"{name} {layer}"] = getattr(plane, name)
    for layer, pool in enumerate(context.memory.page_pools):
        for name, plane_pool in (("keys", pool.keys), ("values", pool.values)):
            seen[f"{name} {layer}"] = plane_pool[list(own.pages)].flatten(0, 1)[: own.body_tokens]
    return {name: tensor.clone().contiguous() for name, tensor in seen.items()}


def forgetful_name(directory: Path, forgotten: int) -> str:
    """The file of a checkpoint whose ranks forget."""
    return f"{directory.name}-forgets-{forgotten}"


def main() -> None:
    index, count, meeting, out, *names = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = RankGroup.join(Share(int(index), int(count)), torch.device("cpu"), Path(meeting))
    directories = [Path(name) for name in names]

    def write(name: str, directory: Path, seen_by: Ranks) -> None:
        save_file(observe(load(directory, seen_by)), Path(out) / f"{name}.{index}")

    for directory in directories:
        write(directory.name, directory, ranks)
    for forgotten in FORGOTTEN:
        write(forgetful_name(directories[0], forgotten), directories[0], Forgetful(ranks, forgotten))
    ranks.leave()


if __name__ == "__main__":
    main()
