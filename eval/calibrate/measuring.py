"""Asks prompts under settings, one prompt after the other, until they are through or the time is."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eval.calibrate.candidates import REFRESHES, WINDOWS, PrimeText
from eval.calibrate.cost import CostCurve, Pass, fit_curve
from eval.calibrate.records import OutcomeFile
from eval.chat_prompts import ChatReader
from eval.pack import BatchLimits, NumberedPrompt, PackRunner
from eval.rig import PAGE_TOKENS, Rig
from eval.scoring import Outcome
from eval.settings import Mode, Prime, Setting
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.settings import WorkerSettings

__all__ = ["Asker", "Progress", "build_rig", "measure_cost", "share_to_look"]

Progress = Callable[[int, int, float], None]
_LIMITS = BatchLimits(live_tokens=4_096, slots=2 + max(REFRESHES) * 2)
_ONE_BY_ONE = BatchLimits(live_tokens=1, slots=_LIMITS.slots)
_COST_ROUNDS = 8
_COST_WINDOWS = WINDOWS[:4]


def build_rig(
    settings: WorkerSettings, prompts: Sequence[NumberedPrompt], primes: Mapping[Prime, PrimeText], tokens: int
) -> Rig:
    """The model with room for the captures of the longest prompt and one batch of settings.

    Raises:
        CheckpointError: it cannot be loaded, or the evaluation does not know its kind of layer.
    """
    longest = max(len(own.prompt.token_ids) for own in prompts)
    documents = max(len(own.prompt.documents) for own in prompts)
    # A body that begins inside a page has a page of its own; a run of live tokens ends inside one.
    captured = len(primes) * (longest + documents * (len(WINDOWS) + 2) * PAGE_TOKENS)
    captured += sum(len(own.token_ids) + PAGE_TOKENS for own in primes.values())
    layout = tokens + 2 * PAGE_TOKENS * (documents + 2 * max(REFRESHES) + 2)
    batch = max(_LIMITS.live_tokens, longest) + longest + _LIMITS.slots * layout
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    return Rig(settings.checkpoint, settings.device, captured + batch, _LIMITS.slots, dtype)


def share_to_look(rig: Rig) -> float:
    """The share of the layers that a pass takes which only looks for blocks: up to the first attention layer."""
    layers = rig.model.layers
    first = next((n for n, layer in enumerate(layers) if isinstance(layer.mixer, PagedAttention)), len(layers) - 1)
    return (first + 1) / len(layers)


@dataclass(slots=True)
class Asker:
    """Runs prompts on a rig; what the file holds already is not asked again."""

    rig: Rig
    reader: ChatReader
    primes: Mapping[Prime, PrimeText]
    file: OutcomeFile
    progress: Progress

    def ask(self, prompts: Sequence[NumberedPrompt], settings: Sequence[Setting], until: float) -> list[Outcome]:
        """Outcomes of every prompt that was begun before `until`, on the monotonic clock, and of the first one anyhow."""
        runner = PackRunner(self.rig, self.reader, settings, self._fixed(), _LIMITS)
        names = [str(Mode.OFF), *(own.name for own in settings)]
        found: list[Outcome] = []
        began = time.monotonic()
        for place, own in enumerate(prompts):
            outcomes = self.file.of(own.number, names)
            if not outcomes:
                if found and time.monotonic() > until:
                    continue
                outcomes = runner.run([own])
                self.file.add(outcomes)
            found += outcomes
            self.progress(place + 1, len(prompts), time.monotonic() - began)
        return found

    def _fixed(self) -> dict[Prime, tuple[int, ...]]:
        return {kind: own.token_ids for kind, own in self.primes.items() if kind is not Prime.NONE}

    def time_passes(self, prompt: NumberedPrompt, seconds: float) -> list[Pass]:
        """Passes of one prompt, alone each: in full and under windows, in turn, once and as often again as the seconds allow."""
        passes: list[Pass] = []
        settings = [Setting(Mode.COMPOSE, Prime.NONE, window) for window in _COST_WINDOWS]
        runner = PackRunner(
            self.rig,
            self.reader,
            settings,
            {},
            _ONE_BY_ONE,
            lambda tokens, seconds: passes.append(Pass(tokens, seconds)),
        )
        began = time.monotonic()
        for _ in range(_COST_ROUNDS):
            runner.run([prompt])
            if time.monotonic() - began > seconds:
                break
        return passes


def measure_cost(asker: Asker, prompts: Sequence[NumberedPrompt], seconds: float) -> CostCurve | None:
    """Of the prompt of median length, in some `seconds`; None where windows make no difference to its live tokens."""
    by_length = sorted(prompts, key=lambda own: len(own.prompt.token_ids))
    try:
        return fit_curve(asker.time_passes(by_length[len(by_length) // 2], seconds))
    except ValueError:
        return None
