"""What `GET /v1/models` says of the calibration."""

from services.router.domain.calibration import Calibration, Estimate

__all__ = ["calibration_view"]


def calibration_view(calibration: Calibration) -> dict[str, object]:
    """As JSON."""
    card = calibration.card
    if card is None:
        return {"status": "uncalibrated", "reason": calibration.refusal}
    return {
        "status": "calibrated",
        "card": card.digest,
        "date": card.date,
        "device": card.device,
        "prompts": {"file": card.prompts, "digest": card.prompts_digest, "asked": card.num_prompts},
        "tokens": card.num_tokens,
        "refresh": card.refresh_blocks,
        "live_share": card.live_share,
        "loss": {
            "kl_nats": _estimate(card.divergence),
            "first_token_kl_nats": _estimate(card.first_divergence),
            "agreement": _estimate(card.agreement),
        },
    }


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
