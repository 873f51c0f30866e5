"""From a request to a plan: which stored states it uses, what becomes of the parts whose state is gone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.worker.engine.arrivals import Arrivals
from services.worker.engine.capture import check_body, pages_of
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.prompt_refresh import most_tokens, refresh_plan, refresh_served
from services.worker.engine.refresh import Refreshed
from services.worker.engine.refreshed_rows import attention_depth
from services.worker.engine.requests import (
    CaptureSegment,
    GenerateRequest,
    PromptPart,
    PromptTooLargeError,
    ServedPart,
    Serving,
)
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.transfer import IncomingState, body_pages_of

__all__ = [
    "ARRIVING_TIER",
    "CAPTURE_FAILED",
    "NOTHING_REFUSED",
    "NO_ROOM",
    "Refusals",
    "ResolvedPrompt",
    "check_size",
    "resolve",
    "resolve_live",
]

CAPTURE_FAILED, NO_ROOM = "capture_failed", "no_room"

_TIER = "worker"
# Of a state that comes while the prompt waits for it.
ARRIVING_TIER = "arriving"


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """a plan, how each part of the request is served, and how many leading parts the prefix covers.

    cold: segments to capture, fetched: segments to bring from elsewhere, each once; where they stand, the plan has empty states
    until `compose` gives it real ones. arriving: states that it uses and that are on their way already.
    """

    plan: CombinePlan
    served: tuple[ServedPart, ...]
    first_part: int
    cold: tuple[CaptureSegment, ...] = ()
    fetched: tuple[CaptureSegment, ...] = ()
    arriving: tuple[IncomingState, ...] = ()

    def pages_needed(self, context: EngineContext) -> int:
        """Pages of the prompt, and of what is captured or fetched for it."""
        captured = sum(pages_of(context, segment.token_ids) for segment in self.cold)
        fetched = sum(body_pages_of(context, segment.token_ids) for segment in self.fetched)
        return self.plan.pages_needed(context.pages.page_size) + captured + fetched

    def num_as_asked(self, request: GenerateRequest) -> int:
        """Leading parts of which none that was to be reused is computed in place, as a whole or block by block."""
        pairs = enumerate(zip(request.parts, self.served, strict=True))
        return next((index for index, pair in pairs if not _is_as_asked(*pair)), len(self.served))

    def refresh(self, refreshed: Refreshed) -> "ResolvedPrompt":
        """With blocks of the plan's parts live."""
        served = refresh_served(self.served[self.first_part :], self.plan, refreshed)
        return replace(self, plan=refresh_plan(self.plan, refreshed), served=(*self.served[: self.first_part], *served))

    def compose(self, request: GenerateRequest, states: Mapping[bytes, SegmentState]) -> CombinePlan:
        """The plan with the states of what is captured and fetched, by key."""
        parts = [
            part if part.state is None else replace(part, state=states.get(asked.key, part.state))
            for part, asked in zip(self.plan.parts, request.parts[self.first_part :], strict=True)
        ]
        return replace(self.plan, parts=tuple(parts))


