"""States behind replies: kept as prefix snapshots where the next turn of the conversation begins with just their tokens."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import HypicError
from services.common.telemetry import get_logger
from services.router.domain.entries import CacheEntry
from services.router.domain.plan import Outcome
from services.router.domain.ports import Workers
from services.router.domain.request import ChatPrompt, PromptError, Reuse
from services.router.domain.turn import TurnEnd, next_turn, turn_entry
from services.router.served_model import ServedModel

__all__ = ["EndedTurn", "TurnCounts", "TurnKeeper"]


class TurnCounts(Protocol):
    """Hears of every reply behind which a state was wanted."""

    def count_turn(self, end: TurnEnd) -> None:
        """It was kept, or not."""
        ...


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A reply that has ended. token_ids: of prompt, reply and the end of its message.

    held_key: of the state that the worker holds behind it; empty where it holds none, for the reason `end`.
    """

    model: ServedModel
    prompt: ChatPrompt
    reuse: Reuse
    reply: str
    token_ids: tuple[int, ...]
    worker_id: str
    held_key: bytes
    end: TurnEnd = TurnEnd.KEPT


Claim = Callable[[CacheEntry], Awaitable[Outcome | None]]


class TurnKeeper:
    """Works behind replies: nobody waits for it, and a worker that hears nothing drops what it holds."""

    def __init__(self, workers: Workers, counts: TurnCounts, timeout_seconds: float) -> None:
        self._workers = workers
        self._counts = counts
        self._timeout_seconds = timeout_seconds

    async def finish(self, turn: EndedTurn, claim: Claim) -> None:
        """Keep the state behind a turn, or have it dropped. claim: the directory's answer; None where it has fallen."""
        end = turn.end
        try:
            if end is TurnEnd.KEPT:
                end = await self._keep(turn, claim)
            if end is not TurnEnd.KEPT and turn.held_key:
                await self._workers.find(turn.worker_id).drop([turn.held_key], self._timeout_seconds)
        except HypicError as error:
            get_logger().warning("turn_not_kept", error=str(error))
            end = TurnEnd.FAILED
        self._counts.count_turn(end)

    async def _keep(self, turn: EndedTurn, claim: Claim) -> TurnEnd:
        entry = await self._find_entry(turn)
        if entry is None:
            return TurnEnd.OTHER_IDS
        outcome = await claim(entry)
        if outcome is None:
            return TurnEnd.INVALIDATED
        if outcome.ticket is None:
            return TurnEnd.KNOWN
        worker = self._workers.find(turn.worker_id)
        reason = await worker.keep(turn.held_key, outcome.key, outcome.ticket, self._timeout_seconds)
        return TurnEnd.REFUSED if reason else TurnEnd.KEPT

    async def _find_entry(self, turn: EndedTurn) -> CacheEntry | None:
        following = next_turn(turn.prompt, turn.reply)
        if following is None:
            return None
        try:
            prompt = await turn.model.assemble(following)
        except PromptError:
            # The conversation has come to an end, as the template or the context has it.
            return None
        return turn_entry(prompt, turn.token_ids, turn.model.info.profile, turn.reuse)
