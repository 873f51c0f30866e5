"""What a request cost and what was reused: the counts add up to the prompt."""

from dataclasses import dataclass

from services.router.domain.cold_choice import ColdChoice
from services.router.domain.parts import PartKind, Reason
from services.router.domain.plan import PartPlan, Plan, Served
from services.router.domain.ports import DecodedBy, PartServing, Prefilled, ServedPart
from services.router.domain.schedule import Schedule

__all__ = [
    "CaptureExplanation",
    "DecodeExplanation",
    "Explanation",
    "FetchExplanation",
    "PartExplanation",
    "PlacingExplanation",
    "Seconds",
    "Usage",
    "explain_decode",
    "explain_parts",
    "explain_placing",
]


@dataclass(frozen=True, slots=True)
class CaptureExplanation:
    """A capture beside the combine: who did it and why that worker; seconds from its order on, None where it has not ended."""

    worker: str
    cause: str
    seconds: float | None


@dataclass(frozen=True, slots=True)
class FetchExplanation:
    """The worker that a state was fetched from; empty for a lower tier of the one that combined."""

    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """One part. `tokens = live_tokens + captured_tokens + reused_tokens`; only the last were not computed.

    `planned` is the directory's first answer, `served` what was done in the end; `reason` is set when any token that
    reuse could have spared was computed. refreshed_tokens: those of the live ones that a refresh recomputed.
    """

    kind: PartKind
    document_id: str
    title: str
    tokens: int
    planned: Served
    served: Served
    live_tokens: int
    captured_tokens: int
    reused_tokens: int
    tier: str
    reason: str | None
    capture: CaptureExplanation | None = None
    fetch: FetchExplanation | None = None
    refreshed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacingExplanation:
    """Who combined the prompt, and what was expected of it when it was chosen, in seconds."""

    worker: str
    expected_fetch: float
    expected_combine: float
    expected_time_to_first_token: float


@dataclass(frozen=True, slots=True)
class DecodeExplanation:
    """The engine that wrote the reply, and what it began from, and why not from the composed state.

    began_from: `state`; `prompt` where it computed that itself; `worker` where the worker that combined went on.
    """

    engine: str
    began_from: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time went."""

    plan: float
    capture: float
    fetch: float
    queue: float
    combine: float
    decode: float
    time_to_first_token: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; `cached_tokens` of the prompt were not computed for it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reply's `hypic` object. cold: the policy; cold_choice: what it came to, where it is `auto` and a segment was cold.

    refresh: blocks, or `auto` within ttft_budget_seconds.
    """

    reuse: str
    cold: str
    parts: tuple[PartExplanation, ...]
    seconds: Seconds
    placing: PlacingExplanation
    decode: DecodeExplanation | None = None
    cold_choice: ColdChoice | None = None
    refresh: int | str = 0
    ttft_budget_seconds: float | None = None


def explain_decode(decoded_by: DecodedBy | None) -> DecodeExplanation | None:
    """Where another engine than the combine worker may have decoded."""
    if decoded_by is None:
        return None
    return DecodeExplanation(decoded_by.engine, decoded_by.began_from.value, decoded_by.reason or None)


def explain_parts(plan: Plan, prefilled: Prefilled) -> tuple[PartExplanation, ...]:
    """Join what was planned with what the worker did.

    Raises:
        ValueError: the worker's counts do not add up to the prompt.
    """
    if len(prefilled.parts) != len(plan.parts):
        raise ValueError(f"the worker reports {len(prefilled.parts)} parts of {len(plan.parts)}")
    return tuple(_explain(each, done) for each, done in zip(plan.parts, prefilled.parts, strict=True))


def explain_placing(schedule: Schedule) -> PlacingExplanation:
    """What a schedule expected."""
    chosen = schedule.combine
    return PlacingExplanation(
        worker=chosen.worker_id,
        expected_fetch=chosen.fetch_seconds,
        expected_combine=chosen.combine_seconds,
        expected_time_to_first_token=schedule.first_token_seconds,
    )


def _explain(each: PartPlan, done: ServedPart) -> PartExplanation:
    if done.live_tokens + done.captured_tokens + done.reused_tokens != each.part.num_tokens:
        raise ValueError(
            f"the worker reports {done.live_tokens} live, {done.captured_tokens} captured and {done.reused_tokens} reused"
            f" tokens of a part of {each.part.num_tokens}"
        )
    fell_back = each.served is not Served.LIVE and done.serving is PartServing.LIVE
    was_captured_ahead = each.captured is not None and not each.repeats
    reused_tokens = 0 if was_captured_ahead else done.reused_tokens
    served = Served.LIVE if fell_back else each.served
    if served is Served.COLD and reused_tokens:
        served = Served.HIT
    return PartExplanation(
        kind=each.part.kind,
        document_id=each.part.document_id,
        title=each.part.title,
        tokens=each.part.num_tokens,
        planned=each.first,
        served=served,
        live_tokens=done.live_tokens,
        captured_tokens=done.captured_tokens + done.reused_tokens - reused_tokens,
        reused_tokens=reused_tokens,
        tier=done.tier or each.tier if done.reused_tokens or done.captured_tokens else "",
        reason=(each.failure or done.reason or Reason.STATE_DROPPED) if fell_back else _reason(each, served, done),
        capture=_capture(each),
        fetch=FetchExplanation(done.source, done.fetch_seconds) if done.fetch_seconds else None,
        refreshed_tokens=done.refreshed_tokens,
    )


def _capture(each: PartPlan) -> CaptureExplanation | None:
    done = each.captured
    if done is None:
        return None
    return CaptureExplanation(done.worker_id, done.cause, None if done.wait_seconds else done.seconds)


def _reason(each: PartPlan, served: Served, done: ServedPart) -> str | None:
    reason = None if served in (Served.HIT, Served.PREFIX) else each.reason
    return reason or (Reason.REFRESHED if done.refreshed_tokens else None)
