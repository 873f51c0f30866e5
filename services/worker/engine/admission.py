"""From a request to a plan: which stored states it uses, what becomes of the parts whose state is gone."""

from dataclasses import dataclass

from services.worker.engine.combine import CombinePart, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import GenerateRequest, PromptPart, PromptTooLargeError, ServedPart, Serving
from services.worker.engine.states import PrefixState, SegmentState

__all__ = ["ResolvedPrompt", "check_size", "resolve"]

_TIER = "worker"


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """a plan, how each part of the request is served, and how many leading parts the prefix covers."""

    plan: CombinePlan
    served: tuple[ServedPart, ...]
    first_part: int


def check_size(context: EngineContext, limits: EngineLimits, request: GenerateRequest) -> None:
    """Refuse what can never be served.

    Raises:
        PromptTooLargeError: the message names the limit.
    """
    prompt = sum(len(part.token_ids) for part in request.parts)
    total = prompt + request.sampling.max_tokens
    if total > limits.context_length:
        raise PromptTooLargeError(
            f"{prompt} prompt tokens and max_tokens {request.sampling.max_tokens} exceed the context length "
            f"of {limits.context_length}"
        )
    parts = tuple(CombinePart(part.token_ids) for part in request.parts)
    needed = CombinePlan(None, parts, request.sampling.max_tokens).pages_needed(context.pages.page_size)
    if needed > context.pages.num_pages:
        raise PromptTooLargeError(
            f"{total} tokens need {needed} pages and the worker has {context.pages.num_pages}; "
            "raise HYPIC_WORKER_PAGE_BYTES"
        )


def resolve(context: EngineContext, request: GenerateRequest) -> ResolvedPrompt:
    """Look up every state now; a part whose state is gone is computed in place, and says so."""
    covered = _covered_parts(request)
    prefix = _find_prefix(context, request, covered) if covered else None
    first_part = covered if prefix is not None else 0
    served: list[ServedPart] = []
    parts: list[CombinePart] = []
    keep = {order.after_part - 1 for order in request.snapshots}
    for index, part in enumerate(request.parts):
        if index < first_part:
            served.append(ServedPart(Serving.PREFIX, 0, len(part.token_ids), _TIER))
            continue
        state = _find_segment(context, part, last=index == len(request.parts) - 1)
        served.append(_served(part, state))
        parts.append(CombinePart(part.token_ids, state, keep=index in keep))
    plan = CombinePlan(prefix, tuple(parts), request.sampling.max_tokens)
    return ResolvedPrompt(plan, tuple(served), first_part)


def _covered_parts(request: GenerateRequest) -> int:
    """Leading parts that a prefix is to serve; never the last one, whose logits start the answer."""
    serving = [part.serving is Serving.PREFIX for part in request.parts]
    covered = serving.index(False) if False in serving else len(serving)
    return min(covered, len(request.parts) - 1)


def _find_prefix(context: EngineContext, request: GenerateRequest, covered: int) -> PrefixState | None:
    token_ids = [token for part in request.parts[:covered] for token in part.token_ids]
    return context.store.get_prefix(request.prefix_key, token_ids)


def _find_segment(context: EngineContext, part: PromptPart, last: bool) -> SegmentState | None:
    if part.serving is not Serving.SEGMENT or last:
        return None
    return context.store.get_segment(part.key, part.token_ids)


def _served(part: PromptPart, state: SegmentState | None) -> ServedPart:
    if state is not None:
        return ServedPart(Serving.SEGMENT, state.seam_window, state.body_tokens, _TIER)
    reason = "" if part.serving is Serving.LIVE else "state_dropped"
    return ServedPart(Serving.LIVE, len(part.token_ids), 0, reason=reason)
