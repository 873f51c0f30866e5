"""Runs stages of questions in worker processes, each with a model of its own."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

from eval.pack import BatchLimits, NumberedPrompt, PackRunner
from eval.prompts import PromptReader
from eval.question_sets import QuestionSet, read_questions
from eval.rig import Rig
from eval.scoring import Outcome
from eval.settings import Prime, Setting

__all__ = ["RunOptions", "Stage", "evaluate", "load_prompts", "read_share", "run_shares"]

Found = TypeVar("Found")
_NEUTRAL_SYSTEM = "Read the documents and answer the question."
_NEUTRAL_DOCUMENT = ("Notice", "This page was left blank by the printer. Nothing of importance stands here.")


@dataclass(frozen=True, slots=True)
class Stage:
    """Question sets under settings. No pack of it begins `seconds` after the run's start."""

    sets: tuple[QuestionSet, ...]
    settings: tuple[Setting, ...]
    seconds: float = float("inf")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """One evaluation: stages one after the other, each shared out over `workers` processes."""

    checkpoint: Path
    device: str
    stages: tuple[Stage, ...]
    pack_prompts: int
    workers: int
    arena_tokens: int
    limits: BatchLimits


def load_prompts(checkpoint: Path, sets: Sequence[QuestionSet]) -> Iterator[NumberedPrompt]:
    """All questions of some sets as ids."""
    return read_share(PromptReader(checkpoint), sets, worker=0, workers=1)


def read_share(
    reader: PromptReader, sets: Sequence[QuestionSet], worker: int, workers: int
) -> Iterator[NumberedPrompt]:
    """One worker's questions; the sets take turns, so that a run cut short has some of each."""
    streams = [
        islice(zip(chosen.numbers, read_questions(chosen), strict=True), worker, None, workers) for chosen in sets
    ]
    while streams:
        for stream in list(streams):
            item = next(stream, None)
            if item is None:
                streams.remove(stream)
            else:
                yield NumberedPrompt(item[0], next(reader.read([item[1]])))


def evaluate(options: RunOptions) -> list[Outcome]:
    """Every question of every stage under the stage's settings, in order of question; fewer where the time ran out."""
    outcomes = run_shares(options.workers, partial(_run_share, options, time.time()))
    # A question of two stages has two outcomes under the settings that both have, equal but for rounding.
    unique = {(own.question, own.setting): own for own in outcomes}
    return sorted(unique.values(), key=lambda own: own.question)


def run_shares(workers: int, run_share: Callable[[int], list[Found]]) -> list[Found]:
    """What every worker's share gives, each in a process of its own where there are several, in any order."""
    if workers == 1:
        return _run_alone(run_share, 0)
    # OpenMP threads of several workers would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(_run_alone, run_share, worker) for worker in range(workers)]
        return [found for share in as_completed(shares) for found in share.result()]


def _run_alone(run_share: Callable[[int], list[Found]], worker: int) -> list[Found]:
    """One share on one thread. Denormal numbers count as 0: strong decays leave many, and they slow matrix products down."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        return run_share(worker)
    finally:
        torch.set_flush_denormal(False)


def _run_share(options: RunOptions, start: float, worker: int) -> list[Outcome]:
    """One worker's packs of all stages."""
    reader = PromptReader(options.checkpoint)
    rig = Rig(options.checkpoint, options.device, options.arena_tokens, options.limits.slots)
    primes = {
        Prime.START: reader.opening(""),
        Prime.NEUTRAL: reader.opening(_NEUTRAL_SYSTEM),
        Prime.DOCUMENT: reader.opening("") + reader.document(*_NEUTRAL_DOCUMENT),
    }
    outcomes: list[Outcome] = []
    for stage in options.stages:
        runner = PackRunner(rig, reader, stage.settings, primes, options.limits)
        prompts = read_share(reader, stage.sets, worker, options.workers)
        while time.time() < start + stage.seconds and (pack := list(islice(prompts, options.pack_prompts))):
            outcomes += _run_pack(runner, pack)
    return outcomes


def _run_pack(runner: PackRunner, pack: Sequence[NumberedPrompt]) -> list[Outcome]:
    """A pack that does not fit the device's memory is left out, aloud, so that a long run keeps the others."""
    try:
        return runner.run(pack)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        print(f"questions {[own.number for own in pack]} left out: {error}", file=sys.stderr)
        return []
