"""All that one prompt needs, taken together or not at all."""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from services.worker.engine.admission import ResolvedPrompt
from services.worker.engine.arrivals import Arrivals
from services.worker.engine.combine import CombinePass
from services.worker.engine.context import EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.ordered_captures import OrderedCaptures
from services.worker.engine.pages import NoRoomError
from services.worker.engine.requests import GenerateRequest
from services.worker.engine.states import PrefixState
from services.worker.engine.transfer import IncomingState

__all__ = ["PromptRoom", "reserve"]


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """combine: its live tokens, reply and slot; captures: of what it orders; incoming: of what is fetched for it, by key."""

    combine: CombinePass
    captures: OrderedCaptures
    incoming: Mapping[bytes, IncomingState]


def reserve(
    context: EngineContext,
    arrivals: Arrivals,
    resolved: ResolvedPrompt,
    request: GenerateRequest,
    protected: Collection[bytes],
    prime: PrefixState | None,
    limits: EngineLimits,
) -> PromptRoom:
    """Room for a prompt; stored states other than the protected ones make it.

    Raises:
        NoRoomError: it is not to be had now; nothing is taken.
    """
    if not context.store.make_room(resolved.pages_needed(context), protected):
        raise NoRoomError("stored states cannot make room for the prompt")
    with ExitStack() as undo:
        incoming: dict[bytes, IncomingState] = {}
        for segment in resolved.fetched:
            one = arrivals.begin(segment.key, segment.token_ids, protected)
            incoming[segment.key] = one
            undo.callback(arrivals.fail, segment.key, one)
        captures = OrderedCaptures(context, resolved.cold, prime, limits.capture_tokens, request.sink)
        undo.callback(captures.abandon)
        states = captures.states | {key: one.state for key, one in incoming.items()}
        combine = CombinePass(context, resolved.compose(request, states))
        undo.pop_all()
    return PromptRoom(combine, captures, incoming)
