"""The engine's loop. Everything here runs on the one thread that owns the device."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from services.worker.engine.admission import (
    NO_ROOM,
    NOTHING_REFUSED,
    Refusals,
    ResolvedPrompt,
    check_size,
    resolve,
    resolve_live,
)
from services.worker.engine.arrivals import Arrivals
from services.worker.engine.capture import end_capture
from services.worker.engine.capture_queue import CaptureQueue
from services.worker.engine.capture_rows import CaptureProgress
from services.worker.engine.combine import Prompt
from services.worker.engine.combine_queue import AdmittedPrompt, CombineQueue
from services.worker.engine.context import EngineContext
from services.worker.engine.decode import DecodeLoop, RunningRequest
from services.worker.engine.fair_line import FairLine
from services.worker.engine.held import HeldPrompts, held_bytes
from services.worker.engine.limits import EngineLimits
from services.worker.engine.pages import NoRoomError
from services.worker.engine.prefill import Prefill
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    EngineFullError,
    FailedEvent,
    FetchEvent,
    GenerateRequest,
    HeldEvent,
    NotServedError,
    PrefilledEvent,
    StoredSnapshot,
)
from services.worker.engine.reservation import reserve
from services.worker.engine.sampling import CreateSampler, Sampler, find_likeliest
from services.worker.engine.transfer import IncomingState
from services.worker.engine.turns import hold_turn

__all__ = ["Engine"]


@dataclass(slots=True)
class _Waiting:
    """refusals: why parts are computed in place that could be reused; arriving: states on their way that it was to use when it
    was admitted before.
    """

    request: GenerateRequest
    since: float = field(default_factory=time.monotonic)
    refusals: Refusals = NOTHING_REFUSED
    arriving: Sequence[IncomingState] = ()


class Engine:
    """Schedules captures, combines and decoding on one model.

    `step` does a bounded piece of work: admit; one decode step; as many layers of waiting passes as the token budget allows.
    Not safe for threads: every call comes from the thread that owns the device. Nothing that a step does depends on a clock
    or on chance, save for what a sampler of `create_sampler` draws and for refreshes, which ranks of a group have none of: they
    run alike.
    """

    def __init__(
        self,
        context: EngineContext,
        limits: EngineLimits,
        create_sampler: CreateSampler = Sampler,
    ) -> None:
        self.context = context
        self.limits = limits
        self._create_sampler = create_sampler
        self._waiting = FairLine[_Waiting]()
        # Prompts that capture come behind those that do not.
        self._combines, self._cold = self._create_line(), self._create_line()
        self._arrivals = Arrivals(context)
        # Nothing can be done before a command comes: a layer of a state, or the end of something.
        self._is_stuck = False
        self._running: list[RunningRequest] = []
        self.held = HeldPrompts(context)
        with torch.inference_mode():
            self._captures = CaptureQueue(context, limits.capture_tokens)
        self._prefill = Prefill(context, self._combines, self._cold, self._captures)
        self._decode = DecodeLoop(context)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that combine or decode, or whose decode state is held."""
        return len(self._prompts) + len(self._running) + len(self.held)

    @property
    def capture_tokens_left(self) -> int:
        """Tokens of segments that are ordered apart from prompts and not captured yet."""
        return self._captures.tokens_left

    @property
    def num_decoding(self) -> int:
        """Requests that decode."""
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do, or nothing before a command."""
        return self._is_stuck or not self.has_work

    @property
    def has_work(self) -> bool:
        """Requests or captures are under way, or wait."""
        return bool(self._waiting or self._running or self._prefill.has_work)

    def submit(self, request: GenerateRequest) -> None:
        """Put a request in the line.

        Raises:
            PromptTooLargeError: it can never be served.
            NotServedError: it asks for a refresh, and ranks share the model.
            EngineFullError: the line is full, and no other tenant fills it.
        """
        if request.refresh is not None and self.context.is_split:
            raise NotServedError(
                "refresh: not served by a model split over ranks (HYPIC_WORKER_TENSOR_PARALLEL above 1); send refresh 0"
            )
        pages = self.context.pages
        check_size(request, self.limits, pages.num_pages - self._captures.num_prime_pages, pages.page_size)
        new = _Waiting(request)
        if len(self._waiting) >= self.limits.max_waiting:
            self._displace(new)
        self._waiting.add(new)
        self.wake()

    def _displace(self, new: _Waiting) -> None:
        """Who fills the line is refused first, whoever comes last."""
        full = EngineFullError(f"{self.limits.max_waiting} requests are waiting already; try again later")
        displaced = self._waiting.find_displaced(new)
        if displaced is None:
            raise full
        self._waiting.take_out(lambda waiting: waiting is displaced)
        displaced.request.sink(FailedEvent(full))

    def submit_capture(self, job: CaptureJob) -> None:
        """Put segments in the line; background jobs run when nothing else is left."""
        self._captures.submit(job)
        self.wake()

    def cancel(self, request_id: str) -> None:
        """Stop whatever runs under an id; no event follows. Unknown ids are ignored.

        It is freed at once, unless others share its rows in a sweep: then when these end.
        """
        self._waiting.take_out(lambda waiting: waiting.request.request_id == request_id)
        self._prefill.cancel(request_id)
        self.held.cancel(request_id)
        for running in self._running:
            if running.request.request_id == request_id:
                running.finished = True
        self._retire()
        self.wake()

    def wake(self) -> None:
        """Something has changed: a layer of a state has come, or a held prompt has gone."""
        self._is_stuck = False

    def find_capture(self, key: bytes) -> CaptureProgress | None:
        """The capture that runs under a key, for prompts or apart."""
        found = (line.find_capture(key) for line in self._prefill.combining)
        return next((one for one in found if one is not None), None) or self._captures.find(key)

    def finish_arrival(self, key: bytes, incoming: IncomingState) -> None:
        """A state that a `FetchEvent` told of has come whole."""
        self._arrivals.finish(key, incoming)
        self.wake()

    def fail_arrival(self, key: bytes, incoming: IncomingState, reason: str) -> None:
        """It will not come, and nothing writes into its room any more: prompts that use it compute the part in its place."""
        for prompt in reversed(self._prefill.withdraw(incoming)):
            self._readmit(prompt, prompt.refusals)
        for waiting in self._waiting:
            if incoming in waiting.arriving:
                keys = {**waiting.refusals.keys, key: reason}
                waiting.refusals = replace(waiting.refusals, keys=keys)
        self._arrivals.fail(key, incoming)
        self.wake()

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        has_changed = self._admit()
        if self._running:
            self._decode.step(self._running)
            self._hold_turns()
            self._retire()
            has_changed = True
        has_changed |= self._advance()
        self._is_stuck = not has_changed

    def check_integrity(self) -> None:
        """Pages, slots and bytes add up.

        Raises:
            AssertionError: they do not.
        """
        prompts = [*(one.prompt for one in self._running), *self._prompts, *self.held]
        holdings = [pages for prompt in prompts for pages in (prompt.owned, prompt.shared)]
        holdings += [state.pages for state in self.context.store]
        holdings += [pages for line in self._prefill.combining for pages in line.held_pages()]
        holdings += [*self._captures.held_pages(), *self.context.holds]
        self.context.pages.check_integrity(holdings)
        self.context.store.check_integrity()
        if len(prompts) + self.context.slots.num_free != self.context.slots.num_slots:
            raise AssertionError(f"{len(prompts)} prompts hold slots, {self.context.slots.num_free} are free")

    @property
    def _prompts(self) -> list[Prompt]:
        """Everything that is admitted and does not decode yet."""
        return [prompt for line in self._prefill.combining for prompt in line.prompts]

    def _create_line(self) -> CombineQueue:
        return CombineQueue(self.context, self.limits.sweep_tokens, self._start_decoding, self._readmit)

    def _admit(self) -> bool:
        """In the order of the line: what does not fit now waits at its head, and the others behind it.

        Stored states make room for it, save those that it uses itself. Who waits for what another request captures already
        lets the others go ahead. Returns whether anybody was admitted.
        """
        has_admitted = False
        for waiting in list(self._waiting):
            if self.num_running >= self.limits.max_running:
                break
            if self._waits_for_capture(waiting):
                continue
            admitted = self._admit_one(waiting)
            if admitted is None:
                break
            has_admitted = True
            self._waiting.serve(waiting)
            if not waiting.refusals.captures:
                self._tell_stored(admitted)
            self._line_of(admitted).add(admitted)
        return has_admitted

    def _waits_for_capture(self, waiting: _Waiting) -> bool:
        if waiting.refusals.captures:
            return False
        captured = {key for line in self._prefill.combining for key in line.captured_keys}
        return any(part.captures and part.key in captured for part in waiting.request.parts)

    def _line_of(self, admitted: AdmittedPrompt) -> CombineQueue:
        if not admitted.arriving:
            return self._cold if admitted.captures.keys else self._combines
        line = self._create_line()
        self._prefill.add_line(line)
        return line

    def _admit_one(self, waiting: _Waiting) -> AdmittedPrompt | None:
        """Where nothing runs that would give room back, it is served without captures, and at last without any state."""
        request = waiting.request
        resolved = resolve(self.context, request, self._arrivals, waiting.refusals)
        own = {request.prefix_key, *(part.key for part in request.parts)}
        admitted = self._reserve(waiting, resolved, own)
        if admitted is None and not self.num_running:
            without = replace(waiting.refusals, captures=NO_ROOM, fetches=NO_ROOM)
            admitted = self._reserve(waiting, resolve(self.context, request, self._arrivals, without), own)
            admitted = admitted or self._reserve(waiting, resolve_live(request), ())
            if admitted is not None:
                self._tell_refused(resolved, request, NO_ROOM)
        return admitted

    def _reserve(
        self, waiting: _Waiting, resolved: ResolvedPrompt, protected: Collection[bytes]
    ) -> AdmittedPrompt | None:
        """A prompt with everything that it needs; None while that is not to be had."""
        request = waiting.request
        try:
            room = reserve(
                self.context, self._arrivals, resolved, request, protected, self._captures.prime, self.limits
            )
        except NoRoomError:
            return None
        for key, incoming in room.incoming.items():
            request.sink(FetchEvent(key, incoming))
        arriving = (*resolved.arriving, *room.incoming.values())
        return AdmittedPrompt(request, waiting.since, resolved, room.combine, room.captures, arriving, waiting.refusals)

    def _readmit(self, prompt: AdmittedPrompt, refusals: Refusals) -> None:
        """It goes first."""
        self._waiting.put_first([_Waiting(prompt.request, prompt.since, refusals, prompt.arriving)])

    def _tell_stored(self, prompt: AdmittedPrompt) -> None:
        """What is to be captured and is there already has ended."""
        ordered = {part.key: part.token_ids for part in prompt.request.parts if part.captures}
        for key, token_ids in ordered.items():
            if self.context.store.get_segment(key, token_ids) is not None:
                prompt.request.sink(end_capture(self.context, key, 0.0))

    def _tell_refused(self, resolved: ResolvedPrompt, request: GenerateRequest, reason: str) -> None:
        for segment in resolved.cold:
            request.sink(CaptureEvent(segment.key, 0, 0.0, reason))

    def _advance(self) -> bool:
        """Layers of passes until the budget of tokens times layers is spent; without decoding nothing waits for it.

        Returns whether anything could run.
        """
        budget, has_run = self.limits.layer_tokens, False
        while budget > 0 and self._prefill.has_work and (spent := self._prefill.advance()) is not None:
            budget -= spent
            has_run = True
        return has_run

    def _start_decoding(self, prompts: Sequence[AdmittedPrompt], logits: torch.Tensor) -> None:
        for prompt, own, likeliest in zip(prompts, logits, find_likeliest(logits), strict=True):
            request = prompt.request
            request.sink(
                PrefilledEvent(
                    parts=prompt.resolved.served,
                    queue_seconds=prompt.admitted_at - prompt.since,
                    combine_seconds=time.monotonic() - prompt.admitted_at - prompt.blocked_seconds,
                    fetch_seconds=prompt.blocked_seconds,
                    layer_waits=prompt.blocked,
                    snapshots=self._store_snapshots(prompt),
                )
            )
            if request.is_held:
                self._hold(prompt)
                continue
            sampler = self._create_sampler(request.sampling, request.prompt_ids, request.grammar)
            running = RunningRequest(request, prompt.combine.prompt, sampler)
            running.accept(own, likeliest)
            self._running.append(running)
        self._retire()

    def _hold(self, prompt: AdmittedPrompt) -> None:
        combined = prompt.combine.prompt
        self.held.add(prompt.request.request_id, combined)
        prompt.request.sink(HeldEvent(combined.length, held_bytes(self.context, combined.length)))

    def _store_snapshots(self, prompt: AdmittedPrompt) -> tuple[StoredSnapshot, ...]:
        stored = []
        store = self.context.store
        for order in prompt.request.snapshots:
            if prompt.resolved.num_as_asked(prompt.request) < order.after_part:
                # Its key says how what it covers was served.
                continue
            state = prompt.combine.snapshots.pop(order.after_part - 1 - prompt.resolved.first_part, None)
            if state is None:
                continue
            try:
                store.put(order.key, state)
            except (NoRoomError, ValueError):
                self.context.pages.release(state.pages)
            else:
                stored.append(StoredSnapshot(order.key, store.size_bytes(state)))
        prompt.combine.drop_snapshots()
        return tuple(stored)

    def _hold_turns(self) -> None:
        for running in self._running:
            if running.is_closed and running.request.turn is not None:
                hold_turn(self.context, running, running.request.turn)
                running.finished = True

    def _retire(self) -> None:
        for running in [one for one in self._running if one.finished]:
            self._running.remove(running)
            running.prompt.release(self.context)
