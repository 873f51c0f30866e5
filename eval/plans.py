"""Which questions meet which settings in the short and the long form."""

from collections.abc import Mapping
from dataclasses import dataclass

from eval.presets import Preset, settings_of
from eval.question_sets import QuestionSet, SetKind
from eval.runner import Stage

__all__ = ["PLANS", "SEED", "Plan"]

SEED = 20_26


@dataclass(frozen=True, slots=True)
class _PlannedStage:
    """counts: questions a set; share: the part of the run's time after which the stage takes no more."""

    preset: Preset
    counts: Mapping[SetKind, int]
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in order."""

    planned: tuple[_PlannedStage, ...]

    def stages(self, seconds: float, scale: float) -> tuple[Stage, ...]:
        """The stages of a run of so many seconds, with the numbers of questions multiplied by `scale`."""
        return tuple(
            Stage(
                tuple(QuestionSet(kind, max(1, round(count * scale)), SEED) for kind, count in own.counts.items()),
                settings_of(own.preset),
                seconds * own.share,
            )
            for own in self.planned
        )


PLANS: Mapping[str, Plan] = {
    "budget": Plan((_PlannedStage(Preset.BUDGET, {SetKind.STANDARD: 2000}, 1.0),)),
    "ci": Plan((_PlannedStage(Preset.CI, {SetKind.STANDARD: 16, SetKind.REFERENCES: 16, SetKind.PASSAGES: 8}, 1.0),)),
    "short": Plan(
        (
            _PlannedStage(
                Preset.SHORT, {SetKind.STANDARD: 80, SetKind.REFERENCES: 60, SetKind.PASSAGES: 60, SetKind.LONG: 8}, 1.0
            ),
        )
    ),
    "confirm": Plan((_PlannedStage(Preset.CONFIRM, {SetKind.STANDARD: 4400, SetKind.LONG: 400}, 1.0),)),
    "long": Plan(
        (
            _PlannedStage(Preset.REFRESH, {SetKind.STANDARD: 1600, SetKind.LONG: 400}, 0.4),
            _PlannedStage(
                Preset.CORE,
                {SetKind.STANDARD: 1600, SetKind.REFERENCES: 1400, SetKind.PASSAGES: 1400, SetKind.LONG: 400},
                0.7,
            ),
            _PlannedStage(
                Preset.FULL,
                {SetKind.STANDARD: 400, SetKind.REFERENCES: 400, SetKind.PASSAGES: 400, SetKind.LONG: 100},
                1.0,
            ),
        )
    ),
}
