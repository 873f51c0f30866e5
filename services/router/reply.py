"""From a worker's events to the text of one reply."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from services.common.errors import InternalError
from services.router.domain.explain import (
    Explanation,
    PartExplanation,
    Seconds,
    Usage,
    explain_decode,
    explain_parts,
    explain_placing,
)
from services.router.domain.parts import PartKind
from services.router.domain.placing import PlacedPrompt
from services.router.domain.plan import Plan, Served
from services.router.domain.ports import (
    DecodedBy,
    Finished,
    FinishReason,
    GenerateEvent,
    Prefilled,
    TokenLogprobs,
    Tokens,
)
from services.router.domain.request import ChatPrompt, GenerationRequest, Reuse
from services.router.domain.shown_tokens import PendingTokens, ShownToken
from services.router.domain.stops import StopFilter, StopResult
from services.router.domain.text_ports import Detokenizer
from services.router.domain.turn import TurnEnd
from services.router.served_model import ServedModel
from services.router.turns import EndedTurn

__all__ = ["Delta", "Done", "PlanningSeconds", "Reply", "ReplyEvent", "Started"]


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is computed; from here on a failure is reported inside the stream."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a choice's text, with the tokens that begin in it where their log probabilities were asked for.

    Empty only where tokens without text end the reply.
    """

    text: str
    tokens: tuple[ShownToken, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a choice. `stop`: the stop string that ended it."""

    reason: FinishReason
    usage: Usage
    explanation: Explanation
    choice: int = 0
    stop: str = ""


ReplyEvent = Started | Delta | Done


@dataclass(frozen=True, slots=True)
class PlanningSeconds:
    """Seconds before the worker was called."""

    plan: float
    capture: float


class Reply:
    """Consumes a worker's events in order; `is_done` is set once nothing more is wanted from it.

    note_captures: completes a plan with how captures by other workers have ended by now.
    """

    def __init__(
        self,
        request: GenerationRequest,
        placed: PlacedPrompt,
        planning: PlanningSeconds,
        detokenizer: Detokenizer,
        note_captures: Callable[[Plan], Plan],
    ) -> None:
        self._request = request
        self._note_captures = note_captures
        self._placed = placed
        self._planning = planning
        self._detokenizer = detokenizer
        self._stops = StopFilter(request.stop)
        self._parts: tuple[PartExplanation, ...] = ()
        self._prefilled: Prefilled | None = None
        self._decoded_by: DecodedBy | None = None
        self._first_token_seconds = 0.0
        self._num_tokens = self._num_characters = self._num_shown = 0
        self._pending = PendingTokens(detokenizer.spell)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._end = TurnEnd.STOP
        self._held_key = b""
        self.is_done = False

    def take(self, event: GenerateEvent, elapsed_seconds: float) -> Iterator[ReplyEvent]:
        """What the client is to see of this event; `elapsed_seconds` counts from the request's arrival.

        Raises:
            InternalError: the worker's events contradict the order.
        """
        if isinstance(event, Prefilled):
            yield from self._take_prefilled(event, elapsed_seconds)
        elif isinstance(event, Tokens):
            yield from self._take_tokens(event, elapsed_seconds)
        else:
            yield from self._take_finished(event)

    def _take_prefilled(self, event: Prefilled, elapsed_seconds: float) -> Iterator[ReplyEvent]:
        try:
            self._parts = explain_parts(self._placed.plan, event)
        except ValueError as error:
            raise InternalError(str(error)) from error
        self._prefilled, self._decoded_by = event, event.decoded_by
        self._first_token_seconds = elapsed_seconds
        yield Started()

    def _take_tokens(self, event: Tokens, elapsed_seconds: float) -> Iterator[ReplyEvent]:
        for token_id, logprobs in zip_longest(event.token_ids, event.logprobs):
            shown = self._push(token_id, logprobs)
            self._num_shown += len(shown.text)
            if shown.text:
                self._texts.append(shown.text)
                yield Delta(shown.text, self._pending.take(self._num_shown))
            if shown.is_stopped:
                decode_seconds = elapsed_seconds - self._first_token_seconds
                done = self._finish(FinishReason.STOP, self._num_tokens, decode_seconds)
                yield replace(done, stop=shown.stop)
                return

    def _push(self, token_id: int, logprobs: TokenLogprobs | None) -> StopResult:
        if logprobs is not None:
            self._pending.add(token_id, logprobs, self._num_characters)
        self._num_tokens += 1
        self._token_ids.append(token_id)
        text = self._detokenizer.push([token_id])
        self._num_characters += len(text)
        # As vLLM does: no stop string is looked for in the text of the first `min_tokens` tokens.
        is_early = self._num_tokens <= self._request.sampling.min_tokens
        return StopResult(text) if is_early else self._stops.push(text)

    def _take_finished(self, event: Finished) -> Iterator[ReplyEvent]:
        held = self._stops.flush()
        tokens = self._pending.flush()
        self._texts.append(held)
        self._held_key = event.held_key
        self._end = _turn_end(event)
        if held or tokens:
            yield Delta(held, tokens)
        yield self._finish(event.reason, event.generated_tokens, event.decode_seconds)

    def end_turn(self, model: ServedModel, prompt: ChatPrompt, closing_ids: tuple[int, ...]) -> EndedTurn:
        """What is known of the turn once the reply has ended; closing_ids: that ended its message."""
        prompt_ids = (token for each in self._placed.plan.parts for token in each.part.token_ids)
        # The chain of a conversation under `compose` says that each of its segments was composed.
        is_composed = self._request.options.reuse is not Reuse.COMPOSE or not any(
            part.kind is PartKind.SEGMENT and part.served is Served.LIVE for part in self._parts
        )
        return EndedTurn(
            model,
            prompt,
            self._request.options.reuse,
            "".join(self._texts),
            (*prompt_ids, *self._token_ids, *closing_ids),
            self._placed.worker_id,
            self._held_key,
            self._end if is_composed or self._end is not TurnEnd.KEPT else TurnEnd.NOT_COMPOSED,
        )

    def _finish(self, reason: FinishReason, generated_tokens: int, decode_seconds: float) -> Done:
        if self._prefilled is None:
            raise InternalError("the worker ended a reply that it had not begun")
        self.is_done = True
        # Captures may have ended since, by another worker than was meant.
        plan = self._note_captures(self._placed.plan)
        if plan is not self._placed.plan:
            self._parts = explain_parts(plan, self._prefilled)
        usage = Usage(
            prompt_tokens=sum(part.tokens for part in self._parts),
            completion_tokens=generated_tokens,
            cached_tokens=sum(part.reused_tokens for part in self._parts),
        )
        seconds = Seconds(
            plan=self._planning.plan,
            capture=self._planning.capture,
            fetch=self._prefilled.fetch_seconds,
            queue=self._prefilled.queue_seconds,
            combine=self._prefilled.combine_seconds,
            decode=decode_seconds,
            time_to_first_token=self._first_token_seconds,
        )
        options = self._request.options
        placing = explain_placing(self._placed.schedule)
        cold = self._placed.cold
        refresh = self._placed.refresh
        explanation = Explanation(
            reuse=options.reuse,
            cold=cold.asked,
            parts=self._parts,
            seconds=seconds,
            placing=placing,
            decode=explain_decode(self._decoded_by),
            cold_choice=cold.choice,
            refresh="auto" if refresh.blocks is None else refresh.blocks,
            ttft_budget_seconds=refresh.budget_seconds,
        )
        return Done(reason, usage, explanation)


def _turn_end(event: Finished) -> TurnEnd:
    if event.held_key:
        return TurnEnd.KEPT
    return TurnEnd.LENGTH if event.reason is FinishReason.LENGTH else TurnEnd.NOT_HELD
