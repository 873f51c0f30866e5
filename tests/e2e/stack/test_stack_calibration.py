"""A stack says on what its model was calibrated, or that nobody has."""

from pathlib import Path

from demo.client import calibration_line
from services.worker.calibration import load_card
from tests.e2e.stack.served import ServedStack

CARD = Path("models/demo/calibration.json")


def _told(stack: ServedStack) -> dict[str, object]:
    (model,) = stack.http.get("/v1/models").json()["data"]
    found: dict[str, object] = model["calibration"]
    return found


def test_the_demo_model_is_served_with_the_card_that_was_measured(stack: ServedStack) -> None:
    card = load_card(CARD)
    told = _told(stack)
    assert (told["status"], told["card"]) == ("calibrated", card.digest)
    assert told["prompts"] == {"file": "prompts.jsonl", "digest": card.prompts.digest, "asked": card.prompts.asked}
    loss = told["loss"]
    assert isinstance(loss, dict)
    assert loss["kl_nats"] == card.chosen.kl.model_dump()
    assert calibration_line(stack.base_url).startswith(f"calibrated on {card.prompts.asked} prompts of prompts.jsonl: ")


def test_a_model_without_a_card_is_uncalibrated(fragile: ServedStack) -> None:
    assert calibration_line(fragile.base_url) == "uncalibrated: no calibration card"
    assert _told(fragile) == {"status": "uncalibrated", "reason": "no calibration card"}
