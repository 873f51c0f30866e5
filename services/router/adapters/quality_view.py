"""What `GET /admin/quality` shows: numbers and names of tags, and no text of anybody."""

import math

from services.router.domain.guard import TagRecord
from services.router.guard import GuardEvent, GuardReport, ModelVersion, TagReport

__all__ = ["quality_view"]


def quality_view(report: GuardReport) -> dict[str, object]:
    """As JSON."""
    return {
        "object": "quality",
        "share": report.share,
        "model": _version(report.model),
        "samples": {outcome.value: count for outcome, count in report.samples.items()},
        "tags": [_tag(each) for each in report.tags],
        "events": [_event(each) for each in report.events],
    }


def _version(version: ModelVersion) -> dict[str, object]:
    return {"id": version.name, "revision": version.revision, "profile": version.profile_digest}


def _tag(report: TagReport) -> dict[str, object]:
    mode = "exact" if report.record.is_exact else "compose"
    return {"tag": report.tag, "mode": mode, "budget_nats": report.budget} | _evidence(report.record)


def _event(event: GuardEvent) -> dict[str, object]:
    return {
        "at": event.at,
        "model": _version(event.model),
        "tag": event.tag,
        "mode": "exact" if event.is_exact else "compose",
        "cause": event.cause,
        "budget_nats": event.budget,
    } | _evidence(event.record)


def _evidence(record: TagRecord) -> dict[str, object]:
    return {
        "num_samples": record.num_samples,
        "mean_divergence_nats": record.mean_divergence,
        "mean_agreement": record.mean_agreement,
        "evidence_log10": math.log10(record.evidence),
    }
