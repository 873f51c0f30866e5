"""Which families have a profile with a calibration card in the repository: a table of docs/quality.md."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from services.worker.calibration import CalibrationCard, load_card
from services.worker.inspection.families import FAMILY_NOTES

__all__ = ["family_table"]

_NO_WEIGHTS = "not measured: no weights of it are at hand here"
_REFUSED = "not measured: the evaluation refuses linear layers with rotary position"
_NOTES: Mapping[str, str] = {
    "llama": "no card; SmolLM2's profile rests on [passages](#real-weights-smollm2-135m-on-passages)",
    "ring_linear": _REFUSED,
    "ring_2_5": _REFUSED,
}


def family_table(folders: Iterable[Path]) -> list[str]:
    """A line a family; folders: of checkpoints with a profile and its card."""
    cards = [load_card(folder / "calibration.json") for folder in folders]
    lines = [
        "| family | profile | prompts | live | KL, nats a token | same beginning |",
        f"| --- | --- |{' ---: |' * 4}",
    ]
    for notes in FAMILY_NOTES:
        own = [card for card in cards if card.model.family == notes.name]
        lines += [_line(notes.name, card) for card in own] or [
            f"| {notes.name} | {_NOTES.get(notes.name, _NO_WEIGHTS)} | | | | |"
        ]
    return lines


def _line(family: str, card: CalibrationCard) -> str:
    chosen = card.chosen
    loss = f"{chosen.kl.value:.3f} [{chosen.kl.low:.3f}, {chosen.kl.high:.3f}]"
    cells = [
        family,
        f"[{card.model.name}](../models/{card.model.name}/calibration.md), `{chosen.name}`",
        f"{card.prompts.asked} of `{card.prompts.file}`",
        f"{100 * chosen.live_share:.1f} %",
        loss,
        f"{100 * chosen.agreement.value:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"
