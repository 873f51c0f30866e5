"""Composition against full recompute on questions over passages: real weights, a file of questions, one process.

Everything that a served prompt depends on is the checkpoint's own: chat template, tokenizer, document wrapper. Contexts are
capped, because a CPU reads some hundred tokens of such a model a second.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bench.results import Row, write_results
from eval.checks import EvaluationError
from eval.pack import BatchLimits, NumberedPrompt, PackRunner
from eval.passage_prompts import PassageReader, read_questions_file
from eval.rig import Rig
from eval.scoring import Outcome
from eval.settings import Mode, Prime, Setting
from eval.statistics import Interval, mean_interval
from services.worker.engine.seam import SeamWindow

__all__ = ["PASSAGE_SETTINGS", "PassageOptions", "passage_rows", "run_passages", "write_passages"]

_WINDOWS = {Prime.NONE: (0, 8, 32), Prime.START: (0, 4, 8, 16, 32), Prime.SYSTEM: (0, 8, 32)}
PASSAGE_SETTINGS = (
    Setting(Mode.EXACT),
    Setting(Mode.ADDITION),
    *(Setting(Mode.COMPOSE, prime, SeamWindow(w)) for prime, windows in _WINDOWS.items() for w in windows),
)
# Of each question; with four of 160 tokens, one thread takes some 20 seconds a question.
_PASSAGES = 4
# Prompts with their captures, and one batch of settings, in keys and values: 46 KiB a token of a 135M model.
_ARENA_TOKENS = 30_000
_LIMITS = BatchLimits(live_tokens=2_048, slots=32)


@dataclass(frozen=True, slots=True)
class PassageOptions:
    """One run: `count` questions at most, none begun after `seconds`; passages are cut to `passage_tokens`."""

    checkpoint: Path
    questions: Path
    count: int
    seconds: float
    passage_tokens: int
    device: str


def run_passages(options: PassageOptions) -> list[Outcome]:
    """Every question under full recompute and under all settings, one line of progress each.

    Raises:
        EvaluationError: the file of questions cannot be used, or no question of it was begun in time.
        CheckpointError: the checkpoint cannot be served.
    """
    torch.set_num_threads(1)
    began = time.monotonic()
    questions = read_questions_file(options.questions)
    reader = PassageReader(options.checkpoint, _PASSAGES, options.passage_tokens)
    rig = Rig(options.checkpoint, options.device, _ARENA_TOKENS, _LIMITS.slots)
    runner = PackRunner(rig, reader, PASSAGE_SETTINGS, {Prime.START: reader.start()}, _LIMITS)
    outcomes: list[Outcome] = []
    for question in islice(questions, options.count):
        if time.monotonic() > began + options.seconds:
            break
        outcomes += runner.run([NumberedPrompt(question.number, reader.read(question))])
        print(f"question {question.number} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not outcomes:
        raise EvaluationError(f"{options.questions}: no question was asked; give one whose answer stands in a passage")
    return outcomes


def passage_rows(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Rows `setting / measure` of every setting, in order of first appearance."""
    by_setting: dict[str, list[Outcome]] = {}
    for own in outcomes:
        by_setting.setdefault(own.setting, []).append(own)
    reference = sorted(by_setting[str(Mode.OFF)], key=lambda own: own.question)
    for setting, found in by_setting.items():
        yield from _setting_rows(setting, sorted(found, key=lambda own: own.question), reference)


def _setting_rows(setting: str, found: Sequence[Outcome], reference: Sequence[Outcome]) -> Iterator[Row]:
    scores, expected = [own.scores for own in found], [own.scores for own in reference]
    live = [100 * own.live_tokens / own.document_tokens for own in found]
    yield Row(f"{setting} / questions", len(found), "questions")
    yield Row(f"{setting} / live share", round(float(np.mean(live)), 2), "%", better="lower")
    yield Row(f"{setting} / exact match", round(100 * float(np.mean([own.exact for own in scores])), 2), "%")
    yield Row(f"{setting} / token F1", round(100 * float(np.mean([own.f1 for own in scores])), 2), "%")
    pairs = list(zip(expected, scores, strict=True))
    measured = {
        "first token KL": ("nats", [own.first_divergence for own in scores]),
        "answer KL": ("nats/token", [own.divergence for own in scores]),
        "answers changed": ("%", [100.0 * (not own.agrees) for own in scores]),
        "exact match lost": ("points", [100.0 * (full.exact - own.exact) for full, own in pairs]),
        "token F1 lost": ("points", [100.0 * (full.f1 - own.f1) for full, own in pairs]),
    }
    for name, (unit, values) in measured.items():
        yield from _interval_rows(
            f"{setting} / {name}", unit, mean_interval(np.array(values, dtype=np.float64), seed=0)
        )


def _interval_rows(measure: str, unit: str, interval: Interval) -> Iterator[Row]:
    yield Row(measure, round(interval.value, 4), unit, better="lower")
    yield Row(f"{measure}, low end", round(interval.low, 4), unit, better="lower")
    yield Row(f"{measure}, high end", round(interval.high, 4), unit, better="lower")


def write_passages(out: Path, options: PassageOptions, command: str, outcomes: Sequence[Outcome]) -> None:
    """Store the rows."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, one thread"
    write_results(out, command, device, passage_rows(outcomes))
