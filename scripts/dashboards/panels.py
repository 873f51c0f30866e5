"""Panels, the queries that they are made of, and those that several dashboards share."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "HIT_RATIO", "MORE_MEMORY", "RATE", "REQUEST_RATE", "STAGES", "TOKENS_BY_SERVED", "TTFT", "TTFT_QUANTILES", "Dashboard",
    "Panel", "Row", "mean", "quantile", "rate", "share_of_prompts",
]  # fmt: skip

RATE = "$__rate_interval"
STAGES = ("plan", "capture", "queue", "fetch", "combine")
BUDGETS = ("1.25", "1.5", "2", "4", "8")


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: legend to PromQL. kind: Grafana's; unit: Grafana's name of it; about: what to read from it, and what to do."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"
    width: int = 8
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A question, and the panels that answer it."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file."""

    name: str
    title: str
    rows: Sequence[Row]


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Per second, summed over instances."""
    grouping = f" by ({by})" if by else ""
    return (
        f"sum{grouping} (rate({metric}{{{labels}}}[{RATE}]))" if labels else f"sum{grouping} (rate({metric}[{RATE}]))"
    )


def mean(histogram: str, by: str = "") -> str:
    """Of a histogram."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def quantile(share: str, histogram: str, by: str = "") -> str:
    """Of a histogram: `share` as PromQL has it."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"


def share_of_prompts(tokens: str) -> str:
    """Of tokens a second in all prompt tokens a second."""
    return f"{tokens} / scalar({rate('hypic_prompt_tokens_total')})"


TTFT = "hypic_time_to_first_token_seconds"
REQUEST_RATE = Panel(
    "Requests",
    {
        "{{finish_reason}}": rate("hypic_request_success_total", "finish_reason"),
        "error {{code}}": rate("hypic_request_errors_total", "code"),
    },
    "reqps",
)
TTFT_QUANTILES = Panel(
    "Time to first token",
    {f"p{share}": quantile(f"0.{share}", TTFT) for share in ("50", "90", "99")},
    "s",
)
TOKENS_BY_SERVED = Panel(
    "Prompt tokens by how they were served",
    {"{{served}}": rate("hypic_prompt_tokens_total", "served")},
    "short",
    "Tokens a second: reused (prefix, hit), captured for the request (cold), computed in place (live).",
    is_stacked=True,
)
HIT_RATIO = Panel(
    "Prompt tokens reused, by tier",
    {"{{tier}}": share_of_prompts(rate("hypic_reused_tokens_total", "tier"))},
    "percentunit",
    "Share of all prompt tokens that came from each tier. `same_host` and `other_host` are other workers' memory.",
    is_stacked=True,
)
MORE_MEMORY = Panel(
    "Prompt tokens that a larger budget would have served besides",
    {
        f"budget × {budget}": share_of_prompts(
            f'sum (rate(hypic_cache_missed_tokens_total{{budget=~"{"|".join(BUDGETS[: index + 1])}"}}[{RATE}]))'
        )
        for index, budget in enumerate(BUDGETS)
    },
    "percentunit",
    "Raise HYPIC_CACHE_BUDGET_BYTES, and the workers' memory or disk with it, to the multiple behind which the lines lie"
    " together. An estimate, exact under LRU.",
    width=12,
)
