"""What a worker says of itself: the answer to `Describe`."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypic.v1 import worker_pb2

from services.common.rpc import CHUNK_BYTES
from services.worker.adapters.served_model import Calibration, ServedModel
from services.worker.calibration import Estimate

__all__ = ["WorkerPlace", "describe"]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which of several workers this one is, and what it does.

    min_body: segments with a shorter body are computed live; fetch_bytes: of layers on their way out that are in memory at once;
    moves_states: its states go to other workers, and it takes theirs; turn_seconds: how long the state behind a reply is held
    until a router says what becomes of it; 0 holds none.
    """

    worker_id: str
    can_capture: bool = True
    can_combine: bool = True
    min_body: int = 16
    fetch_bytes: int = 256 << 20
    moves_states: bool = True
    turn_seconds: float = 5.0


def describe(served: ServedModel, place: WorkerPlace) -> Iterator[worker_pb2.DescribeResponse]:
    """The info message, then the tokenizer's bytes."""
    least_body = max(place.min_body, served.spec.conv_history, 1)
    profile = worker_pb2.Profile(
        digest=served.profile_digest,
        min_segment_tokens=served.profile.seam.least_segment(least_body),
        min_body=least_body,
        document_open=served.profile.document_open,
        document_close=served.profile.document_close,
        prime_tokens=len(served.prime_ids),
    )
    info = worker_pb2.WorkerInfo(
        worker_id=place.worker_id,
        model_name=served.name,
        model_revision=served.revision,
        family=served.spec.family,
        profile=profile,
        chat_template=served.chat_template,
        context_length=served.context_length,
        stop_token_ids=served.stop_token_ids,
        bos_token=served.bos_token,
        eos_token=served.eos_token,
        vocab_size=served.spec.vocab_size,
        max_live_tokens=served.context_length,
        can_capture=place.can_capture,
        can_combine=place.can_combine,
        state_bytes=served.state_bytes,
        state_token_bytes=served.token_bytes,
        moves_states=place.moves_states,
        num_layers=len(served.spec.kept),
        calibration=_calibration(served.calibration),
    )
    yield worker_pb2.DescribeResponse(info=info)
    for start in range(0, len(served.tokenizer_json), CHUNK_BYTES):
        yield worker_pb2.DescribeResponse(tokenizer_chunk=served.tokenizer_json[start : start + CHUNK_BYTES])


def _calibration(calibration: Calibration) -> worker_pb2.Calibration:
    card = calibration.card
    if card is None:
        return worker_pb2.Calibration(refusal=calibration.refusal)
    chosen = card.chosen
    return worker_pb2.Calibration(
        card_digest=card.digest,
        date=card.date,
        device=card.device,
        prompts=card.prompts.file,
        prompts_digest=card.prompts.digest,
        num_prompts=card.prompts.asked,
        num_tokens=card.tokens,
        refresh_blocks=chosen.refresh,
        live_share=chosen.live_share,
        divergence=_estimate(chosen.kl),
        first_divergence=_estimate(chosen.first_kl),
        agreement=_estimate(chosen.agreement),
    )


def _estimate(estimate: Estimate) -> worker_pb2.Estimate:
    return worker_pb2.Estimate(value=estimate.value, low=estimate.low, high=estimate.high)
