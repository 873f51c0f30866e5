"""One calibration from files to files."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.results import cpu_device
from eval.calibrate.candidates import PrimeText, encoded, grid, profile_of, served_setting
from eval.calibrate.card import Compared, card_setting, card_text, write_profile
from eval.calibrate.choice import CUT_LOSSES, Measured, MostLoss, Rule, choose, choose_encoding, front
from eval.calibrate.cost import CostCurve
from eval.calibrate.draw import draw_front
from eval.calibrate.measuring import Asker, Progress, build_rig, measure_cost, share_to_look
from eval.calibrate.prompts import PromptFile, chat_reader, read_primes, read_prompt_file, to_prompts
from eval.calibrate.records import Identity, OutcomeFile
from eval.calibrate.summary import CostModel, least_prompts, summarise, whole_prompts
from eval.encodings import segment_decays, stored_linear_bytes
from eval.pack import NumberedPrompt
from eval.settings import Prime
from services.worker.adapters.served_model import CARD_FILE, ServedModel, read_served_model
from services.worker.calibration import CalibrationCard, CardModel, CardPrompts, MeasuredCost, seal_card, write_card
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.settings import WorkerSettings

__all__ = ["USUAL_NATS", "Calibrated", "Calibration", "CalibrationOptions"]

PROFILE_FILE, TEXT_FILE, PICTURE_FILE = "profile.toml", "calibration.md", "front.png"
_OUTCOME_FILE = "outcomes.jsonl"
# The rest is for the encodings of what is chosen.
_GRID_SHARE = 0.75
_COST_SHARE = 0.03
# Where no loss is given.
USUAL_NATS = 0.05
_HOW = "fitted to passes of the prompt of median length, alone on the device, in full and behind windows of 8 to 64"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """No prompt is begun after `seconds`; tokens: of a reply, that are compared; folder: where the files go."""

    settings: WorkerSettings
    prompts: Path
    system: Path | None
    rule: Rule
    tokens: int
    seconds: float
    folder: Path
    command: str


@dataclass(frozen=True, slots=True)
class Calibrated:
    """card: None where no setting keeps to the rule; notes: what the user is to know beside it."""

    settings: Sequence[Measured]
    full_seconds: float | None
    card: CalibrationCard | None
    notes: tuple[str, ...]


class Calibration:
    """Everything that is read before the first prompt is asked; then measures, chooses and writes.

    Raises:
        EvaluationError, LiveEvaluationError: files or options cannot be used.
        WorkerError, RouterError: the checkpoint cannot be served.
    """

    def __init__(self, options: CalibrationOptions, progress: Progress) -> None:
        self._options = options
        self._began = time.monotonic()
        self._served: ServedModel = read_served_model(options.settings)
        self._file: PromptFile = read_prompt_file(options.prompts, options.system)
        reader = chat_reader(options.settings, self._served, options.tokens)
        self._primes: dict[Prime, PrimeText] = read_primes(reader, self._served, self._file.system)
        self._prompts, self._left_out = to_prompts(reader, self._file)
        outcomes = OutcomeFile(options.folder / _OUTCOME_FILE, self._identity())
        rig = build_rig(options.settings, self._prompts, self._primes, options.tokens)
        self._asker = Asker(rig, reader, self._primes, outcomes, progress)

    def run(self) -> Calibrated:
        """Outcomes are kept as they come; a later run goes on with them."""
        options = self._options
        rig = self._asker.rig
        attends = any(isinstance(layer.mixer, PagedAttention) for layer in rig.model.layers)
        wanted = grid(served_setting(self._served.profile, self._primes), self._primes, refreshes=attends)
        curve = measure_cost(self._asker, self._prompts, _COST_SHARE * options.seconds)
        outcomes = self._asker.ask(self._prompts, wanted, self._began + _GRID_SHARE * options.seconds)
        measured = summarise(outcomes, self._prompts, wanted, CostModel(curve, share_to_look(rig)), self._cut)
        numbers = whole_prompts(outcomes, wanted)
        asked = [own for own in self._prompts if own.number in numbers]
        full_seconds = None if curve is None else curve.seconds(_mean(len(own.prompt.token_ids) for own in asked))
        notes = self._notes(len(asked))
        chosen = choose(measured, options.rule)
        if chosen is None:
            return Calibrated(measured, full_seconds, None, notes)
        compared = self._compare_encodings(asked, measured, chosen)
        if compared.encodings:
            stored = choose_encoding(compared.encodings, compared.sizes, options.rule)
            if stored.setting != chosen.setting:
                chosen, asked = stored, [own for own in asked if own.number in compared.encoded]
        card = self._card(asked, compared, chosen, curve, full_seconds)
        return Calibrated(measured, full_seconds, card, (*notes, *self._write(card, measured, chosen)))

    def _compare_encodings(
        self, asked: Sequence[NumberedPrompt], measured: Sequence[Measured], chosen: Measured
    ) -> Compared:
        """What is chosen under every encoding, on the prompts that it was chosen by as far as time allows."""
        rig = self._asker.rig
        if not rig.memory.linear_slots:
            return Compared(measured)
        wanted = encoded(chosen.setting)
        outcomes = self._asker.ask(asked, wanted, self._began + self._options.seconds)
        summary = summarise(outcomes, asked, wanted, CostModel(None, 0.0), self._cut)
        # How a state is stored changes what it weighs, not what runs.
        found = [replace(own, seconds=chosen.seconds) for own in summary]
        rig.arena.rewind(0)
        decays = segment_decays(rig, asked[0].prompt.documents, chosen.setting.seam_window)
        if not len(decays):
            return Compared(measured)
        sizes = [stored_linear_bytes(own.setting.encoding, self._served.spec, decays) for own in found]
        return Compared(measured, found, sizes, frozenset(whole_prompts(outcomes, wanted)))

    def _card(
        self,
        asked: Sequence[NumberedPrompt],
        compared: Compared,
        chosen: Measured,
        curve: CostCurve | None,
        full_seconds: float | None,
    ) -> CalibrationCard:
        options, served, file = self._options, self._served, self._file
        profile = profile_of(chosen.setting, served.profile, self._primes)
        return seal_card(
            model=CardModel(
                name=served.name, revision=served.revision, family=served.spec.family, dtype=options.settings.dtype
            ),
            profile_digest=profile.digest(served.revision, options.settings.dtype),
            profile=asdict(profile),
            prompts=CardPrompts(
                file=file.name,
                digest=file.digest,
                system_digest=file.system_digest,
                asked=len(asked),
                in_file=len(file.questions),
                prompt_tokens=_mean(len(own.prompt.token_ids) for own in asked),
                document_tokens=_mean(own.prompt.document_tokens for own in asked),
            ),
            tokens=options.tokens,
            cut=self._cut,
            rule=str(options.rule),
            chosen=card_setting(chosen, on_front=chosen.setting in {own.setting for own in front(compared.settings)}),
            full_seconds=full_seconds,
            cost=None if curve is None else MeasuredCost(**asdict(curve), how=_HOW),
            settings=compared.rows(),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            device=self._device,
            versions=_versions(),
            command=options.command,
            seconds=round(time.monotonic() - self._began, 1),
        )

    def _write(self, card: CalibrationCard, measured: Sequence[Measured], chosen: Measured) -> list[str]:
        """The files; what could not be written, and why."""
        folder = self._options.folder
        profile = profile_of(chosen.setting, self._served.profile, self._primes)
        write_profile(profile, folder / PROFILE_FILE, f"Calibrated on {card.prompts.asked} prompts; see {TEXT_FILE}.")
        write_card(card, folder / CARD_FILE)
        (folder / TEXT_FILE).write_text(card_text(card), encoding="utf-8")
        try:
            draw_front(measured, chosen, folder / PICTURE_FILE)
        except ModuleNotFoundError as error:
            return [f"the front is not drawn: {error.name} is missing; install hypic[eval]"]
        return []

    def _identity(self) -> Identity:
        return Identity(
            revision=self._served.revision,
            profile_digest=self._served.profile_digest,
            prompts=self._file.digest,
            system=self._file.system,
            tokens=self._options.tokens,
            device=self._device,
        )

    @property
    def _cut(self) -> float:
        rule = self._options.rule
        return CUT_LOSSES * (rule.nats if isinstance(rule, MostLoss) else USUAL_NATS)

    @cached_property
    def _device(self) -> str:
        return cpu_device() if self._options.settings.device == "cpu" else torch.cuda.get_device_name()

    def _notes(self, asked: int) -> tuple[str, ...]:
        found = list(self._left_out[:3])
        if len(self._left_out) > len(found):
            found.append(f"… and {len(self._left_out) - len(found)} more prompts left out")
        if asked < len(self._prompts):
            found.append(
                f"{asked} of {len(self._prompts)} prompts were asked in time; run it again to go on, or raise --seconds"
            )
        nats = self._cut / CUT_LOSSES
        if asked < least_prompts(nats, self._cut):
            found.append(
                f"{asked} prompts cannot show a mean below {nats:g} nats, whatever they say: at least"
                f" {least_prompts(nats, self._cut)} are needed"
            )
        return tuple(found)


def _mean(values: Iterable[int]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("hypic", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