def check_size(request: GenerateRequest, limits: EngineLimits, num_pages: int, page_size: int) -> None:
    """Refuse what can never be served by `num_pages` pages.

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
    needed = resolve_live(request).plan.pages_needed(page_size)
    if needed > num_pages:
        raise PromptTooLargeError(
            f"{total} tokens need {needed} pages and the worker has {num_pages} for prompts; "
            "raise HYPIC_WORKER_PAGE_BYTES, or HYPIC_WORKER_MEMORY_BYTES where that is set"
        )


@dataclass(frozen=True, slots=True)
class Refusals:
    """Why parts are computed in place that could be reused. captures: of all that are to be captured; fetches: of all that are
    to be fetched; keys: of single states that failed to come; refresh: whether one has failed, so that there is none.
    """

    captures: str = ""
    fetches: str = ""
    keys: Mapping[bytes, str] = field(default_factory=dict)
    refresh: bool = False

    def of_fetch(self, key: bytes) -> str:
        """Why the state under a key is not fetched; empty where it may be."""
        return self.fetches or self.keys.get(key, "")


NOTHING_REFUSED = Refusals()


def resolve(
    context: EngineContext, request: GenerateRequest, arrivals: Arrivals, refusals: Refusals = NOTHING_REFUSED
) -> ResolvedPrompt:
    """Look up every state now; a part whose state is gone is computed in place, and says so."""
    covered = _covered_parts(request)
    prefix = _find_prefix(context, request, covered) if covered else None
    first_part = covered if prefix is not None else 0
    served: list[ServedPart] = []
    parts: list[CombinePart] = []
    keep = _kept_parts(request)
    cold = {} if refusals.captures else _find_cold(context, request, first_part)
    new = set(cold)
    fetched: dict[bytes, tuple[int, ...]] = {}
    arriving: dict[bytes, IncomingState] = {}
    for index, part in enumerate(request.parts):
        if index < first_part:
            served.append(ServedPart(Serving.PREFIX, 0, len(part.token_ids), _TIER))
            continue
        is_last = index == len(request.parts) - 1
        state = None if is_last else _find_segment(context, part)
        if state is None and not is_last and cold.get(part.key) == part.token_ids:
            state = _empty_state(context, part.token_ids)
            served.append(_captured(state) if part.key in new else _served(part, state, ""))
            new.discard(part.key)
        elif state is None and not is_last and part.is_fetched and not refusals.of_fetch(part.key):
            state = _find_arriving(context, part, arrivals, fetched, arriving)
            served.append(_served(part, state, "fetch_failed", ARRIVING_TIER))
        else:
            served.append(_served(part, state, "last_part" if is_last else _why_missing(context, part, refusals)))
        parts.append(CombinePart(part.token_ids, state, keep=index in keep))
    plan = CombinePlan(prefix, tuple(parts), request.sampling.max_tokens)
    if request.refresh is not None and not refusals.refresh and attention_depth(context):
        plan = replace(plan, refresh_tokens=most_tokens(plan, request.refresh))
    return ResolvedPrompt(
        plan,
        tuple(served),
        first_part,
        tuple(CaptureSegment(*each) for each in cold.items()),
        tuple(CaptureSegment(*each) for each in fetched.items()),
        tuple(arriving.values()),
    )


def resolve_live(request: GenerateRequest) -> ResolvedPrompt:
    """Compute every part in place: what `check_size` let pass fits an engine that runs nothing else.

    Bodies start pages of their own, so a prompt that uses stored states may need more pages at once than it needs without
    them.
    """
    keep = _kept_parts(request)
    parts = tuple(CombinePart(part.token_ids, keep=index in keep) for index, part in enumerate(request.parts))
    served = tuple(_served(part, None, NO_ROOM) for part in request.parts)
    return ResolvedPrompt(CombinePlan(None, parts, request.sampling.max_tokens), served, 0)


def _is_as_asked(asked: PromptPart, done: ServedPart) -> bool:
    is_fallen = done.serving is Serving.LIVE and asked.serving is not Serving.LIVE
    return not is_fallen and not done.refreshed_tokens


def _kept_parts(request: GenerateRequest) -> frozenset[int]:
    """Parts behind which a snapshot is wanted."""
    return frozenset(order.after_part - 1 for order in request.snapshots)


def _covered_parts(request: GenerateRequest) -> int:
    """Leading parts that a prefix is to serve; never the last one, whose logits start the answer."""
    serving = [part.serving is Serving.PREFIX for part in request.parts]
    covered = serving.index(False) if False in serving else len(serving)
    return min(covered, len(request.parts) - 1)


def _find_prefix(context: EngineContext, request: GenerateRequest, covered: int) -> PrefixState | None:
    token_ids = [token for part in request.parts[:covered] for token in part.token_ids]
    return context.store.get_prefix(request.prefix_key, token_ids)


def _find_segment(context: EngineContext, part: PromptPart) -> SegmentState | None:
    if part.serving is not Serving.SEGMENT:
        return None
    return context.store.get_segment(part.key, part.token_ids)


def _find_arriving(
    context: EngineContext,
    part: PromptPart,
    arrivals: Arrivals,
    fetched: dict[bytes, tuple[int, ...]],
    arriving: dict[bytes, IncomingState],
) -> SegmentState | None:
    """A state on its way, or an empty one for what is to be fetched; None where other tokens have the key."""
    incoming = arrivals.find(part.key, part.token_ids)
    if incoming is not None:
        arriving[part.key] = incoming
        return incoming.state
    if arrivals.is_taken(part.key) or fetched.setdefault(part.key, part.token_ids) != part.token_ids:
        return None
    return _empty_state(context, part.token_ids)


def _find_cold(context: EngineContext, request: GenerateRequest, first_part: int) -> dict[bytes, tuple[int, ...]]:
    """Token ids by key of what is ordered, not stored, and has a body; of two texts under one key the first counts.

    No more than the store has planes for beside what else the prompt uses of it: until its sweep ends they are all held.
    """
    parts = request.parts[first_part:-1]
    each = sum(shape.plane_bytes(context.memory.dtype.itemsize) for shape in context.model.spec.states)
    room = context.store.capacity_bytes // max(1, each) - len({part.key for part in parts if part.key in context.store})
    cold: dict[bytes, tuple[int, ...]] = {}
    for part in parts:
        if part.captures and part.key not in context.store and _has_body(context, part.token_ids) and len(cold) < room:
            cold.setdefault(part.key, part.token_ids)
    return cold


def _why_missing(context: EngineContext, part: PromptPart, refusals: Refusals) -> str:
    if part.is_fetched:
        return refusals.of_fetch(part.key)
    if not part.captures:
        return "state_dropped"
    return refusals.captures or (NO_ROOM if _has_body(context, part.token_ids) else CAPTURE_FAILED)


def _has_body(context: EngineContext, token_ids: tuple[int, ...]) -> bool:
    try:
        check_body(context, token_ids)
    except ValueError:
        return False
    return True


def _empty_state(context: EngineContext, token_ids: tuple[int, ...]) -> SegmentState:
    return SegmentState(token_ids, context.profile.seam_window.tokens(len(token_ids)), (), ())


def _captured(state: SegmentState) -> ServedPart:
    return ServedPart(Serving.SEGMENT, state.seam_window, 0, _TIER, captured_tokens=state.body_tokens)


def _served(part: PromptPart, state: SegmentState | None, reason: str, tier: str = _TIER) -> ServedPart:
    if state is not None:
        return ServedPart(Serving.SEGMENT, state.seam_window, state.body_tokens, tier)
    was_asked = part.serving is not Serving.LIVE
    return ServedPart(Serving.LIVE, len(part.token_ids), 0, reason=reason if was_asked else "")
