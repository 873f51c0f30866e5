"""The guard over composed answers: which requests are looked at again, what came of it, and which tags do without composing."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.common.telemetry import get_logger
from services.router.domain.divergence import Comparison
from services.router.domain.guard import Switch, TagRecord, is_sampled, observe
from services.router.domain.model import ModelInfo
from services.router.domain.tenancy import OTHER_TENANTS

__all__ = [
    "GuardEvent",
    "GuardMetrics",
    "GuardPolicy",
    "GuardReport",
    "ModelVersion",
    "QualityGuard",
    "SampleOutcome",
    "TagReport",
]

_MAX_EVENTS = 64
# A tag that is answered without composing costs time until it is seen to be well again.
_EXACT_SHARE_FACTOR = 10


class SampleOutcome(StrEnum):
    """What became of a sampled request. `busy`: workers had traffic all the time; `full`: enough others waited already;
    `not_composed`: nothing of it was composed when it was looked at again; `failed`: a service did not answer.
    """

    COMPARED = "compared"
    BUSY = "busy"
    FULL = "full"
    NOT_COMPOSED = "not_composed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GuardPolicy:
    """share: of the composed requests; budget: mean divergence in nats that a tag may have; budgets: of tags that have their own;
    groups: the tenants' groups, which are tags too.
    """

    share: float
    budget: float
    budgets: Mapping[str, float]
    groups: Mapping[str, str]

    def budget_of(self, tag: str) -> float:
        """In nats."""
        return self.budgets.get(tag, self.budget)

    def tag_of(self, asked: str, tenant: str) -> str:
        """The tag that a request counts under: its own where that is configured, else its tenant's group."""
        known = asked in self.budgets or asked in self.groups.values()
        return asked if known else self.groups.get(tenant, OTHER_TENANTS)


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """What evidence is about: a model under one revision and profile."""

    name: str = ""
    revision: str = ""
    profile_digest: str = ""

    @classmethod
    def of(cls, info: ModelInfo) -> "ModelVersion":
        """Of what workers serve."""
        return cls(info.name, info.revision, info.profile.digest)


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A tag changed its mode, `at` seconds since the Unix epoch; `record` is the evidence.

    cause: `divergence`, `recovery`, or `new_model`, where what was known says nothing any more.
    """

    at: float
    model: ModelVersion
    tag: str
    is_exact: bool
    cause: str
    budget: float
    record: TagRecord


@dataclass(frozen=True, slots=True)
class TagReport:
    """A tag as it stands."""

    tag: str
    budget: float
    record: TagRecord


@dataclass(frozen=True, slots=True)
class GuardReport:
    """All of it; events newest first."""

    share: float
    model: ModelVersion
    tags: tuple[TagReport, ...]
    samples: Mapping[SampleOutcome, int]
    events: tuple[GuardEvent, ...]


class GuardMetrics(Protocol):
    """What measures the guard."""

    def count_sample(self, outcome: SampleOutcome) -> None:
        """A sampled request has come to this."""
        ...

    def observe(self, model: str, tag: str, sample: Comparison) -> None:
        """A comparison was made."""
        ...

    def set_mode(self, model: str, tag: str, *, is_exact: bool) -> None:
        """How a tag is answered from now on."""
        ...

    def count_switch(self, model: str, tag: str, cause: str) -> None:
        """A tag changed its mode."""
        ...


class QualityGuard:
    """Keeps the records of all tags, of which there are few. What it knows ends with the process; `clock` in seconds."""

    def __init__(self, policy: GuardPolicy, metrics: GuardMetrics, clock: Callable[[], float] = time.time) -> None:
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._version = ModelVersion()
        self._records: dict[str, TagRecord] = {}
        self._numbers: dict[str, int] = {}
        self._samples = dict.fromkeys(SampleOutcome, 0)
        self._events: deque[GuardEvent] = deque(maxlen=_MAX_EVENTS)

    @property
    def version(self) -> ModelVersion:
        """What evidence is gathered about now."""
        return self._version

    def follow(self, version: ModelVersion) -> None:
        """The workers serve this: of another version than before nothing is known yet, and every tag composes."""
        if version == self._version:
            return
        for tag, record in self._records.items():
            if record.is_exact:
                self._tell(tag, TagRecord(), record, "new_model")
        self._version = version
        self._records = {}

    def tag_of(self, asked: str, tenant: str) -> str:
        """See `GuardPolicy`."""
        return self._policy.tag_of(asked, tenant)

    def is_exact(self, tag: str) -> bool:
        """Whether the tag's requests are answered without composing."""
        record = self._records.get(tag)
        return record is not None and record.is_exact

    def takes(self, tag: str) -> bool:
        """Count a request that was composed, or would have been, and say whether it is looked at again."""
        number = self._numbers[tag] = self._numbers.get(tag, 0) + 1
        factor = _EXACT_SHARE_FACTOR if self.is_exact(tag) else 1
        return is_sampled(number, min(self._policy.share * factor, 1.0))

    def drop(self, outcome: SampleOutcome) -> None:
        """A sample came to nothing."""
        self._samples[outcome] += 1
        self._metrics.count_sample(outcome)

    def note(self, version: ModelVersion, tag: str, sample: Comparison) -> None:
        """A sample's comparison; one of a version that is served no more says nothing."""
        self.drop(SampleOutcome.COMPARED)
        self._metrics.observe(version.name, tag, sample)
        if version != self._version:
            return
        found = observe(self._records.get(tag, TagRecord()), sample, self._policy.budget_of(tag))
        if isinstance(found, Switch):
            self._tell(tag, found.after, found.before, "divergence" if found.after.is_exact else "recovery")
            found = found.after
        self._records[tag] = found
        self._metrics.set_mode(version.name, tag, is_exact=found.is_exact)

    def report(self) -> GuardReport:
        """What an administrator sees."""
        tags = (TagReport(tag, self._policy.budget_of(tag), record) for tag, record in sorted(self._records.items()))
        return GuardReport(
            self._policy.share, self._version, tuple(tags), dict(self._samples), tuple(reversed(self._events))
        )

    def _tell(self, tag: str, after: TagRecord, before: TagRecord, cause: str) -> None:
        budget = self._policy.budget_of(tag)
        event = GuardEvent(self._clock(), self._version, tag, after.is_exact, cause, budget, before)
        self._events.append(event)
        self._metrics.count_switch(self._version.name, tag, cause)
        self._metrics.set_mode(self._version.name, tag, is_exact=after.is_exact)
        get_logger().warning(
            "quality_guard_switched",
            tag=tag,
            mode="exact" if after.is_exact else "compose",
            cause=cause,
            model=self._version.name,
            revision=self._version.revision,
            num_samples=before.num_samples,
            mean_divergence_nats=round(before.mean_divergence, 6),
            mean_agreement=round(before.mean_agreement, 4),
            budget_nats=budget,
            evidence_log10=round(math.log10(before.evidence), 2),
        )
