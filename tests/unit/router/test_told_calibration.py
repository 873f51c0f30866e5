"""What a router makes of the cards that its workers tell of."""

from dataclasses import replace

import pytest

from services.router.domain.calibration import Calibration, Card, Estimate, agreed, with_refresh
from services.router.domain.request import Refresh

NOTHING = Estimate(0.0, 0.0, 0.0)
CARD = Card("d", "2026-12-01T05:00:00Z", "CPU", "p.jsonl", "e", 40, 8, 4, 0.2, NOTHING, NOTHING, NOTHING)
HELD = Calibration(CARD, "")


def test_the_card_measured_last_counts_and_a_worker_without_one_takes_nothing_away() -> None:
    newer = Calibration(replace(CARD, digest="a", date="2026-12-02T05:00:00Z"), "")
    refused = Calibration(refusal="no calibration card")
    assert agreed([HELD, refused, newer, HELD]) == newer
    assert agreed([refused, Calibration(refusal="another")]) == refused
    assert agreed([]).card is None


def test_a_card_speaks_of_as_many_refreshed_blocks_as_were_measured() -> None:
    assert with_refresh(HELD, Refresh(4)) == HELD
    refused = Calibration(refusal="none")
    assert with_refresh(refused, Refresh(4)) == refused


@pytest.mark.parametrize(("served", "named"), [(Refresh(0), "0"), (Refresh(None, 0.2), "auto")])
def test_another_refresh_is_not_calibrated(served: Refresh, named: str) -> None:
    told = with_refresh(HELD, served)
    assert told.card is None
    assert f"HYPIC_ROUTER_REFRESH is {named}; set it to 4" in told.refusal
