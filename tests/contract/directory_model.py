"""A brute-force model of the directory: flat lists, no indexes, everything recomputed at every question.

It knows nothing of the adapters' tables, so that an error in their bookkeeping shows as a difference.
"""

from dataclasses import dataclass, field

from services.cache.domain.orders import PinReply
from services.cache.domain.values import Limits, PlanOutcome, PublishOutcome

__all__ = ["DirectoryModel", "ModelRecord", "ModelTicket", "tenant_of"]

# Tokens of every content.
_TOKENS = 100


@dataclass(slots=True)
class ModelTicket:
    """A ticket under the name of its content, `tenant/content`; `ended` with the reason why it is worth nothing."""

    name: str
    lease: int
    expires_at: float
    tags: frozenset[str]
    since: float
    ended: str = ""


@dataclass(slots=True)
class ModelEntry:
    """A published content."""

    name: str
    size: int
    ticket: ModelTicket
    tags: frozenset[str]
    key: bytes
    since: dict[str, float]
    uses: int = 0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A registered document."""

    content: str
    tags: frozenset[str]


@dataclass(slots=True)
class DirectoryModel:
    """One model; leases, tickets, entries and documents as the port describes them.

    The document of a name is registered under the same name; each content belongs to one document.
    """

    limits: Limits
    now: float
    leases: dict[int, float] = field(default_factory=dict)
    pins: set[tuple[int, str]] = field(default_factory=set)
    tickets: list[ModelTicket] = field(default_factory=list)
    entries: list[ModelEntry] = field(default_factory=list)
    workers: dict[str, float] = field(default_factory=dict)
    records: dict[str, ModelRecord] = field(default_factory=dict)
    clock: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)
    sightings: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.leases = {lease: ends for lease, ends in self.leases.items() if ends > self.now}
        self.workers = {worker: ends for worker, ends in self.workers.items() if ends > self.now}
        for ticket in self.tickets:
            if ticket.expires_at <= self.now and ticket.ended != "published":
                ticket.ended = "expired"
        for entry in self.entries:
            entry.since = {worker: since for worker, since in entry.since.items() if worker in self.workers}
        self._age()

    def _age(self) -> None:
        seconds = self.limits.entry_ttl_seconds
        if seconds:
            self.entries = [entry for entry in self.entries if entry.ticket.since + seconds > self.now]
        self._tidy()

    def plan(self, lease: int, names: list[str], seconds: float) -> list[PlanOutcome]:
        """Outcomes in order; new tickets are the last of `tickets`."""
        self.leases[lease] = max(self.leases.get(lease, 0), self.now + seconds)
        self.seen[tenant_of(names[0])] = self.now
        counted: set[str] = set()
        return [self._plan_one(lease, name, counted) for name in names]

    def _plan_one(self, lease: int, name: str, counted: set[str]) -> PlanOutcome:
        record = self.records.get(name)
        if record and record.content != name:
            return PlanOutcome.SUPERSEDED
        entry = self.found(name)
        if entry:
            if (lease, entry.name) not in self.pins:
                self._use(entry)
            self.pins.add((lease, entry.name))
            return PlanOutcome.HIT
        ticket = self.live_ticket(name)
        if not ticket:
            if name not in counted:
                self.sightings[name] = self.sightings.get(name, 0) + 1
                counted.add(name)
            if self.sightings[name] < self.limits.min_uses:
                return PlanOutcome.LIVE
            expires_at = max(self.leases[lease], self.now + self.limits.ticket_seconds)
            self.tickets.append(ModelTicket(name, lease, expires_at, record.tags if record else frozenset(), self.now))
            return PlanOutcome.COLD
        return PlanOutcome.COLD if ticket.lease == lease else PlanOutcome.PENDING

    def _use(self, entry: ModelEntry) -> None:
        entry.uses += 1
        entry.score = self.clock + entry.uses * _TOKENS / entry.size

    def renew(self, lease: int, seconds: float) -> bool:
        """Whether the lease is known."""
        if lease not in self.leases:
            return False
        self.leases[lease] = max(self.leases[lease], self.now + seconds)
        for ticket in self.tickets:
            if ticket.lease == lease and ticket.ended in ("", "invalidated"):
                ticket.expires_at = max(ticket.expires_at, self.leases[lease])
        return True

    def release(self, lease: int) -> None:
        """End a lease."""
        if self.leases.pop(lease, None) is not None:
            for ticket in self.tickets:
                if ticket.lease == lease and ticket.ended != "published":
                    ticket.ended = "released"
            self._tidy()

    def publish(self, ticket: ModelTicket, key: bytes, worker: str, size: int) -> PublishOutcome | None:
        """The outcome; None when the worker is unknown."""
        entry = next((entry for entry in self.entries if entry.ticket is ticket), None)
        if not entry and ticket.ended:
            return PublishOutcome.INVALIDATED if ticket.ended == "invalidated" else PublishOutcome.FENCED
        if worker not in self.workers:
            return None
        if entry and worker in entry.since:
            return PublishOutcome.ACCEPTED
        if not self._make_room(entry.size if entry else size, ticket.name):
            ticket.ended = ticket.ended or "over budget"
            return PublishOutcome.OVER_BUDGET
        if not entry:
            ticket.ended = "published"
            entry = ModelEntry(ticket.name, size, ticket, ticket.tags, key, {})
            self._use(entry)
            self.entries.append(entry)
            if ticket.lease in self.leases:
                self.pins.add((ticket.lease, ticket.name))
        entry.since[worker] = self.now
        self._age()
        return PublishOutcome.ACCEPTED

    def _make_room(self, size: int, name: str) -> bool:
        """Evict for a content; whether it fits then."""
        stay, tenant, limits = list(self.entries), tenant_of(name), self.limits
        leased = {leased for _, leased in self.pins}
        sharers = {one for one, seen in self.seen.items() if seen + limits.share_seconds > self.now}
        share = limits.budget_bytes / max(len(sharers), 1)

        def lowest(of: str) -> ModelEntry | None:
            free = [entry for entry in stay if tenant_of(entry.name) == of and entry.name not in leased | {name}]
            free = [entry for entry in free if not self.pinned & {of, entry.name}]
            return min(free, key=lambda entry: (entry.score, entry.key), default=None)

        def may_go(entry: ModelEntry) -> bool:
            of = tenant_of(entry.name)
            return of == tenant or of not in sharers or _held(stay, of) - _held([entry], of) >= share

        while _held(stay, tenant) + size > (limits.namespace_budget_bytes or limits.budget_bytes):
            own = lowest(tenant)
            if own is None:
                return False
            stay.remove(own)
        while _held(stay, "") + size > limits.budget_bytes:
            able = [
                entry for of in {tenant_of(entry.name) for entry in stay} if (entry := lowest(of)) and may_go(entry)
            ]
            if not able:
                return False
            stay.remove(min(able, key=lambda entry: (entry.score, entry.key)))
        self.clock = max([self.clock, *(entry.score for entry in self.entries if entry not in stay)])
        self.entries = stay
        return True

    def invalidate(self, names: set[str]) -> int:
        """Remove contents; the number of entries that fell."""
        for ticket in self.tickets:
            if ticket.name in names and not ticket.ended:
                ticket.ended = "invalidated"
        fallen = [entry for entry in self.entries if entry.name in names]
        self.entries = [entry for entry in self.entries if entry.name not in names]
        self._tidy()
        return len(fallen)

    def pin(self, scope: str) -> PinReply | None:
        """Let nothing of a tenant or content be evicted; None when pins would keep too much."""
        if scope not in self.pinned and self._promised(self.pinned | {scope}) > self.limits.pin_limit_bytes:
            return None
        self.pinned.add(scope)
        return self._pin_reply(scope)

    def unpin(self, scope: str) -> PinReply:
        """End a pin."""
        self.pinned.discard(scope)
        return self._pin_reply(scope)

    def _pin_reply(self, scope: str) -> PinReply:
        found = [entry for entry in self.entries if scope in (entry.name, tenant_of(entry.name))]
        return PinReply(len(found), self._promised(self.pinned), self.limits.pin_limit_bytes)

    def _promised(self, scopes: set[str]) -> int:
        tenants = {scope for scope in scopes if "/" not in scope}
        others = [entry for entry in self.entries if entry.name in scopes and tenant_of(entry.name) not in tenants]
        budget = self.limits.namespace_budget_bytes or self.limits.budget_bytes
        return budget * len(tenants) + _held(others, "")

    def change_keys(self, names: set[str]) -> None:
        """These contents have other keys from now on, which nobody has seen."""
        self.sightings = {name: count for name, count in self.sightings.items() if name not in names}

    def register(self, name: str, record: ModelRecord) -> int | None:
        """The number of entries that fell; None when nothing changed."""
        if self.records.get(name) == record:
            return None
        self.records[name] = record
        return self.invalidate({name})

    def names_of(self, tag: str) -> set[str]:
        """Contents that fall with a tag."""
        registered = {name for name, record in self.records.items() if tag in record.tags}
        return registered | {each.name for each in self._tagged() if tag in each.tags}

    def _tagged(self) -> list[ModelEntry | ModelTicket]:
        """What has ended has no tags any more: the next ticket of its name has those of its registration then."""
        return [*self.entries, *(ticket for ticket in self.tickets if not ticket.ended)]

    def forget(self, names: set[str]) -> None:
        """Registrations end."""
        self.records = {name: record for name, record in self.records.items() if name not in names}

    def lose_everything(self) -> None:
        """The directory restarts without any memory, and takes nothing back."""
        self.lose_documents()
        self.restart()
        self.entries = []

    def lose_documents(self) -> None:
        """Registrations and pins of scopes are forgotten."""
        self.records, self.pinned = {}, set()

    def restart(self) -> None:
        """Leases, tickets and uses are forgotten, and every living worker's receipts bring its copies back."""
        self.leases, self.pins = {}, set()
        self.clock, self.seen, self.sightings = 0.0, {}, {}
        for ticket in self.tickets:
            ticket.ended = ticket.ended if ticket.ended == "published" else "lost"
        for entry in self.entries:
            entry.uses = 0
            self._use(entry)
            entry.since = dict.fromkeys(entry.since, self.now)
        self.workers = dict.fromkeys(self.workers, self.now + self.limits.worker_ttl_seconds)

    def heartbeat(self, worker: str, listed: set[str]) -> None:
        """A sign of life that lists contents, all of them held."""
        self.workers[worker] = self.now + self.limits.worker_ttl_seconds
        for entry in self.entries:
            since = entry.since.get(worker)
            if since is not None and entry.name not in listed and since <= self.now - self.limits.settle_seconds:
                del entry.since[worker]
        self._tidy()

    def entry(self, name: str) -> ModelEntry | None:
        """The published content of this name."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def found(self, name: str) -> ModelEntry | None:
        """The entry that answers for a name: its own, else the public one of the same content."""
        return self.entry(name) or self.entry(f"public/{name.partition('/')[2]}")

    def live_ticket(self, name: str) -> ModelTicket | None:
        """The ticket under which this name is being computed."""
        return next((ticket for ticket in self.tickets if ticket.name == name and not ticket.ended), None)

    def held_by(self, worker: str) -> set[str]:
        """Names of the copies of a worker."""
        return {entry.name for entry in self.entries if worker in entry.since}

    def used_bytes(self, tenant: str = "") -> int:
        """Bytes of all copies, or of those of a tenant."""
        return _held(self.entries, tenant)

    def _tidy(self) -> None:
        self.entries = [entry for entry in self.entries if entry.since]
        published = {entry.name for entry in self.entries}
        self.pins = {(lease, name) for lease, name in self.pins if lease in self.leases and name in published}


def tenant_of(name: str) -> str:
    """The tenant of a name."""
    return name.partition("/")[0]


def _held(entries: list[ModelEntry], tenant: str) -> int:
    return sum(entry.size * len(entry.since) for entry in entries if tenant_of(entry.name).startswith(tenant))
