"""Schedules by exhaustion, and instances to compare them on. Knows nothing of how the router assigns."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.router.domain.assignment import ColdSegment
from services.router.domain.workers import CaptureSpeed, CombineSpeed, TransferSpeed, WorkerSpeeds, WorkerView

__all__ = ["COMBINE", "Instance", "Loads", "draw", "equal", "round_robin", "transferred", "unequal", "worker_view"]

_SMALL = 1e-12
COMBINE = CombineSpeed(0.02, 0.0006, 0.00002)
# Segments of an instance, by worker.
Loads = Mapping[str, Sequence[ColdSegment]]


@dataclass(frozen=True, slots=True)
class Instance:
    """Segments in request order, and workers of which the first one combines."""

    segments: tuple[ColdSegment, ...]
    workers: tuple[WorkerView, ...]

    @property
    def combine(self) -> WorkerView:
        """Where everything must be in the end."""
        return self.workers[0]

    def finish(self, worker: WorkerView, num_tokens: int) -> float:
        """When a worker has captured so many."""
        return worker.backlog_seconds + worker.speeds.capture.seconds(num_tokens) if num_tokens else 0.0

    def makespan(self, loads: Loads) -> float:
        """When the combine worker has every state: each worker longest first, whole states on one way in, first come first."""
        ends = [0.0]
        sent: list[tuple[float, float]] = []
        for worker in self.workers:
            ordered = sorted(loads.get(worker.worker_id, ()), key=lambda one: (-one.num_tokens, one.key))
            captured = 0
            for segment in ordered:
                captured += segment.num_tokens
                finish = self.finish(worker, captured)
                if worker is self.combine or not segment.num_bytes:
                    ends.append(finish)
                else:
                    way = self.combine.speeds.same_host
                    sent.append((finish, way.latency_seconds + segment.num_bytes / way.bytes_per_second))
        free = 0.0
        for finish, seconds in sorted(sent):
            free = max(free, finish) + seconds
        return max(*ends, free)

    def optimum(self) -> float:
        """The least makespan of all assignments."""
        best = self.makespan({self.combine.worker_id: self.segments})
        ordered = sorted(self.segments, key=lambda one: -one.num_tokens)
        has_bytes = any(one.num_bytes for one in ordered)
        alike = [
            (view.speeds.capture, view.backlog_seconds, has_bytes and not i) for i, view in enumerate(self.workers)
        ]
        kinds = [alike.index(each) for each in alike]
        loads: list[list[ColdSegment]] = [[] for _ in self.workers]
        totals = [0 for _ in self.workers]

        def search(index: int) -> None:
            nonlocal best
            if index == len(ordered):
                best = min(best, self.makespan({view.worker_id: loads[i] for i, view in enumerate(self.workers)}))
                return
            segment = ordered[index]
            seen: set[tuple[int, int]] = set()
            for i, view in enumerate(self.workers):
                total = totals[i] + segment.num_tokens
                if (kinds[i], total) in seen or self.finish(view, total) >= best - _SMALL:
                    continue
                seen.add((kinds[i], total))
                loads[i].append(segment)
                totals[i] = total
                search(index + 1)
                loads[i].pop()
                totals[i] = total - segment.num_tokens

        search(0)
        return best


def round_robin(instance: Instance) -> dict[str, list[ColdSegment]]:
    """In request order, one worker after the other."""
    loads: dict[str, list[ColdSegment]] = {worker.worker_id: [] for worker in instance.workers}
    for index, segment in enumerate(instance.segments):
        loads[instance.workers[index % len(instance.workers)].worker_id].append(segment)
    return loads


def worker_view(name: str, token_seconds: float, pass_seconds: float = 0.0, pass_tokens: int = 1 << 20) -> WorkerView:
    """A free worker of such speeds, to which transfers cost nothing."""
    return WorkerView(name, WorkerSpeeds(CaptureSpeed(pass_seconds, token_seconds, pass_tokens), COMBINE))


def draw(
    source: random.Random, segments: tuple[int, int], workers: tuple[int, int], shape: Callable[[Instance], Instance]
) -> Instance:
    """An instance of equal workers, changed by `shape`."""
    lengths = [source.randint(256, 8192) for _ in range(source.randint(*segments))]
    cold = tuple(ColdSegment(bytes([index]) * 32, length) for index, length in enumerate(lengths))
    views = tuple(worker_view(f"w{index}", 20e-6) for index in range(source.randint(*workers)))
    return shape(Instance(cold, views))


def equal(source: random.Random) -> Callable[[Instance], Instance]:
    """Workers as drawn."""
    return lambda instance: instance


def unequal(source: random.Random) -> Callable[[Instance], Instance]:
    """Speeds up to four times apart, passes with a price, and workers that are still busy."""

    def shape(instance: Instance) -> Instance:
        views = tuple(
            replace(
                worker_view(view.worker_id, 20e-6 * source.uniform(1, 4), 0.03 * source.random()),
                backlog_seconds=0.1 * source.random() if source.random() < 0.5 else 0.0,
            )
            for view in instance.workers
        )
        return replace(instance, workers=views)

    return shape


def transferred(source: random.Random) -> Callable[[Instance], Instance]:
    """Equal workers whose states weigh something; the way is anything from free to slower than capturing."""

    def shape(instance: Instance) -> Instance:
        way = TransferSpeed(1e-3, 10 ** source.uniform(8.5, 11))
        views = tuple(replace(view, speeds=replace(view.speeds, same_host=way)) for view in instance.workers)
        cold = tuple(replace(one, num_bytes=(100 << 20) + (20 << 10) * one.num_tokens) for one in instance.segments)
        return Instance(cold, views)

    return shape
