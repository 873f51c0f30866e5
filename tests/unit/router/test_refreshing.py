"""What a request's refresh comes to beside its deployment's, and what it must not be served from."""

import pytest
from pydantic import ValidationError

from services.router.domain.plan import EntryKind, draft
from services.router.domain.refreshing import NO_REFRESH, RefreshPolicy, settle_refresh, without_composed_prefixes
from services.router.domain.request import PromptError, Refresh, Reuse, ReuseOptions
from services.router.settings import RouterSettings
from tests.unit.router.test_plan import PROFILE, PROMPT

AUTO = Refresh(None)


@pytest.mark.parametrize(
    ("options", "policy", "expected"),
    [
        (ReuseOptions(), RefreshPolicy(), NO_REFRESH),
        (ReuseOptions(refresh=Refresh(4)), RefreshPolicy(), Refresh(4)),
        (ReuseOptions(), RefreshPolicy(Refresh(7)), Refresh(7)),
        (ReuseOptions(refresh=Refresh(0)), RefreshPolicy(Refresh(7)), NO_REFRESH),
        (ReuseOptions(refresh=AUTO, ttft_budget_seconds=0.5), RefreshPolicy(), Refresh(None, 0.5)),
        (ReuseOptions(refresh=AUTO), RefreshPolicy(budget_seconds=2.0), Refresh(None, 2.0)),
        (ReuseOptions(ttft_budget_seconds=0.5), RefreshPolicy(AUTO, 2.0), Refresh(None, 0.5)),
        (ReuseOptions(Reuse.EXACT, refresh=Refresh(4)), RefreshPolicy(), NO_REFRESH),
        (ReuseOptions(Reuse.OFF), RefreshPolicy(AUTO, 2.0), NO_REFRESH),
    ],
)
def test_a_request_goes_before_its_deployment(options: ReuseOptions, policy: RefreshPolicy, expected: Refresh) -> None:
    assert settle_refresh(options, policy) == expected


@pytest.mark.parametrize(
    "options", [ReuseOptions(refresh=AUTO), ReuseOptions(ttft_budget_seconds=1.0, refresh=Refresh(3))]
)
def test_a_budget_belongs_to_auto(options: ReuseOptions) -> None:
    with pytest.raises(PromptError) as caught:
        settle_refresh(options, RefreshPolicy())
    assert caught.value.param == "hypic.ttft_budget_seconds"


def test_a_refreshing_prompt_asks_for_no_snapshot_of_composed_segments() -> None:
    """With a message's end behind the segments there is one that the plain prompt asks for."""
    turns = PROMPT.__class__((*PROMPT.parts[:-1], PROMPT.parts[1], PROMPT.parts[-2], PROMPT.parts[-1]))
    plan = draft(turns, PROFILE, Reuse.COMPOSE)
    assert any(entry.is_composed for entry in plan.entries)
    left = without_composed_prefixes(plan)
    assert not any(entry.is_composed for entry in left.entries)
    assert {entry.kind for entry in left.entries} == {EntryKind.PREFIX, EntryKind.SEGMENT}
    assert left.parts == plan.parts


def test_settings_name_the_budget_that_auto_lacks() -> None:
    assert RouterSettings(refresh="auto", ttft_budget_seconds=0.4).refresh == "auto"
    with pytest.raises(ValidationError, match="ttft_budget_seconds"):
        RouterSettings(refresh="auto")
    with pytest.raises(ValidationError, match="refresh"):
        RouterSettings(refresh="-1")
