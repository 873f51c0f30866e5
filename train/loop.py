"""The run: training by the clock, export, scores."""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.data import questions
from train.data.prompts import PromptEncoder
from train.export import cut_weights, export
from train.loader import Loader
from train.network import Network
from train.optimiser import Optimiser
from train.scoring import Encoded, encode_questions, exact_match
from train.shape import ModelShape, new_weights
from train.steps import Curriculum, Stepper, learning_rate_factor

_EVALUATION_SEED = 101
_PROBE_QUESTIONS = 480
_OBSERVE_EVERY = 20
_PRINT_SECONDS = 6.0

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run; `seconds` counts from the process's start."""

    out: Path
    tokenizer_file: Path
    seconds: float
    tokens: int
    workers: int
    seed: int
    muon_rate: float
    adam_rate: float
    score_seconds: float
    questions: int
    compiled: bool
    pieces: bool


class Run:
    """The model in training with all that drives it."""

    def __init__(self, settings: Settings, started: float) -> None:
        self._settings = settings
        self._started = started
        # The loader forks, so it comes before the first use of the device.
        self._loader = Loader(settings.tokenizer_file, settings.tokens, settings.workers, settings.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.set_float32_matmul_precision("high")
        self._shape = ModelShape()
        self._weights = new_weights(self._shape, settings.seed, device)
        self._network = Network(self._shape, self._weights, torch.bfloat16, compiled=settings.compiled)
        self._optimiser = Optimiser(self._weights, settings.muon_rate, settings.adam_rate)
        self._stepper = Stepper(self._network, self._optimiser, settings.tokens)
        self._curve: list[Report] = []

    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._started

    def train(self) -> None:
        """Steps until the time is up; notes losses and scores along the way."""
        settings, curriculum = self._settings, Curriculum()
        probe = self._encode(_PROBE_QUESTIONS, _EVALUATION_SEED, long_documents=False)
        step, begun = 0, self.elapsed()
        next_score, next_print = begun + settings.score_seconds, 0.0
        while (now := self.elapsed()) < settings.seconds:
            progress = (now - begun) / (settings.seconds - begun)
            self._loader.set_difficulty(curriculum.difficulty(progress))
            self._optimiser.set_rate(learning_rate_factor(step, progress))
            self._stepper.step(self._loader.next())
            step += 1
            if step % _OBSERVE_EVERY == 0:
                curriculum.observe(progress, self._stepper.losses()[0])
                if now > next_print:
                    next_print = now + _PRINT_SECONDS
                    print(f"{now:6.1f}s step {step} {self._stepper.losses()}", flush=True)
            if now > next_score:
                self._note(step, exact_match(self._network, probe, settings.tokens))
                next_score = self.elapsed() + settings.score_seconds
        self._note(step, {})
        self._loader.stop()

    def export(self) -> None:
        """Writes the checkpoint, then holds the weights to what was written."""
        encoder = PromptEncoder(self._settings.tokenizer_file)
        export(self._settings.out, self._shape, self._weights, encoder.end_of_text, encoder.message_end)
        if self._settings.pieces:
            cut_weights(self._settings.out)
        with torch.no_grad():
            for weight in self._weights.values():
                weight.copy_(weight.bfloat16())

    def report(self) -> None:
        """Scores the exported weights and writes `report.json`, after each set anew."""
        settings, device = self._settings, self._weights["embed"].device
        report: Report = {
            "parameters": sum(w.numel() for w in self._weights.values()),
            "tokens": self._curve[-1]["step"] * settings.tokens,
            "seed": settings.seed,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "curve": self._curve,
        }
        for name, long_documents in (("standard", False), ("long", True)):
            count = settings.questions // (4 if long_documents else 1)
            asked = self._encode(count, _EVALUATION_SEED + 1, long_documents=long_documents)
            scores = exact_match(self._network, asked, settings.tokens)
            report[name] = {"questions": len(asked), **scores}
            report["seconds"] = round(self.elapsed())
            (settings.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
            print(name, json.dumps(report[name]), flush=True)

    def _note(self, step: int, scores: dict[str, float]) -> None:
        point = {"seconds": round(self.elapsed()), "step": step, "losses": self._stepper.losses(), **scores}
        self._curve.append(point)
        print(json.dumps(point), flush=True)

    def _encode(self, count: int, seed: int, *, long_documents: bool) -> list[Encoded]:
        asked = list(questions(seed, min(count, self._settings.questions), long_documents=long_documents))
        return encode_questions(self._settings.tokenizer_file, asked)


def run_command(started: float) -> None:
    """Command line; `started` is when the process began, by the monotonic clock."""
    parser = argparse.ArgumentParser(prog="python -m train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer-file", type=Path, default="models/demo/tokenizer.json")
    parser.add_argument("--seconds", type=float, default=500.0, help="when training ends")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=0.002)
    parser.add_argument("--score-seconds", type=float, default=60.0)
    parser.add_argument("--questions", type=int, default=3200)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--pieces", action="store_true", help="cut the weights file")
    run = Run(Settings(**vars(parser.parse_args())), started)
    run.train()
    run.export()
    run.report()
