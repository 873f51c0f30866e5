"""Refresh as a request and its deployment ask for it: how many blocks of reused segments are recomputed in place."""

from dataclasses import dataclass, replace

from services.router.domain.plan import Plan
from services.router.domain.request import PromptError, Refresh, Reuse, ReuseOptions

__all__ = ["NO_REFRESH", "RefreshPolicy", "settle_refresh", "without_composed_prefixes"]

NO_REFRESH = Refresh(0)


@dataclass(frozen=True, slots=True)
class RefreshPolicy:
    """What applies where a request does not say; `budget_seconds` None: `auto` needs the request's own."""

    refresh: Refresh = NO_REFRESH
    budget_seconds: float | None = None


def settle_refresh(options: ReuseOptions, policy: RefreshPolicy) -> Refresh:
    """What a request is served with; what is not composed needs no refresh.

    Raises:
        PromptError: the budget of `auto` is not said, or one is said that nothing uses.
    """
    asked = options.refresh or policy.refresh
    if asked.blocks is not None:
        if options.ttft_budget_seconds is not None:
            raise PromptError(
                'ttft_budget_seconds bounds refresh: "auto"; send it with that, or leave it out',
                param="hypic.ttft_budget_seconds",
            )
        return asked if options.reuse is Reuse.COMPOSE else NO_REFRESH
    budget = policy.budget_seconds if options.ttft_budget_seconds is None else options.ttft_budget_seconds
    if budget is None:
        raise PromptError(
            'refresh: "auto" needs ttft_budget_seconds, the seconds from admission to the first token',
            param="hypic.ttft_budget_seconds",
            code="missing_required_parameter",
        )
    return replace(asked, budget_seconds=budget) if options.reuse is Reuse.COMPOSE else NO_REFRESH


def without_composed_prefixes(plan: Plan) -> Plan:
    """The plan of a refreshing prompt, before the directory is asked.

    A snapshot behind composed segments would stand in for them as they were composed, unrefreshed; and none is taken there.
    """
    return replace(plan, entries=tuple(entry for entry in plan.entries if not entry.is_composed))
