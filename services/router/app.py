"""The life of a request."""

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace

from services.common.errors import InternalError, InvalidRequestError, UnavailableError
from services.common.telemetry import get_logger, new_request_id
from services.router.deadline import Deadline
from services.router.domain.checks import check_sampling, grammar_fault
from services.router.domain.parts import Prompt
from services.router.domain.placing import PlacedPrompt
from services.router.domain.plan import PartPlan, Served
from services.router.domain.ports import GenerateEvent, GenerateOrder, PartOrder, PartServing, Work
from services.router.domain.request import ChatPrompt, GenerationRequest, PromptError
from services.router.domain.turn import may_go_on
from services.router.handover import Handover
from services.router.reply import Done, PlanningSeconds, Reply, ReplyEvent, Started
from services.router.reuse import ReuseServices, ReuseSession, ReuseSubject
from services.router.served_model import Models, ServedModel

__all__ = ["Router", "RouterLimits"]

_SERVINGS = {Served.PREFIX: PartServing.PREFIX}


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Seconds that a request may take, and that it waits for a worker that went away; tokens of an unbounded reply.

    keeps_turns: the state behind a reply may be kept for the next turn.
    """

    request_timeout_seconds: float
    worker_wait_seconds: float
    default_max_tokens: int
    keeps_turns: bool = True


class Router:
    """Answers requests with the workers that there are, and one cache service. handover: where other engines decode."""

    def __init__(
        self, models: Models, services: ReuseServices, limits: RouterLimits, handover: Handover | None = None
    ) -> None:
        self._models = models
        self._services = services
        self._limits = limits
        self._handover = handover

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The reply as it comes. A worker that goes away before the first token costs another attempt: on another worker, or
        once on one that comes back in time.

        Raises:
            PromptError: the request can never be served.
            HypicError: a service that is needed failed, or the time ran out.
        """
        deadline = Deadline.after(self._limits.request_timeout_seconds)
        arrival = time.monotonic()
        has_started = False
        try:
            model = self._models.require()
            model.check_name(request.model)
            async with aclosing(self._answer(request, model, deadline, arrival)) as events:
                async for event in events:
                    has_started = True
                    yield event
            return
        except UnavailableError as error:
            if has_started or not self._limits.worker_wait_seconds:
                raise
            get_logger().warning("no_worker_left", error=str(error))
        back = await self._models.wait_back(min(self._limits.worker_wait_seconds, deadline.remaining()))
        back.check_name(request.model)
        async with aclosing(self._answer(request, back, deadline, arrival)) as events:
            async for event in events:
                yield event

    async def _answer(
        self, request: GenerationRequest, model: ServedModel, deadline: Deadline, arrival: float
    ) -> AsyncGenerator[ReplyEvent]:
        prompt = await model.assemble(request.prompt)
        request = self._fit_context(request, prompt, model)
        closing_ids = self._closing_ids(request, model)
        subject = ReuseSubject(
            new_request_id(), prompt, model.info, request.options, request.namespace, watches_turn=bool(closing_ids)
        )
        async with ReuseSession(self._services, subject, deadline) as session:
            await session.settle()
            while True:
                placed, has_started = session.place(), False
                try:
                    async with aclosing(self._combine(request, model, session, placed, arrival)) as events:
                        async for event in events:
                            has_started = True
                            yield event
                    return
                except InvalidRequestError as error:
                    if (fault := grammar_fault(request.sampling, str(error))) is None:
                        raise
                    raise fault from error
                except UnavailableError as error:
                    if has_started:
                        raise
                    await self._leave(session, placed.worker_id, error)

    async def _leave(self, session: ReuseSession, worker_id: str, error: UnavailableError) -> None:
        """Replay on another worker; where there is none, the error that this one left."""
        get_logger().warning("worker_lost_before_first_token", worker_id=worker_id, error=str(error))
        try:
            await session.leave(worker_id)
        except UnavailableError:
            raise error from None

    async def _combine(
        self,
        request: GenerationRequest,
        model: ServedModel,
        session: ReuseSession,
        placed: PlacedPrompt,
        arrival: float,
    ) -> AsyncGenerator[ReplyEvent]:
        """One worker's reply."""
        planning = PlanningSeconds(session.plan_seconds, session.capture_seconds)
        reply = Reply(request, placed, planning, model.new_detokenizer(), session.note_captures)
        workers, worker_id = self._services.workers, placed.worker_id
        order = self._order(session, placed, request, model)
        combining = ExitStack()
        combining.enter_context(workers.occupy(worker_id, Work(placed.schedule.combine.combine_seconds)))
        with workers.occupy(worker_id, Work(0.0, is_request=True)), combining:
            async with aclosing(self._generate(worker_id, order, session.deadline.remaining())) as events:
                async for event in events:
                    for shown in reply.take(event, time.monotonic() - arrival):
                        if isinstance(shown, Started):
                            combining.close()
                            session.note_first_token()
                        elif isinstance(shown, Done):
                            session.note_complete()
                            self._end_turn(session, request, model, reply)
                        yield shown
                    if reply.is_done:
                        return
        raise InternalError("the worker's stream ended without a finish")

    def _generate(self, worker_id: str, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[GenerateEvent]:
        if self._handover is not None:
            return self._handover.generate(worker_id, order, timeout_seconds)
        return self._services.workers.find(worker_id).generate(order, timeout_seconds)

    def _order(
        self, session: ReuseSession, placed: PlacedPrompt, request: GenerationRequest, model: ServedModel
    ) -> GenerateOrder:
        return GenerateOrder(
            request_id=session.request_id,
            lease_id=session.lease_id,
            parts=tuple(self._part_order(each, placed.worker_id) for each in placed.plan.parts),
            sampling=request.sampling,
            stop_token_ids=request.sampling.all_stop_token_ids(model.info.stop_token_ids),
            prefix_key=placed.plan.prefix_key,
            snapshots=placed.plan.snapshots,
            priority=request.priority,
            refresh=placed.refresh,
            closing_ids=self._closing_ids(request, model) if session.is_watched else (),
            tenant=request.namespace.tenant,
        )

    def _end_turn(self, session: ReuseSession, request: GenerationRequest, model: ServedModel, reply: Reply) -> None:
        if session.is_watched and isinstance(request.prompt, ChatPrompt):
            session.end_turn(reply.end_turn(model, request.prompt, self._closing_ids(request, model)))

    def _closing_ids(self, request: GenerationRequest, model: ServedModel) -> tuple[int, ...]:
        """What ends the reply's message, where the state behind it may be of use to a next turn, and is the worker's own."""
        if self._handover is not None or not self._limits.keeps_turns or not may_go_on(request):
            return ()
        return model.assembler.closing_ids(request.sampling.all_stop_token_ids(model.info.stop_token_ids))

    def _part_order(self, each: PartPlan, combine_id: str) -> PartOrder:
        if each.served not in (Served.HIT, Served.COLD):
            return PartOrder(each.part.token_ids, _SERVINGS.get(each.served, PartServing.LIVE))
        wait_seconds = 0.0 if each.captured is None else each.captured.wait_seconds
        # What the combine worker itself still captures, for the one before it that was lost, it takes as from another.
        holders = [holder.worker_id for holder in each.holders]
        if each.captured is not None and each.captured.alternate_id:
            holders.append(each.captured.alternate_id)
        return PartOrder(
            each.part.token_ids,
            PartServing.SEGMENT,
            each.key,
            each.order,
            self._services.workers.sources([holder for holder in holders if holder != combine_id or wait_seconds]),
            wait_seconds,
        )

    def _fit_context(self, request: GenerationRequest, prompt: Prompt, model: ServedModel) -> GenerationRequest:
        """Fill in `max_tokens`, within what the context leaves."""
        room = model.info.context_length - prompt.num_tokens
        wanted = request.sampling.max_tokens
        if room < 1 or (wanted or 0) > room:
            asked = f" and {wanted} for the reply" if wanted else ""
            raise PromptError(
                f"the model's context length is {model.info.context_length} tokens; this request has"
                f" {prompt.num_tokens} in the prompt{asked}",
                param="max_tokens" if room >= 1 else _prompt_field(request),
                code="context_length_exceeded",
            )
        max_tokens = wanted or min(room, self._limits.default_max_tokens)
        check_sampling(request.sampling, max_tokens, model.info.vocab_size)
        return replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))


def _prompt_field(request: GenerationRequest) -> str:
    return "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
