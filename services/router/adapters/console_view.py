"""What the console's template draws: strips of parts and stages, and rows of tables, from the router's own records."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from services.router.domain.explain import PartExplanation, Seconds
from services.router.domain.parts import PartKind
from services.router.domain.plan import Served
from services.router.domain.recent import RequestRecord
from services.router.domain.store import WorkerStatus

__all__ = ["STAGES", "Piece", "RequestView", "TierTotal", "bytes_text", "seconds_text", "tier_totals", "view_request"]

STAGES = ("plan", "capture", "queue", "fetch", "combine")
_SHORT_ID = 12


@dataclass(frozen=True, slots=True)
class Piece:
    """A coloured run of a strip, in units of the strip's whole; `note` is shown to whoever points at it."""

    style: str
    start: float
    width: float
    note: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """One row."""

    clock: str
    request_id: str
    short_id: str
    record: RequestRecord
    tokens: int
    parts: tuple[Piece, ...]
    stages: tuple[Piece, ...]
    stages_text: str


@dataclass(frozen=True, slots=True)
class TierTotal:
    """One tier of all workers."""

    tier: str
    num_workers: int
    num_states: int
    used_bytes: int
    capacity_bytes: int

    @property
    def percent(self) -> float:
        """How full it is; 0 where its room is not known."""
        return 100 * self.used_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


def view_request(record: RequestRecord) -> RequestView:
    """A record as it is drawn."""
    request_id = record.subject.request_id
    return RequestView(
        clock=datetime.fromtimestamp(record.ended_at, UTC).strftime("%H:%M:%S"),
        request_id=request_id,
        short_id=request_id if len(request_id) <= _SHORT_ID else request_id[: _SHORT_ID - 1] + "…",
        record=record,
        tokens=sum(part.tokens for part in record.parts),
        parts=tuple(_laid_out(run for part in record.parts for run in _runs(part))),
        stages=tuple(_laid_out(_stage_runs(record.stages))) if record.stages else (),
        stages_text=_stages_text(record.stages) if record.stages else "",
    )


@dataclass(frozen=True, slots=True)
class _Run:
    style: str
    width: float
    note: str


def _runs(part: PartExplanation) -> Iterator[_Run]:
    """Live tokens stand at a composed segment's head: its seam window. What of it is refreshed stands anywhere behind that."""
    is_composed = part.kind is PartKind.SEGMENT and part.served in (Served.HIT, Served.COLD)
    note = _note(part)
    yield _Run("seam" if is_composed else "live", part.live_tokens - part.refreshed_tokens, note)
    yield _Run("live", part.refreshed_tokens, note)
    yield _Run("cold", part.captured_tokens, note)
    yield _Run("prefix" if part.served is Served.PREFIX else "hit", part.reused_tokens, note)


def _note(part: PartExplanation) -> str:
    words = [f"{part.kind.value} {part.document_id}".strip(), f"{part.tokens} tokens", part.served.value]
    words += [f"from {part.tier}"] if part.tier else []
    words += [part.reason] if part.reason else []
    return ", ".join(words)


def _stage_runs(stages: Seconds) -> Iterator[_Run]:
    for name in STAGES:
        seconds = getattr(stages, name)
        yield _Run(name, seconds, f"{name} {seconds_text(seconds)}")


def _stages_text(stages: Seconds) -> str:
    """Those that took a hundredth of it all."""
    runs = tuple(_stage_runs(stages))
    least = sum(run.width for run in runs) / 100
    return " · ".join(run.note for run in runs if run.width > least)


def _laid_out(runs: Iterable[_Run]) -> Iterator[Piece]:
    """One behind the other, in thousandths of the whole."""
    shown = [run for run in runs if run.width > 0]
    total = sum(run.width for run in shown)
    start = 0.0
    for run in shown:
        width = 1000 * run.width / total
        yield Piece(run.style, round(start, 2), round(width, 2), run.note)
        start += width


def tier_totals(workers: Sequence[WorkerStatus]) -> tuple[TierTotal, ...]:
    """What all workers hold, by tier, in the order in which workers name them."""
    found: dict[str, list[int]] = {}
    for worker in workers:
        for usage in worker.tiers:
            total = found.setdefault(usage.tier, [0, 0, 0, 0])
            for index, value in enumerate((1, usage.num_states, usage.used_bytes, usage.capacity_bytes)):
                total[index] += value
    return tuple(TierTotal(tier, *total) for tier, total in found.items())


def seconds_text(seconds: float) -> str:
    """Three digits and a unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms" if seconds >= 0.0005 else "0 ms"


def bytes_text(size: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
