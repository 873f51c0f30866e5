"""A calibration card as `hypic calibrate` writes it."""

from dataclasses import asdict

from services.worker.calibration import (
    CalibrationCard,
    CardModel,
    CardPrompts,
    CardSetting,
    Estimate,
    MeasuredCost,
    seal_card,
)
from services.worker.profile import Profile

__all__ = ["REVISION", "make_card"]

REVISION = "ab" * 32


def make_card(revision: str = REVISION, profile: Profile | None = None, **changes: object) -> CalibrationCard:
    """A card of `profile` in fp32, with other fields than usual."""
    served = profile or Profile()
    chosen = CardSetting(
        name="compose w8 prime none",
        prime="none",
        seam_window=served.seam_window,
        seam_share=served.seam_share,
        seam_window_max=served.seam_window_max,
        refresh=0,
        encoding="S float32, T float32",
        prompts=40,
        live_share=0.25,
        kl=Estimate(value=0.02, low=0.01, high=0.04),
        first_kl=Estimate(value=0.03, low=0.01, high=0.05),
        agreement=Estimate(value=0.9, low=0.8, high=1.0),
        seconds=0.1,
        state_bytes=4096,
        on_front=True,
    )
    content: dict[str, object] = {
        "model": CardModel(name="tiny", revision=revision, family="llama", dtype="float32"),
        "profile_digest": served.digest(revision, "float32"),
        "profile": asdict(served),
        "prompts": CardPrompts(
            file="prompts.jsonl",
            digest="cd" * 32,
            system_digest=None,
            asked=40,
            in_file=64,
            prompt_tokens=900.5,
            document_tokens=800.0,
        ),
        "tokens": 8,
        "cut": 0.6,
        "rule": "loss at most 0.05 nats",
        "chosen": chosen,
        "full_seconds": 0.5,
        "cost": MeasuredCost(pass_seconds=0.01, token_seconds=0.0005, points=12, worst_error=0.1, how="timed"),
        "settings": (chosen,),
        "date": "2026-12-01T05:00:00Z",
        "device": "CPU, 2 cores, x86_64",
        "versions": {"torch": "2.13.0"},
        "command": "hypic calibrate tiny --prompts prompts.jsonl",
        "seconds": 12.5,
    }
    return seal_card(**(content | changes))
