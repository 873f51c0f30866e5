"""What a worker's description says of its calibration card, as domain types."""

from hypic.v1 import worker_pb2

from services.router.domain.calibration import Calibration, Card, Estimate

__all__ = ["calibration"]


def calibration(info: worker_pb2.WorkerInfo) -> Calibration:
    """The card that the worker has checked, or why it has none."""
    told = info.calibration
    if not told.card_digest:
        return Calibration(refusal=told.refusal or "the worker says nothing of a calibration card")
    return Calibration(
        Card(
            digest=told.card_digest,
            date=told.date,
            device=told.device,
            prompts=told.prompts,
            prompts_digest=told.prompts_digest,
            num_prompts=told.num_prompts,
            num_tokens=told.num_tokens,
            refresh_blocks=told.refresh_blocks,
            live_share=told.live_share,
            divergence=_estimate(told.divergence),
            first_divergence=_estimate(told.first_divergence),
            agreement=_estimate(told.agreement),
        ),
        refusal="",
    )


def _estimate(message: worker_pb2.Estimate) -> Estimate:
    return Estimate(message.value, message.low, message.high)
