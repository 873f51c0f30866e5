"""`GET /v1/models` says what the model was calibrated on and what it loses, or why nobody knows."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypic.v1 import worker_pb2

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until

CARD = worker_pb2.Calibration(
    card_digest="ab" * 32,
    date="2026-12-01T05:00:00Z",
    device="CPU, 2 cores, x86_64",
    prompts="prompts.jsonl",
    prompts_digest="cd" * 32,
    num_prompts=40,
    num_tokens=8,
    refresh_blocks=2,
    live_share=0.25,
    divergence=worker_pb2.Estimate(value=0.02, low=0.01, high=0.04),
    first_divergence=worker_pb2.Estimate(value=0.03, low=0.01, high=0.05),
    agreement=worker_pb2.Estimate(value=0.9, low=0.8, high=1.0),
)


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack(RouterSettings(refresh="2")) as stack:
        yield stack


def told(stack: RouterStack) -> dict[str, Any]:
    (model,) = stack.http.get("/v1/models").json()["data"]
    found: dict[str, Any] = model["calibration"]
    return found


def restart_worker(stack: RouterStack, calibration: worker_pb2.Calibration | None) -> None:
    """A card comes and goes with the worker's process."""
    stack.stop(stack.worker_server)
    stack.worker.calibration = calibration
    stack.start_worker()
    wait_until(stack.is_ready)


def test_the_entry_follows_the_workers_card(stack: RouterStack) -> None:
    assert told(stack) == {"status": "uncalibrated", "reason": "the worker says nothing of a calibration card"}
    restart_worker(stack, worker_pb2.Calibration(refusal="calibration.json: model.revision: of other weights"))
    wait_until(lambda: told(stack)["reason"] == "calibration.json: model.revision: of other weights")
    restart_worker(stack, CARD)
    wait_until(lambda: told(stack)["status"] == "calibrated")
    assert told(stack) == {
        "status": "calibrated",
        "card": "ab" * 32,
        "date": "2026-12-01T05:00:00Z",
        "device": "CPU, 2 cores, x86_64",
        "prompts": {"file": "prompts.jsonl", "digest": "cd" * 32, "asked": 40},
        "tokens": 8,
        "refresh": 2,
        "live_share": 0.25,
        "loss": {
            "kl_nats": {"value": 0.02, "low": 0.01, "high": 0.04},
            "first_token_kl_nats": {"value": 0.03, "low": 0.01, "high": 0.05},
            "agreement": {"value": 0.9, "low": 0.8, "high": 1.0},
        },
    }


def test_a_card_of_another_refresh_does_not_count(stack: RouterStack) -> None:
    other = worker_pb2.Calibration()
    other.CopyFrom(CARD)
    other.refresh_blocks = 0
    restart_worker(stack, other)
    wait_until(lambda: "HYPIC_ROUTER_REFRESH is 2; set it to 0" in told(stack).get("reason", ""))
    assert told(stack)["status"] == "uncalibrated"
