"""One request's dealings with the cache service: plan, capture of cold segments, and the lease's life."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from services.common.errors import HypicError, UnavailableError
from services.common.telemetry import get_logger
from services.router.background import Background
from services.router.captures import CaptureOutcome, Capturer
from services.router.deadline import Deadline
from services.router.domain.assignment import Assignment
from services.router.domain.cold_choice import ColdChoice, ColdPolicy
from services.router.domain.model import ModelInfo
from services.router.domain.parts import Prompt, Reason
from services.router.domain.placing import PlacedPrompt, apply_schedule, choose_plan_cold, cold_segment, schedule_plan
from services.router.domain.plan import (
    CacheEntry,
    CaptureCause,
    Captured,
    EntryKind,
    Outcome,
    PartPlan,
    Plan,
    Served,
    draft,
    note_captures,
    serve_live,
    settle_captures,
    settle_prefix,
    settle_segments,
    without_directory,
)
from services.router.domain.ports import CaptureOrder, Directory, PlanQuery, Workers
from services.router.domain.refreshing import RefreshPolicy, settle_refresh, without_composed_prefixes
from services.router.domain.request import Cold, Namespace, ReuseOptions
from services.router.domain.schedule import Schedule
from services.router.domain.turn import TurnWatch, watch_entry
from services.router.domain.workers import WorkerView
from services.router.lease import RequestLease
from services.router.turns import EndedTurn, TurnKeeper

__all__ = ["ReusePolicy", "ReuseServices", "ReuseSession", "ReuseSubject"]

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """How long things may take, in seconds; cold, refresh: where the request does not say."""

    lease_seconds: float
    cache_timeout_seconds: float
    capture_timeout_seconds: float
    pending_wait_seconds: float
    cold: Cold = Cold.PARALLEL
    refresh: RefreshPolicy = field(default_factory=RefreshPolicy)


@dataclass(frozen=True, slots=True)
class ReuseServices:
    """What a session works with."""

    directory: Directory
    workers: Workers
    capturer: Capturer
    background: Background
    policy: ReusePolicy
    turns: TurnKeeper


@dataclass(frozen=True, slots=True)
class ReuseSubject:
    """The prompt to plan, for whom, and how. watches_turn: the state behind its reply may be kept."""

    request_id: str
    prompt: Prompt
    model: ModelInfo
    options: ReuseOptions
    namespace: Namespace
    watches_turn: bool = False


class ReuseSession:
    """Holds the lease of one request from plan to first token; leaving the context always releases it.

    What cannot be planned, captured or waited for becomes live, with the reason; only the deadline, or no worker at all,
    fails a request here. refresh: what the prompt is served with.

    Raises:
        PromptError: see `settle_refresh`.
    """

    def __init__(self, services: ReuseServices, subject: ReuseSubject, deadline: Deadline) -> None:
        self._services = services
        self._subject = subject
        self.deadline = deadline
        self._deferred: tuple[PartPlan, ...] = ()
        self._is_complete = False
        self._schedule: Schedule | None = None
        self._cold = subject.options.cold or services.policy.cold
        self._cold_choice: ColdChoice | None = None
        # Those among whom the schedule has chosen.
        self._workers: list[WorkerView] = []
        self._captures: list[asyncio.Task[CaptureOutcome]] = []
        self._lost: set[str] = set()
        self.refresh = settle_refresh(subject.options, services.policy.refresh)
        plan = draft(subject.prompt, subject.model.profile, subject.options.reuse)
        self.plan: Plan = plan if self.refresh.is_none else without_composed_prefixes(plan)
        self._watch: TurnWatch | None = None
        self._turn: EndedTurn | None = None
        self.request_id = subject.request_id
        policy = services.policy
        self._lease = RequestLease(
            services.directory, services.background, policy.lease_seconds, policy.cache_timeout_seconds
        )
        self.plan_seconds = 0.0
        self.capture_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nothing is awaited here: under cancellation an await would be cut, and the lease would stay.
        background = self._services.background
        running = [task for task in self._captures if not task.done()]
        if self._is_complete and self._deferred and background.can_capture():
            background.spawn_capture(self._leaving(self._capture_behind()))
        elif self._is_complete and running and background.can_capture():
            # The reply did without; the next one has them.
            background.spawn_capture(self._leaving(self._finish_behind(running)))
        else:
            for task in running:
                task.cancel()
            if self._turn is not None:
                background.spawn(self._leaving())
                return
            self._lease.let_go()
            if self.lease_id:
                background.spawn(self._lease.give_back())

    async def settle(self) -> None:
        """Decide how every part is served, and compute what has to be computed ahead of the reply.

        Cold segments are left to the worker that combines, or captured elsewhere while it begins; with `cold: live` they are put
        off.

        Raises:
            UnavailableError: no worker takes prompts.
        """
        watch = (watch_entry(self._subject.prompt),) if self._watches_turn else ()
        await self._ask(self.plan.entries, watch)
        started = time.monotonic()
        asked_seconds = self.plan_seconds
        if self._computes_in_place():
            self._put_off_cold()
        else:
            await self._capture_cold()
            await self._await_pending()
        self.plan = serve_live(self.plan, lambda each: each.served is Served.PENDING, Reason.COMPUTED_ELSEWHERE)
        self.capture_seconds = time.monotonic() - started - (self.plan_seconds - asked_seconds)

    def place(self) -> PlacedPrompt:
        """Choose the worker that combines, with what is stored and captured by now.

        Raises:
            UnavailableError: no worker takes prompts.
        """
        schedule = self._schedule or self._choose()
        plan = apply_schedule(self.plan, schedule, self._workers)
        return PlacedPrompt(plan, schedule, ColdPolicy(self._cold, self._cold_choice), self.refresh)

    async def leave(self, worker_id: str) -> None:
        """A worker went away before the first token: nothing more is asked of it, and what it was to capture others do.

        Raises:
            UnavailableError: no other worker takes prompts.
        """
        self._lost.add(worker_id)
        self._schedule = None
        await self._capture_cold()

    def note_first_token(self) -> None:
        """The worker now holds what it needs; the lease may end, unless captures are to follow the reply."""
        if not self._deferred and not self.is_watched and all(task.done() for task in self._captures):
            self._lease.let_go()

    def note_complete(self) -> None:
        """The reply has ended well; captures that were put off may begin."""
        self._is_complete = True

    @property
    def lease_id(self) -> str:
        """Empty without a plan."""
        return self._lease.lease_id

    @property
    def is_watched(self) -> bool:
        """Whether it will be known if something of the prompt was invalidated before the reply's end."""
        return self._watch is not None

    @property
    def _watches_turn(self) -> bool:
        """A chain does not say what was refreshed of what stands in it."""
        return self._subject.watches_turn and self.refresh.is_none

    def end_turn(self, turn: EndedTurn) -> None:
        """The reply has ended; what becomes of the state behind it is settled once this session is left."""
        self._turn = turn

    async def _leaving(self, captures: Coroutine[None, None, None] | None = None) -> None:
        """What follows a reply that has ended well, under its lease."""
        try:
            if self._turn is not None:
                await self._services.turns.finish(self._turn, self._claim_turn)
            if captures is not None:
                await captures
        finally:
            if captures is not None:
                captures.close()
            await self._lease.give_back()

    async def _claim_turn(self, entry: CacheEntry) -> Outcome | None:
        """The directory's answer for the state behind the turn; None where something in it was invalidated since the plan."""
        if self._watch is None:
            return None
        query = replace(self._query((self._watch.entry, entry)), admit_all=True)
        answer = await self._services.directory.plan(query, self._services.policy.cache_timeout_seconds)
        watched, outcome = answer.outcomes
        return outcome if watched.ticket == self._watch.ticket else None

    async def _ask(self, entries: Sequence[CacheEntry], watch: tuple[CacheEntry, ...] = ()) -> None:
        if not entries and not watch:
            return
        started = time.monotonic()
        try:
            timeout = min(self._services.policy.cache_timeout_seconds, self.deadline.remaining())
            answer = await self._services.directory.plan(self._query((*entries, *watch)), timeout)
        except HypicError as error:
            get_logger().warning("plan_failed", error=str(error))
            self.plan = without_directory(self.plan)
            return
        finally:
            self.plan_seconds += time.monotonic() - started
        self._lease.hold(answer.lease_id)
        hashes = [entry.content_hash for entry in entries]
        outcomes = dict(zip(hashes, answer.outcomes[: len(entries)], strict=True))
        if watch and (ticket := answer.outcomes[-1].ticket):
            self._watch = TurnWatch(watch[0], ticket)
        if any(entry.kind is EntryKind.PREFIX for entry in entries):
            self.plan = settle_prefix(self.plan, outcomes)
        self.plan = settle_segments(self.plan, outcomes)

    def _query(self, entries: Sequence[CacheEntry]) -> PlanQuery:
        return PlanQuery(
            request_id=self._subject.request_id,
            namespace=self._subject.namespace,
            model=self._subject.model.revision,
            profile_digest=self._subject.model.profile.digest,
            entries=tuple(entries),
            lease_seconds=self._services.policy.lease_seconds,
            lease_id=self.lease_id,
        )

    def _views(self) -> list[WorkerView]:
        return [view for view in self._services.workers.views() if view.worker_id not in self._lost]

    def _choose(self) -> Schedule:
        self._workers = self._views()
        schedule = schedule_plan(self.plan, self._subject.model, self._workers, self._services.capturer.waiting)
        if schedule is None:
            raise UnavailableError("no worker takes prompts now")
        return schedule

    async def _capture_cold(self) -> None:
        """Have captured what is cold.

        Where nobody else is waited for, the reply begins at once: its worker captures its own share in the sweep that combines,
        and takes the others' layer by layer as they are done. Else all of it is waited for, so that no two requests wait for
        each other.
        """
        schedule = self._choose()
        (combine,) = (view for view in self._workers if view.worker_id == schedule.combine.worker_id)
        assignments = schedule.captures.assignments
        if any(self.plan.with_status(Served.PENDING)):
            if assignments:
                timeout = min(self._services.policy.capture_timeout_seconds, self.deadline.remaining() / 2)
                orders = self._orders(assignments)
                done = await self._services.capturer.run(assignments, orders, combine, timeout)
                self.plan = settle_captures(self.plan, [order.key for order in orders], done.stored)
            return
        self._schedule = schedule
        elsewhere = [each for each in assignments if each.worker_id != combine.worker_id]
        if elsewhere:
            self._capture_under_way(elsewhere, combine)

    def _capture_under_way(self, assignments: Sequence[Assignment], combine: WorkerView) -> None:
        capturer = self._services.capturer
        alternates = {each.segment.key: capturer.choose_alternate(each, combine) for each in assignments}
        orders = self._orders(assignments)
        run = capturer.run(assignments, orders, combine, self.deadline.remaining(), alternates)
        self._captures.append(asyncio.create_task(run))
        begun = {
            each.segment.key: Captured(
                each.worker_id,
                CaptureCause.ASSIGNED,
                each.arrival_seconds,
                alternates[each.segment.key],
                self._patience(each, alternates[each.segment.key]),
            )
            for each in assignments
        }
        self.plan = settle_captures(self.plan, list(begun), begun)

    def _patience(self, assignment: Assignment, alternate_id: str) -> float:
        """Seconds that a capture may take before something else is done; there must be time left for that."""
        share = 4 if alternate_id else 2
        return min(self._services.capturer.late_after(assignment), self.deadline.remaining() / share)

    def _orders(self, assignments: Sequence[Assignment]) -> list[CaptureOrder]:
        keys = {each.segment.key for each in assignments}
        return [_order(each) for each in self.plan.with_status(Served.COLD) if each.key in keys and each.order]

    async def _await_pending(self) -> None:
        """Ask again on the same lease until the owners are done, at most twice as long as they said."""
        started = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while pending := tuple(self.plan.with_status(Served.PENDING)):
            estimate = 2 * max(each.owner_seconds for each in pending)
            patience = min(estimate, self._services.policy.pending_wait_seconds, self.deadline.remaining() / 2)
            if time.monotonic() - started >= patience:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            wanted = {each.content_hash for each in pending}
            await self._ask([entry for entry in self.plan.entries if entry.content_hash in wanted])
            if any(each.order for each in self.plan.with_status(Served.COLD)):
                await self._capture_cold()

    def _computes_in_place(self) -> bool:
        """Whether cold segments are put off; under `auto` this is where it is decided, once."""
        if self._cold is Cold.AUTO:
            services = self._services
            waiting, can_follow = services.capturer.waiting, services.background.can_capture()
            choice = choose_plan_cold(self.plan, self._subject.model, self._views(), waiting, can_follow)
            self._cold_choice = choice
            return choice is not None and choice.chosen is Cold.LIVE
        return self._cold is Cold.LIVE

    def _put_off_cold(self) -> None:
        self._deferred = tuple(each for each in self.plan.with_status(Served.COLD) if each.ticket)
        self.plan = serve_live(self.plan, lambda each: each.served is Served.COLD, Reason.FIRST_USE)

    async def _capture_behind(self) -> None:
        segments = [cold_segment(each, self._subject.model) for each in self._deferred]
        orders = [_order(each) for each in self._deferred]
        timeout = self._services.policy.capture_timeout_seconds
        await self._services.capturer.capture_apart(segments, orders, timeout)

    async def _finish_behind(self, running: Sequence[asyncio.Task[CaptureOutcome]]) -> None:
        try:
            await asyncio.wait(running, timeout=self._services.policy.capture_timeout_seconds)
        finally:
            for task in running:
                task.cancel()

    def note_captures(self, plan: Plan) -> Plan:
        """A plan with what has become by now of the captures beside the combine worker's own."""
        for task in self._captures:
            if task.done() and not task.cancelled():
                outcome = task.result()
                plan = note_captures(plan, outcome.stored, outcome.reasons.keys())
        return plan


def _order(each: PartPlan) -> CaptureOrder:
    if each.ticket is None:
        raise ValueError("only the owner of a ticket captures")
    return CaptureOrder(each.key, each.part.token_ids, each.ticket)
