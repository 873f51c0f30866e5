"""How each part of a prompt is to be served: plain data, and the pure steps from a draft to the final plan."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from services.common.content import content_hash
from services.router.domain.combine_choice import Holding
from services.router.domain.entries import CacheEntry, EntryKind, documents_of, prefix_entries
from services.router.domain.model import Profile
from services.router.domain.parts import Part, PartKind, Prompt, Reason
from services.router.domain.request import Reuse

__all__ = [
    "CacheEntry",
    "CaptureCause",
    "Captured",
    "EntryKind",
    "Outcome",
    "PartPlan",
    "Plan",
    "Served",
    "Snapshot",
    "Ticket",
    "draft",
    "note_captures",
    "serve_live",
    "settle_captures",
    "settle_prefix",
    "settle_segments",
    "with_true_snapshots",
    "without_directory",
    "without_prefix",
]


class Served(StrEnum):
    """How a part is served: design §2, `plan`."""

    PREFIX = "prefix"
    HIT = "hit"
    COLD = "cold"
    PENDING = "pending"
    LIVE = "live"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to compute and publish one state."""

    ticket_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The directory's answer for one entry: `served` is HIT, COLD, PENDING or LIVE; `key` is opaque.

    LIVE, for the reason given: the entry is neither reused nor stored. `holders` with HIT; `tier` is the first one's.
    """

    served: Served
    key: bytes
    tier: str = ""
    ticket: Ticket | None = None
    owner_seconds: float = 0.0
    reason: Reason | None = None
    holders: tuple[Holding, ...] = ()


class CaptureCause(StrEnum):
    """Why a worker captured a segment: it was assigned to it, or another one had failed, or was late."""

    ASSIGNED = "assigned"
    RETRIED = "retried"
    HEDGED = "hedged"


@dataclass(frozen=True, slots=True)
class Captured:
    """A capture by itself, ahead of the reply or under it. `seconds`: from its order until it was stored.

    While it runs: `wait_seconds` is how long it may take before it counts as late, `alternate_id` the worker that does it too
    then, or when this one fails; empty where there is none.
    """

    worker_id: str
    cause: CaptureCause
    seconds: float
    alternate_id: str = ""
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A prefix snapshot that the worker is to take after the first `after_part` parts."""

    key: bytes
    after_part: int
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One part's plan. `first` is the directory's first answer, `served` the present decision.

    `repeats` marks a further occurrence of a segment within the prompt: it is computed once. `captured`: its state has
    been computed for this request, or is being computed; what is cold and has none, the worker captures as it combines.
    `failure`: why it is not reused after all. `holders`: the workers that can be asked for its state. `beneath`: the state of
    its own that a segment has which a prefix snapshot covers.
    """

    part: Part
    content_hash: bytes
    served: Served
    first: Served
    reason: Reason | None
    key: bytes = b""
    tier: str = ""
    ticket: Ticket | None = None
    owner_seconds: float = 0.0
    repeats: bool = False
    captured: Captured | None = None
    failure: Reason | None = None
    holders: tuple[Holding, ...] = ()
    beneath: Outcome | None = None

    @property
    def order(self) -> Ticket | None:
        """The ticket under which the worker captures this part as it combines."""
        return None if self.served is not Served.COLD or self.repeats or self.captured else self.ticket


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole prompt's plan; `entries` are the look-ups that it wants, prefixes by length, longest first.

    `prefix_holders`: workers that hold the snapshot under `prefix_key`.
    """

    parts: tuple[PartPlan, ...]
    entries: tuple[CacheEntry, ...]
    prefix_key: bytes = b""
    prefix_holders: tuple[Holding, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()

    def with_status(self, served: Served) -> Iterator[PartPlan]:
        """Parts that are served so, in prompt order, each content once."""
        return (part for part in self.parts if part.served is served and not part.repeats)


def draft(prompt: Prompt, profile: Profile, reuse: Reuse) -> Plan:
    """The plan before the directory is asked: everything live, with the entries worth asking for."""
    hashes = [part.content_hash or content_hash(profile.digest, part.token_ids) for part in prompt.parts]
    seen: set[bytes] = set()
    parts: list[PartPlan] = []
    for part, content in zip(prompt.parts, hashes, strict=True):
        is_segment = part.kind is PartKind.SEGMENT
        parts.append(
            PartPlan(part, content, Served.LIVE, Served.LIVE, _draft_reason(part, reuse), repeats=content in seen)
        )
        if is_segment:
            seen.add(content)
    alike: defaultdict[bytes, list[Part]] = defaultdict(list)
    for part, content in zip(prompt.parts, hashes, strict=True):
        alike[content].append(part)
    prefixes = prefix_entries(prompt, hashes, profile.min_body, reuse)
    segments = tuple(
        CacheEntry(EntryKind.SEGMENT, each.content_hash, each.part.num_tokens, documents_of(alike[each.content_hash]))
        for each in parts
        if reuse is Reuse.COMPOSE and each.part.kind is PartKind.SEGMENT and not each.repeats
    )
    return Plan(tuple(parts), prefixes + segments)


def settle_prefix(plan: Plan, outcomes: Mapping[bytes, Outcome]) -> Plan:
    """Take the longest prefix that is a hit, and order snapshots of the longer ones that are cold."""
    prefixes = [entry for entry in plan.entries if entry.kind is EntryKind.PREFIX]
    hit = next((entry for entry in prefixes if outcomes[entry.content_hash].served is Served.HIT), None)
    covered = hit.after_part if hit else 0
    wanted = [(entry, outcomes[entry.content_hash]) for entry in prefixes if entry.after_part > covered]
    snapshots = tuple(
        Snapshot(outcome.key, entry.after_part, outcome.ticket)
        for entry, outcome in wanted
        if outcome.served is Served.COLD and outcome.ticket
    )
    is_elsewhere = any(outcome.served is Served.PENDING for _, outcome in wanted) and not snapshots
    uncovered = Reason.COMPUTED_ELSEWHERE if is_elsewhere else Reason.FIRST_USE
    num_asked = _num_asked(plan)
    parts = [
        _settle_covered(each, outcomes[hit.content_hash])
        if hit and index < covered
        else _explain_uncovered(each, uncovered if index < num_asked else Reason.TOO_SHORT)
        for index, each in enumerate(plan.parts)
    ]
    found = outcomes[hit.content_hash] if hit else None
    return replace(
        plan,
        parts=tuple(parts),
        prefix_key=found.key if found else b"",
        prefix_holders=found.holders if found else (),
        snapshots=snapshots,
    )


def settle_segments(plan: Plan, outcomes: Mapping[bytes, Outcome]) -> Plan:
    """Give every segment its outcome; parts without one stay as they are."""

    def settle(each: PartPlan) -> PartPlan:
        outcome = outcomes.get(each.content_hash)
        if outcome is None or each.part.kind is not PartKind.SEGMENT:
            return each
        if each.served is Served.PREFIX:
            return replace(each, beneath=outcome if outcome.served is Served.HIT else None)
        # Written out: `replace` takes longer than all else here.
        return PartPlan(
            each.part,
            each.content_hash,
            outcome.served,
            outcome.served if each.first is Served.LIVE else each.first,
            _segment_reason(each, outcome),
            outcome.key,
            outcome.tier,
            outcome.ticket,
            outcome.owner_seconds,
            each.repeats,
            each.captured,
            each.failure,
            outcome.holders,
            each.beneath,
        )

    return replace(plan, parts=tuple(map(settle, plan.parts)))


def settle_captures(plan: Plan, ordered: Collection[bytes], stored: Mapping[bytes, Captured]) -> Plan:
    """After captures of cold segments: parts whose key is stored are composed, others that were ordered computed in place."""
    parts = tuple(
        replace(each, captured=done, holders=(Holding(done.worker_id),))
        if each.served is Served.COLD and (done := stored.get(each.key))
        else each
        for each in plan.parts
    )
    failed = set(ordered) - set(stored)
    return serve_live(
        replace(plan, parts=parts),
        lambda each: each.served is Served.COLD and each.key in failed,
        Reason.CAPTURE_FAILED,
    )


def note_captures(plan: Plan, stored: Mapping[bytes, Captured], failed: Collection[bytes]) -> Plan:
    """Captures that were under way have ended so."""

    def note(each: PartPlan) -> PartPlan:
        if each.captured is None:
            return each
        failure = Reason.CAPTURE_FAILED if each.key in failed else None
        return replace(each, captured=stored.get(each.key, each.captured), failure=failure)

    return replace(plan, parts=tuple(map(note, plan.parts)))


def _segment_reason(each: PartPlan, outcome: Outcome) -> Reason | None:
    if outcome.served is Served.LIVE:
        return outcome.reason
    return None if outcome.served is Served.HIT else each.reason or Reason.FIRST_USE


def serve_live(plan: Plan, choose: Callable[[PartPlan], bool], reason: Reason) -> Plan:
    """Compute the chosen parts in place, for this reason."""
    chosen = [choose(each) for each in plan.parts]
    if not any(chosen):
        return plan
    parts = (
        replace(each, served=Served.LIVE, reason=reason) if is_chosen else each
        for each, is_chosen in zip(plan.parts, chosen, strict=True)
    )
    return replace(plan, parts=tuple(parts))


def without_directory(plan: Plan) -> Plan:
    """Everything that was to be looked up is computed in place."""
    asked = {entry.content_hash for entry in plan.entries}
    parts = [
        replace(each, served=Served.LIVE, reason=Reason.CACHE_UNAVAILABLE)
        if index < _num_asked(plan) or each.content_hash in asked
        else each
        for index, each in enumerate(plan.parts)
    ]
    return replace(plan, parts=tuple(parts), prefix_key=b"", snapshots=())


def without_prefix(plan: Plan, reason: Reason) -> Plan:
    """What the prefix snapshot would have served is composed where it has a state of its own, else computed, for this reason."""
    live = serve_live(plan, lambda each: each.served is Served.PREFIX and each.beneath is None, reason)
    parts = tuple(_uncover(each, each.beneath) if each.beneath else each for each in live.parts)
    return replace(live, parts=parts, prefix_key=b"", prefix_holders=())


def with_true_snapshots(plan: Plan) -> Plan:
    """Without snapshots whose key says composed of a segment that is now to be computed in place."""
    if not any(entry.is_composed for entry in plan.entries):
        return plan
    composed = {entry.after_part for entry in plan.entries if entry.is_composed}
    served = (Served.PREFIX, Served.HIT, Served.COLD)
    untrue = [
        i for i, each in enumerate(plan.parts) if each.part.kind is PartKind.SEGMENT and each.served not in served
    ]
    true = (
        one for one in plan.snapshots if one.after_part not in composed or not untrue or one.after_part <= untrue[0]
    )
    return replace(plan, snapshots=tuple(true))


def _uncover(each: PartPlan, outcome: Outcome) -> PartPlan:
    return replace(
        each,
        served=Served.HIT,
        first=Served.HIT,
        key=outcome.key,
        tier=outcome.tier,
        holders=outcome.holders,
        beneath=None,
    )


def _settle_covered(each: PartPlan, outcome: Outcome) -> PartPlan:
    return replace(each, served=Served.PREFIX, first=Served.PREFIX, reason=None, tier=outcome.tier)


def _explain_uncovered(each: PartPlan, reason: Reason) -> PartPlan:
    is_prefix = each.part.kind is PartKind.PREFIX and each.reason is Reason.NOT_MARKED
    return replace(each, reason=reason) if is_prefix else each


def _num_asked(plan: Plan) -> int:
    """Parts at the prompt's head that some prefix look-up covers."""
    return max((entry.after_part for entry in plan.entries), default=0)


def _draft_reason(part: Part, reuse: Reuse) -> Reason | None:
    if reuse is Reuse.OFF:
        return Reason.REUSE_OFF
    if part.kind is PartKind.SEGMENT:
        return Reason.REUSE_EXACT if reuse is Reuse.EXACT else None
    return part.live_reason
