"""The dashboard of how the deployment does."""

from dashboards.panels import (
    HIT_RATIO,
    RATE,
    REQUEST_RATE,
    TOKENS_BY_SERVED,
    TTFT,
    TTFT_QUANTILES,
    Dashboard,
    Panel,
    Row,
    quantile,
    rate,
    share_of_prompts,
)

__all__ = ["OVERVIEW"]

OVERVIEW = Dashboard(
    "overview",
    "HYPIC overview",
    (
        Row(
            "Requests",
            (
                REQUEST_RATE,
                Panel(
                    "Time to first token, heat map",
                    {"{{le}}": f"sum by (le) (increase({TTFT}_bucket[{RATE}]))"},
                    "s",
                    kind="heatmap",
                ),
                TTFT_QUANTILES,
                Panel(
                    "Queue and running",
                    {
                        "waiting for room": "sum (hypic_worker_num_requests_waiting)",
                        "combining or decoding": "sum (hypic_worker_num_requests_running)",
                        "in routers": "sum (hypic_num_requests_running)",
                    },
                ),
                Panel(
                    "Between tokens",
                    {
                        f"p{share}": quantile(f"0.{share}", "hypic_worker_inter_token_latency_seconds")
                        for share in ("50", "99")
                    },
                    "s",
                ),
                Panel(
                    "Whole request",
                    {
                        f"p{share}": quantile(f"0.{share}", "hypic_e2e_request_latency_seconds")
                        for share in ("50", "99")
                    },
                    "s",
                ),
            ),
        ),
        Row(
            "Tokens",
            (
                TOKENS_BY_SERVED,
                HIT_RATIO,
                Panel(
                    "Seam share",
                    {"seam tokens of prompt tokens": share_of_prompts(rate("hypic_seam_tokens_total"))},
                    "percentunit",
                    "What composing recomputes at the heads of segments.",
                ),
                Panel("Generated tokens", {"tokens a second": rate("hypic_generation_tokens_total")}),
                Panel(
                    "Prompt tokens by tenant group",
                    {"{{tenant_group}}": rate("hypic_prompt_tokens_total", "tenant_group")},
                    is_stacked=True,
                ),
                Panel(
                    "Requests that waited for another one's capture",
                    {"{{served}}": rate("hypic_single_flighted_captures_total", "served")},
                    about="Parts that were captured once for several requests.",
                ),
            ),
        ),
        Row(
            "Store and engine",
            (
                Panel(
                    "Stored bytes",
                    {
                        "all copies": "max (hypic_cache_bytes)",
                        "budget": "max (hypic_cache_budget_bytes)",
                        "engines' memory": "sum (hypic_worker_state_bytes)",
                        "{{tier}}": "sum by (tier) (hypic_worker_tier_bytes)",
                    },
                    "bytes",
                ),
                Panel(
                    "Pages held",
                    {"{{instance}}": "max by (instance) (hypic_worker_kv_cache_usage_perc)"},
                    "percentunit",
                ),
                Panel(
                    "GPU",
                    {"{{instance}} {{gpu}}": "avg by (instance, gpu) (DCGM_FI_DEV_GPU_UTIL)"},
                    "percent",
                    "From NVIDIA's DCGM exporter, where it runs.",
                ),
            ),
        ),
    ),
)
