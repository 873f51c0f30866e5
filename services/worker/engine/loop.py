"""The engine's loop. Everything here runs on the one thread that owns the device."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from services.worker.engine.admission import (
    CAPTURE_FAILED,
    NO_ROOM,
    ResolvedPrompt,
    check_size,
    resolve,
    resolve_live,
)
from services.worker.engine.capture import end_capture
from services.worker.engine.capture_queue import CaptureQueue
from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_queue import AdmittedPrompt, CombineQueue
from services.worker.engine.context import EngineContext
from services.worker.engine.decode import DecodeLoop, RunningRequest
from services.worker.engine.limits import EngineLimits
from services.worker.engine.ordered_captures import OrderedCaptures
from services.worker.engine.pages import NoRoomError
from services.worker.engine.prefill import Prefill
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    EngineFullError,
    GenerateRequest,
    PrefilledEvent,
    StoredSnapshot,
)
from services.worker.engine.sampling import Sampler, SamplingOptions, find_likeliest

__all__ = ["Engine"]


@dataclass(slots=True)
class _Waiting:
    """refusal: why what it orders to capture is computed in place."""

    request: GenerateRequest
    since: float = field(default_factory=time.monotonic)
    refusal: str = ""


class Engine:
    """Schedules captures, combines and decoding on one model.

    `step` does a bounded piece of work: admit; one decode step; as many layers of waiting passes as the token budget allows.
    Not safe for threads: every call comes from the thread that owns the device. Nothing that a step does depends on a clock
    or on chance, save for what a sampler of `create_sampler` draws: ranks of a group run alike.
    """

    def __init__(
        self,
        context: EngineContext,
        limits: EngineLimits,
        create_sampler: Callable[[SamplingOptions], Sampler] = Sampler,
    ) -> None:
        self.context = context
        self.limits = limits
        self._create_sampler = create_sampler
        self._waiting: deque[_Waiting] = deque()
        # Prompts that capture come behind those that do not.
        self._combines, self._cold = (
            CombineQueue(context, limits.sweep_tokens, self._start_decoding, self._readmit) for _ in range(2)
        )
        self._running: list[RunningRequest] = []
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
        """Requests that combine or decode."""
        return len(self._combines.prompts) + len(self._cold.prompts) + len(self._running)

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
        """Nothing is left to do."""
        return not (self._waiting or self._running or self._prefill.has_work)

    def submit(self, request: GenerateRequest) -> None:
        """Put a request in the line.

        Raises:
            PromptTooLargeError: it can never be served.
            EngineFullError: the line is full.
        """
        pages = self.context.pages
        check_size(request, self.limits, pages.num_pages - self._captures.num_prime_pages, pages.page_size)
        if len(self._waiting) >= self.limits.max_waiting:
            raise EngineFullError(f"{self.limits.max_waiting} requests are waiting already; try again later")
        self._waiting.append(_Waiting(request))

    def submit_capture(self, job: CaptureJob) -> None:
        """Put segments in the line; background jobs run when nothing else is left."""
        self._captures.submit(job)

    def cancel(self, request_id: str) -> None:
        """Stop whatever runs under an id; no event follows. Unknown ids are ignored.

        It is freed at once, unless others share its rows in a sweep: then when these end.
        """
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.request_id != request_id)
        self._prefill.cancel(request_id)
        for running in self._running:
            if running.request.request_id == request_id:
                running.finished = True
        self._retire()

    @torch.inference_mode()
    def step(self) -> None:
        """One round."""
        self._admit()
        if self._running:
            self._decode.step(self._running)
            self._retire()
        self._advance()

    def check_integrity(self) -> None:
        """Pages, slots and bytes add up.

        Raises:
            AssertionError: they do not.
        """
        prompts = [*(one.prompt for one in self._running), *self._combines.prompts, *self._cold.prompts]
        holdings = [pages for prompt in prompts for pages in (prompt.owned, prompt.shared)]
        holdings += [state.pages for state in self.context.store]
        holdings += [*self._captures.held_pages(), *self._cold.held_pages(), *self.context.holds]
        self.context.pages.check_integrity(holdings)
        self.context.store.check_integrity()
        if len(prompts) + self.context.slots.num_free != self.context.slots.num_slots:
            raise AssertionError(f"{len(prompts)} prompts hold slots, {self.context.slots.num_free} are free")

    def _admit(self) -> None:
        """First come, first served: what does not fit now waits at the head of the line.

        Stored states make room for it, save those that it uses itself. What another request captures for it already is
        waited for.
        """
        while self._waiting and self.num_running < self.limits.max_running:
            admitted = self._admit_one(self._waiting[0])
            if admitted is None:
                return
            waiting = self._waiting.popleft()
            if not waiting.refusal:
                self._tell_stored(admitted)
            (self._cold if admitted.captures.keys else self._combines).add(admitted)

    def _admit_one(self, waiting: _Waiting) -> AdmittedPrompt | None:
        """Where nothing runs that would give room back, it is served without captures, and at last without any state."""
        request = waiting.request
        resolved = resolve(self.context, request, waiting.refusal)
        if not self._cold.captured_keys.isdisjoint(segment.key for segment in resolved.cold):
            return None
        own = {request.prefix_key, *(part.key for part in request.parts)}
        admitted = self._reserve(waiting, resolved, own)
        if admitted is None and not self.num_running:
            admitted = self._reserve(waiting, resolve(self.context, request, NO_ROOM), own)
            admitted = admitted or self._reserve(waiting, resolve_live(request), ())
            if admitted is not None:
                self._tell_refused(resolved, request, NO_ROOM)
        return admitted

    def _reserve(
        self, waiting: _Waiting, resolved: ResolvedPrompt, protected: Collection[bytes]
    ) -> AdmittedPrompt | None:
        """A prompt with everything that it needs; None while that is not to be had."""
        request, context = waiting.request, self.context
        if not context.store.make_room(resolved.pages_needed(context), protected):
            return None
        try:
            captures = OrderedCaptures(
                context, resolved.cold, self._captures.prime, self.limits.capture_tokens, request.sink
            )
        except NoRoomError:
            return None
        try:
            combine = CombinePass(context, resolved.compose(request, captures.states))
        except NoRoomError:
            captures.abandon()
            return None
        return AdmittedPrompt(request, waiting.since, resolved, combine, captures)

    def _readmit(self, prompt: AdmittedPrompt) -> None:
        """It goes first, without its captures."""
        self._waiting.appendleft(_Waiting(prompt.request, prompt.since, CAPTURE_FAILED))

    def _tell_stored(self, prompt: AdmittedPrompt) -> None:
        """What is to be captured and is there already has ended."""
        ordered = {part.key: part.token_ids for part in prompt.request.parts if part.captures}
        for key, token_ids in ordered.items():
            if self.context.store.get_segment(key, token_ids) is not None:
                prompt.request.sink(end_capture(self.context, key, 0.0))

    def _tell_refused(self, resolved: ResolvedPrompt, request: GenerateRequest, reason: str) -> None:
        for segment in resolved.cold:
            request.sink(CaptureEvent(segment.key, 0, 0.0, reason))

    def _advance(self) -> None:
        """Layers of passes until the budget of tokens times layers is spent; without decoding nothing waits for it."""
        budget = self.limits.layer_tokens
        while budget > 0 and self._prefill.has_work:
            budget -= self._prefill.advance()

    def _start_decoding(self, prompts: Sequence[AdmittedPrompt], logits: torch.Tensor) -> None:
        for prompt, own, likeliest in zip(prompts, logits, find_likeliest(logits), strict=True):
            request = prompt.request
            running = RunningRequest(request, prompt.combine.prompt, self._create_sampler(request.sampling))
            request.sink(
                PrefilledEvent(
                    parts=prompt.resolved.served,
                    queue_seconds=prompt.admitted_at - prompt.since,
                    combine_seconds=time.monotonic() - prompt.admitted_at,
                    snapshots=self._store_snapshots(prompt),
                )
            )
            running.accept(own, likeliest)
            self._running.append(running)
        self._retire()

    def _store_snapshots(self, prompt: AdmittedPrompt) -> tuple[StoredSnapshot, ...]:
        stored = []
        store = self.context.store
        for order in prompt.request.snapshots:
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

    def _retire(self) -> None:
        for running in [one for one in self._running if one.finished]:
            self._running.remove(running)
            running.prompt.release(self.context)
