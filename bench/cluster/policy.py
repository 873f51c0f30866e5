"""Longest first against the optimum and against round robin, on random instances of up to ten segments and four workers."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.cluster.instances import Instance, Loads, draw, equal, round_robin, transferred, unequal
from bench.results import Row
from services.router.domain.assignment import assign_captures

__all__ = ["Compared", "compare", "longest_first", "measure_policy"]

_Shape = Callable[[random.Random], Callable[[Instance], Instance]]
_SEED = 7


@dataclass(frozen=True, slots=True)
class Compared:
    """Instances and their least makespans."""

    instances: Sequence[Instance]
    optima: Sequence[float]

    def ratios(self, assign: Callable[[Instance], Loads]) -> list[float]:
        """Makespans over the least ones."""
        pairs = zip(self.instances, self.optima, strict=True)
        return [instance.makespan(assign(instance)) / optimum for instance, optimum in pairs]

    def over_bound(self, assign: Callable[[Instance], Loads]) -> float:
        """The worst ratio over `4/3 − 1/(3m)`, of several workers; the bound is of equal ones."""
        sizes = [len(instance.workers) for instance in self.instances]
        each = zip(self.ratios(assign), sizes, strict=True)
        return max(ratio / (4 / 3 - 1 / (3 * m)) for ratio, m in each if m > 1)


def longest_first(instance: Instance) -> Loads:
    """As the router assigns."""
    plan = assign_captures(instance.segments, instance.workers, instance.combine)
    return {view.worker_id: [each.segment for each in plan.of_worker(view.worker_id)] for view in instance.workers}


def compare(
    count: int, shape: _Shape, segments: tuple[int, int] = (1, 10), workers: tuple[int, int] = (1, 4)
) -> Compared:
    """So many instances, the same ones every time, with their optima by exhaustion."""
    source = random.Random(_SEED)
    instances = [draw(source, segments, workers, shape(source)) for _ in range(count)]
    return Compared(instances, [instance.optimum() for instance in instances])


def measure_policy(scale: int = 1) -> Iterator[Row]:
    """All rows; the number of instances is divided by `scale`."""
    any_size = "1 to 10 segments on 1 to 4 equal workers"
    yield from _equal_rows(any_size, compare(1000 // scale, equal))
    largest = "10 segments on 4 equal workers"
    yield from _equal_rows(largest, compare(200 // scale, equal, segments=(10, 10), workers=(4, 4)))
    unlike = "1 to 10 segments on 1 to 4 workers of unequal speeds and backlogs"
    yield from _rows(unlike, compare(500 // scale, unequal), reach=None)
    moved = "1 to 7 segments on 1 to 4 workers, states that travel whole"
    yield from _rows(moved, compare(300 // scale, transferred, segments=(1, 7)), reach=None)


def _equal_rows(name: str, compared: Compared) -> Iterator[Row]:
    yield from _rows(name, compared, reach=1.03)
    yield Row(f"the same over 4/3 − 1/(3m), {name}", compared.over_bound(longest_first), "×", 1.0, "lower")


def _rows(name: str, compared: Compared, reach: float | None) -> Iterator[Row]:
    ratios, in_turn = compared.ratios(longest_first), compared.ratios(round_robin)
    yield Row(f"round robin over the optimum, mean, {name}", fmean(in_turn), "×", better="lower")
    yield Row(f"longest first over the optimum, mean, {name}", fmean(ratios), "×", reach, "lower")
    yield Row(f"longest first over the optimum, worst, {name}", max(ratios), "×", better="lower")
