"""A brute-force model of the directory: flat lists, no indexes, everything recomputed at every question.

It knows nothing of the adapters' tables, so that an error in their bookkeeping shows as a difference.
"""

from dataclasses import dataclass, field

from services.cache.domain.values import Limits, PlanOutcome, PublishOutcome

__all__ = ["DirectoryModel", "ModelRecord", "ModelTicket", "tenant_of"]


@dataclass(slots=True)
class ModelTicket:
    """A ticket under the name of its content, `tenant/content`; `ended` with the reason why it is worth nothing."""

    name: str
    lease: int
    expires_at: float
    tags: frozenset[str]
    ended: str = ""


@dataclass(slots=True)
class ModelEntry:
    """A published content."""

    name: str
    size: int
    ticket: ModelTicket
    tags: frozenset[str]
    used_at: float
    used_order: bytes
    since: dict[str, float]


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
        self._tidy()

    def plan(self, lease: int, names: list[str], seconds: float) -> list[PlanOutcome]:
        """Outcomes in order; new tickets are the last of `tickets`."""
        self.leases[lease] = max(self.leases.get(lease, 0), self.now + seconds)
        return [self._plan_one(lease, name) for name in names]

    def _plan_one(self, lease: int, name: str) -> PlanOutcome:
        record = self.records.get(name)
        if record and record.content != name:
            return PlanOutcome.SUPERSEDED
        entry = self.found(name)
        if entry:
            entry.used_at = self.now
            self.pins.add((lease, entry.name))
            return PlanOutcome.HIT
        ticket = self.live_ticket(name)
        if not ticket:
            expires_at = max(self.leases[lease], self.now + self.limits.ticket_seconds)
            self.tickets.append(ModelTicket(name, lease, expires_at, record.tags if record else frozenset()))
            return PlanOutcome.COLD
        return PlanOutcome.COLD if ticket.lease == lease else PlanOutcome.PENDING

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
            entry = ModelEntry(ticket.name, size, ticket, ticket.tags, self.now, key, {})
            self.entries.append(entry)
            if ticket.lease in self.leases:
                self.pins.add((ticket.lease, ticket.name))
        entry.since[worker] = self.now
        return PublishOutcome.ACCEPTED

    def _make_room(self, size: int, spared: str) -> bool:
        pinned = {name for _, name in self.pins}
        free = [entry for entry in self.entries if entry.name not in pinned and entry.name != spared]
        free.sort(key=lambda entry: (entry.used_at, entry.used_order))
        tenant = tenant_of(spared)
        victims: list[ModelEntry] = []
        for budget, of in ((self.limits.namespace_budget_bytes, tenant), (self.limits.budget_bytes, "")):
            candidates = [entry for entry in free if tenant_of(entry.name).startswith(of)]
            while self.used_bytes(of) - _held(victims, of) + size > budget:
                if not candidates:
                    return False
                free.remove(candidates[0])
                victims.append(candidates.pop(0))
        for victim in victims:
            self.entries.remove(victim)
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
        return [*self.entries, *self.tickets]

    def forget(self, names: set[str]) -> None:
        """Registrations end."""
        self.records = {name: record for name, record in self.records.items() if name not in names}

    def lose_memory(self) -> None:
        """The directory restarts empty, and every living worker's receipts bring its copies back."""
        self.leases, self.pins, self.records = {}, set(), {}
        for ticket in self.tickets:
            ticket.ended = ticket.ended if ticket.ended == "published" else "lost"
        for entry in self.entries:
            entry.used_at = self.now
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
