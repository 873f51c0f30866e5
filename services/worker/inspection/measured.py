"""Decays of real text: the engine captures it, and the planes say what every head kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import read_served_model
from services.worker.engine.loop import Engine
from services.worker.engine.requests import CaptureEvent, CaptureJob, CaptureSegment
from services.worker.engine.states import SegmentState
from services.worker.inspection.decays import BODY_TOKENS, DecayReport, DecaySource, DecaySpectrum, spectrum
from services.worker.inspection.report import CheckpointReport
from services.worker.models.errors import CheckpointError
from services.worker.settings import WorkerSettings

__all__ = ["measure_decays"]


def measure_decays(report: CheckpointReport, text: Path) -> CheckpointReport:
    """The report with decays of a text's head, captured at every body length that the text fills.

    Loads the model as a worker with the same settings would.

    Raises:
        CheckpointError: the checkpoint cannot be served, has no linear layer, or the text is too short.
        ProfileError: the profile is malformed.
        OSError: the text cannot be read.
        UnicodeDecodeError: it is no UTF-8.
    """
    settings = WorkerSettings.load_or_exit(checkpoint=Path(report.directory))
    served = read_served_model(settings)
    tokenizer = Tokenizer.from_str(served.tokenizer_json.decode())
    token_ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    seam = served.profile.seam
    lengths = [length for length in map(seam.least_segment, BODY_TOKENS) if length <= len(token_ids)]
    if not lengths or not any(served.spec.states):
        raise CheckpointError(
            f"{text}: {len(token_ids)} tokens do not fill the shortest body of {BODY_TOKENS[0]}, or the model has no linear"
            " layer; give a longer text"
        )
    engine = build_engine(settings, served)
    spectra = tuple(_measure(engine, token_ids[:length]) for length in lengths)
    num_heads = sum(state.num_heads for state in served.spec.states)
    return replace(report, decays=DecayReport(DecaySource.MEASURED, num_heads, spectra))


def _measure(engine: Engine, token_ids: Sequence[int]) -> DecaySpectrum:
    events: list[CaptureEvent] = []
    key = len(token_ids).to_bytes(8)
    engine.submit_capture(CaptureJob("check", (CaptureSegment(key, tuple(token_ids)),), events.append))
    while not engine.is_idle:
        engine.step()
    state = engine.context.store.get(key)
    if not isinstance(state, SegmentState):
        raise CheckpointError(
            f"{len(token_ids)} tokens were not captured ({events[0].reason}); raise HYPIC_WORKER_PAGE_BYTES"
        )
    return spectrum(state.body_tokens, [float(decay) for plane in state.planes for decay in plane.decay])
