"""The state behind a reply's message, from which the conversation's next turn goes on."""

from services.worker.engine.context import EngineContext
from services.worker.engine.decode import RunningRequest
from services.worker.engine.pages import NoRoomError
from services.worker.engine.requests import TurnHeldEvent, TurnHold
from services.worker.engine.states import PrefixState
from services.worker.mixers.batch import LinearSnapshot

__all__ = ["hold_turn"]


def hold_turn(context: EngineContext, running: RunningRequest, hold: TurnHold) -> None:
    """Store the state of a request that has run the end of its message, and say so.

    It shares the request's pages. The store may evict it as any other state before anybody asks for it.
    """
    slot, request = running.prompt.slot, running.request
    token_ids = (*request.prompt_ids, *running.reply, *hold.closing_ids)
    snapshots = tuple(
        LinearSnapshot(slots.states[slot].clone(), slots.tails[slot].clone()) for slots in context.memory.linear_slots
    )
    state = PrefixState(token_ids, snapshots, tuple(running.prompt.table.entries))
    context.pages.retain(state.pages)
    try:
        context.store.put(hold.key, state)
    except (NoRoomError, ValueError):
        context.pages.release(state.pages)
        request.sink(TurnHeldEvent(0))
    else:
        request.sink(TurnHeldEvent(context.store.size_bytes(state)))
