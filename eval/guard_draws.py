"""`python -m eval.guard_draws --out FILE`: divergences of first tokens that the router's guard would see of the demo model.

Its tests draw from them. healthy: as the model's profile has it; unprimed: states captured behind nothing, where the profile
names a prime, as by a worker whose prime is lost. Whole distributions are compared; the guard sees the twenty likeliest tokens.
"""

import argparse
import json
from pathlib import Path

import torch

from bench.results import cpu_device
from eval.pack import BatchLimits
from eval.plans import SEED
from eval.presets import DEFAULT_SETTING
from eval.question_sets import QuestionSet, SetKind
from eval.runner import RunOptions, Stage, evaluate
from eval.settings import Mode, Prime, Setting

__all__ = ["divergences"]

_CHECKPOINT = Path(__file__).resolve().parent.parent / "models" / "demo"
_KINDS = {
    "healthy": DEFAULT_SETTING,
    "unprimed": Setting(Mode.COMPOSE, Prime.NONE, DEFAULT_SETTING.seam_window),
}


def divergences(count: int, device: str) -> dict[str, list[float]]:
    """Of so many standard questions, in nats."""
    settings = (Setting(Mode.OFF, Prime.NONE), *_KINDS.values())
    stage = Stage((QuestionSet(SetKind.STANDARD, count, SEED),), settings)
    outcomes = evaluate(RunOptions(_CHECKPOINT, device, (stage,), 4, 1, 60_000, BatchLimits(8_192, 32)))
    return {
        kind: [max(0.0, own.scores.first_divergence) for own in outcomes if own.setting == setting.name]
        for kind, setting in _KINDS.items()
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m eval.guard_draws", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="questions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = divergences(arguments.count, arguments.device)
    device = cpu_device() if arguments.device == "cpu" else torch.cuda.get_device_name()
    command = f"python -m eval.guard_draws --count {arguments.count} --device {arguments.device} --out {arguments.out}"
    nats = {kind: [round(value, 5) for value in values] for kind, values in found.items()}
    arguments.out.write_text(json.dumps({"device": device, "command": command, "nats": nats}) + "\n")


if __name__ == "__main__":
    main()
