"""Speeds of workers that have measured nothing yet: nobody must be left out, or take all, for want of a figure."""

from collections.abc import Sequence
from dataclasses import replace

from services.router.domain.workers import CaptureSpeed, CombineSpeed, TransferSpeed, WorkerSpeeds, WorkerView

__all__ = ["UNMEASURED", "assume_speeds"]

# Of a small model on a CPU; what counts is that they are alike, until the first worker has measured its own.
UNMEASURED = WorkerSpeeds(
    capture=CaptureSpeed(0.0, 1e-3, 1024),
    combine=CombineSpeed(0.0, 0.0, 1e-3),
    same_host=TransferSpeed(0.001, 1e9),
    other_host=TransferSpeed(0.002, 5e8),
)


def assume_speeds(views: Sequence[WorkerView]) -> tuple[WorkerView, ...]:
    """Views in which every worker has speeds: those that are 0 become the quickest that another one has measured."""
    if all(_is_measured(view.speeds) for view in views):
        return tuple(views)
    captures = [view.speeds.capture for view in views if view.speeds.capture.token_seconds > 0]
    combines = [view.speeds.combine for view in views if view.speeds.combine.token_seconds > 0]
    # A combine's tokens say something of a capture's, and the other way round, before either is measured.
    token_seconds = [each.token_seconds for each in captures] + [each.token_seconds for each in combines]
    guess = min(token_seconds, default=UNMEASURED.capture.token_seconds)
    capture = min(captures, key=lambda own: own.token_seconds, default=CaptureSpeed(0.0, guess, 1024))
    combine = min(combines, key=lambda own: own.token_seconds, default=CombineSpeed(0.0, 0.0, guess))
    return tuple(
        view if _is_measured(view.speeds) else replace(view, speeds=_filled(view.speeds, capture, combine))
        for view in views
    )


def _is_measured(speeds: WorkerSpeeds) -> bool:
    return speeds.capture.token_seconds > 0 and speeds.capture.pass_tokens > 0 and speeds.combine.token_seconds > 0


def _filled(speeds: WorkerSpeeds, capture: CaptureSpeed, combine: CombineSpeed) -> WorkerSpeeds:
    own = speeds.capture
    pass_tokens = own.pass_tokens or capture.pass_tokens
    own = own if own.token_seconds > 0 else capture
    return replace(
        speeds,
        capture=replace(own, pass_tokens=pass_tokens),
        combine=speeds.combine if speeds.combine.token_seconds > 0 else combine,
    )
