"""`hypic bench traffic answers`: are answers under load, with updates and evictions, those of a stack that does nothing else."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.results import Row, merge_results
from bench.traffic.bodies import Mode
from bench.traffic.client import Endpoint, find_model, forget
from bench.traffic.connection import Target
from bench.traffic.levels import percentile
from bench.traffic.library import Asked, FactLibrary, judge
from bench.traffic.options import (
    DEMO,
    Device,
    Keys,
    Metrics,
    Url,
    device_name,
    read_callers,
    read_size,
    say,
    told,
)
from bench.traffic.record import Record
from bench.traffic.scrape import COUNTERS, difference, scrape
from bench.traffic.sender import Planned, encode, send_open
from bench.traffic.stack import StackPlan, serve_stack
from eval.live.paired import paired_interval

__all__ = ["AnswersPlan", "AnswersResult", "answers", "check_answers", "rows_of"]

_TENANT = "tenant-0"
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """rate, updates: a second, of questions and of documents that get another text; scenes: see `FactLibrary`."""

    questions: int
    rate: float
    updates: float
    scenes: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class AnswersResult:
    """Questions that were answered both alone and under load, and what the stack did under load.

    stale: replies that another version says; unanswered: under load, by what went wrong.
    """

    judged: int
    alone_right: int
    load_right: int
    broken: int
    mended: int
    stale: int
    unanswered: tuple[str, ...]
    first_token_p50: float
    first_token_p95: float
    composed_share: float
    metrics: dict[str, float]

    @property
    def interval(self) -> tuple[float, float]:
        """Points lost under load, at 95 %."""
        return paired_interval(self.broken, self.mended, self.judged)

    @property
    def is_good(self) -> bool:
        """Nothing is lost beyond chance, and nothing was read from another version."""
        low, high = self.interval
        return self.judged > 0 and low <= 0 <= high and not self.stale


async def check_answers(endpoint: Endpoint, plan: AnswersPlan) -> AnswersResult:
    """The same questions one by one, then at their rate; the cache is empty at the start of both.

    Raises:
        TrafficError: the stack does not answer, or does not forget.
    """
    model, _ = await asyncio.to_thread(find_model, endpoint)
    asked = FactLibrary(plan.seed, plan.scenes).ask(plan.rate, plan.questions, plan.updates)
    await asyncio.to_thread(forget, endpoint, [_TENANT])
    say(f"{plan.questions} questions one by one …")
    alone: list[Record] = []
    for own in asked:
        planned = _planned(own, model, "alone", 0.0)
        alone += await send_open(endpoint, [planned], _PATIENCE_SECONDS, lambda state, elapsed: False)
    await asyncio.to_thread(forget, endpoint, [_TENANT])
    say(f"the same at {plan.rate:g} a second, with {plan.updates:g} updates …")
    before = await asyncio.to_thread(scrape, endpoint.metrics)
    events = [_planned(own, model, "load", own.due) for own in asked]
    load = await send_open(endpoint, events, _PATIENCE_SECONDS, lambda state, elapsed: False)
    behind = await asyncio.to_thread(scrape, endpoint.metrics)
    questions = [own for own in asked if own.body is not None]
    return _compare(questions, alone, load, difference(before, behind, COUNTERS))


def _planned(asked: Asked, model: str, salt: str, due: float) -> Planned:
    if asked.body is None:
        return Planned(due, _TENANT, b"", "DELETE", f"/v1/documents/{asked.document}")
    hypic: dict[str, Any] = {"reuse": Mode.COMPOSE.value, "explain": True}
    return Planned(due, _TENANT, encode(asked.body | {"model": model, "cache_salt": salt, "hypic": hypic}))


def _compare(
    asked: Sequence[Asked], alone: Sequence[Record], load: Sequence[Record], metrics: dict[str, float]
) -> AnswersResult:
    pairs = [
        (judge(own, one.reply), judge(own, other.reply))
        for own, one, other in zip(asked, alone, load, strict=True)
        if one.is_answered and other.is_answered
    ]
    times = sorted(own.first_token for own in load if own.is_answered and own.first_token is not None)
    served = [own.served for own in load if own.is_answered]
    return AnswersResult(
        judged=len(pairs),
        alone_right=sum(one.is_right for one, _ in pairs),
        load_right=sum(other.is_right for _, other in pairs),
        broken=sum(one.is_right and not other.is_right for one, other in pairs),
        mended=sum(other.is_right and not one.is_right for one, other in pairs),
        stale=sum(one.is_stale or other.is_stale for one, other in pairs),
        unanswered=tuple(own.fault or "cut" for own in [*alone, *load] if not own.is_answered),
        first_token_p50=percentile(times, 0.5),
        first_token_p95=percentile(times, 0.95),
        composed_share=sum(own.hit + own.cold for own in served) / max(1, sum(own.total for own in served)),
        metrics=metrics,
    )


def rows_of(result: AnswersResult, plan: AnswersPlan) -> Iterator[Row]:
    """Shares, and what the load was."""
    load = f"{plan.rate:g} requests and {plan.updates:g} updates a second"
    low, high = result.interval
    yield Row("exact match, one by one", 100 * result.alone_right / result.judged, "%")
    yield Row(f"exact match, {load}", 100 * result.load_right / result.judged, "%")
    lost = 100 * (result.broken - result.mended) / result.judged
    yield Row(f"points lost under load (95 %: {low:.1f} to {high:.1f})", lost, "points", better="lower")
    yield Row("answers that another version of a document says", result.stale, "", 0.0, "lower")
    yield Row("questions", result.judged, "")
    yield Row("unanswered", len(result.unanswered), "", better="lower")
    yield Row("composed tokens under load", 100 * result.composed_share, "%")
    yield Row("TTFT p50 under load", result.first_token_p50, "s", better="lower")
    yield Row("TTFT p95 under load", result.first_token_p95, "s", better="lower")
    for name in ("evicted_entries", "invalidated_entries"):
        if name in result.metrics:
            yield Row(f"{name.replace('_', ' ')} under load", result.metrics[name], "")


def answers(  # noqa: PLR0913 # one parameter an option
    questions: Annotated[int, typer.Option(min=1, help="How many are asked, twice.")] = 150,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second under load.")] = 2.0,
    updates: Annotated[float, typer.Option(min=0, help="Documents a second that get another text.")] = 0.2,
    scenes: Annotated[int, typer.Option(min=1, help="Sets of eight documents, asked about by Zipf's law.")] = 24,
    cache_memory: Annotated[str, typer.Option(help="Of the own stack's cache: so little that it evicts.")] = "80MiB",
    url: Url = None,
    key: Keys = None,
    metrics: Metrics = None,
    model: Annotated[Path, typer.Option(help="Checkpoint of the own stack; it must answer such questions.")] = DEMO,
    device: Device = "cpu",
    out: Annotated[Path | None, typer.Option(help="Result file; without it rows are printed only.")] = None,
) -> None:
    """Ask the same questions one by one and under load, with documents that change and a cache that evicts.

    Every version of a document states other values, so that an answer read from a version that its request did not bring is
    seen. Status: 0 equal within the interval; 1 not, or a stale answer; 2 an option or the stack cannot be used.
    """
    plan = AnswersPlan(questions, rate, updates, scenes)
    with told():
        remote = None if url is None else Endpoint(Target(url), read_callers(key or [], 1), metrics or ())
        variables = {"HYPIC_CACHE_BUDGET_BYTES": str(read_size("--cache-memory", cache_memory))}
        result = asyncio.run(_check(plan, remote, StackPlan(model, device=device, variables=variables)))
    for fault in dict.fromkeys(result.unanswered):
        say(f"unanswered: {fault}")
    rows = list(rows_of(result, plan)) if result.judged else []
    for row in rows:
        typer.echo(f"{row.value:10.4g} {row.unit:7} {row.measure}")
    if out and rows:
        command = " ".join(["hypic bench traffic", *sys.argv[1:]])
        merge_results(out, command, device_name(device), "answers", rows)
    raise typer.Exit(0 if result.is_good else 1)


async def _check(plan: AnswersPlan, remote: Endpoint | None, stack: StackPlan) -> AnswersResult:
    async with AsyncExitStack() as exits:
        endpoint = remote
        if endpoint is None:
            endpoint = await exits.enter_async_context(serve_stack(stack))
        return await check_answers(endpoint, plan)
