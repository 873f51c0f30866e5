"""What a request cost and what was reused: the counts add up to the prompt."""

from dataclasses import dataclass

from services.router.domain.parts import PartKind, Reason
from services.router.domain.plan import PartPlan, Plan, Served
from services.router.domain.ports import PartServing, Prefilled, ServedPart

__all__ = ["Explanation", "PartExplanation", "Seconds", "Usage", "explain_parts"]


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """One part. `tokens = live_tokens + captured_tokens + reused_tokens`; only the last were not computed.

    `planned` is the directory's first answer, `served` what was done in the end; `reason` is set when any token that
    reuse could have spared was computed.
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
    """The reply's `hypic` object."""

    reuse: str
    cold: str
    parts: tuple[PartExplanation, ...]
    seconds: Seconds


def explain_parts(plan: Plan, prefilled: Prefilled) -> tuple[PartExplanation, ...]:
    """Join what was planned with what the worker did.

    Raises:
        ValueError: the worker's counts do not add up to the prompt.
    """
    if len(prefilled.parts) != len(plan.parts):
        raise ValueError(f"the worker reports {len(prefilled.parts)} parts of {len(plan.parts)}")
    return tuple(_explain(each, done) for each, done in zip(plan.parts, prefilled.parts, strict=True))


def _explain(each: PartPlan, done: ServedPart) -> PartExplanation:
    if done.live_tokens + done.captured_tokens + done.reused_tokens != each.part.num_tokens:
        raise ValueError(
            f"the worker reports {done.live_tokens} live, {done.captured_tokens} captured and {done.reused_tokens} reused"
            f" tokens of a part of {each.part.num_tokens}"
        )
    fell_back = each.served is not Served.LIVE and done.serving is PartServing.LIVE
    was_captured_ahead = each.is_captured and not each.repeats
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
        reason=(done.reason or Reason.STATE_DROPPED) if fell_back else _reason(each, served),
    )


def _reason(each: PartPlan, served: Served) -> str | None:
    return None if served in (Served.HIT, Served.PREFIX) else each.reason
