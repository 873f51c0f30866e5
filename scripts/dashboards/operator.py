"""The dashboard of whoever is called when something is wrong: a row a question."""

from dashboards.panels import (
    HIT_RATIO,
    MORE_MEMORY,
    STAGES,
    TOKENS_BY_SERVED,
    TTFT_QUANTILES,
    Dashboard,
    Panel,
    Row,
    mean,
    quantile,
    rate,
)

__all__ = ["OPERATOR"]

OPERATOR = Dashboard(
    "operator",
    "HYPIC operator",
    (
        Row(
            "Why is the time to first token high?",
            (
                TTFT_QUANTILES,
                Panel(
                    "Where it goes, on average",
                    {stage: mean(f"hypic_request_{stage}_time_seconds") for stage in STAGES},
                    "s",
                    "plan: directory. capture: segments that others compute ahead. queue: room in the engine. fetch: layers of"
                    " states on their way. combine: live tokens through the model.",
                    is_stacked=True,
                ),
                Panel(
                    "Where it goes, p90",
                    {stage: quantile("0.9", f"hypic_request_{stage}_time_seconds") for stage in STAGES},
                    "s",
                ),
                TOKENS_BY_SERVED,
                Panel(
                    "Parts computed although reuse was meant",
                    {"{{reason}}": rate("hypic_fallbacks_total", "reason")},
                    about="Parts a second by reason; docs/operations.md says what each means.",
                ),
                Panel(
                    "Wait for layers of states on their way",
                    {"eighth {{eighth}}": rate("hypic_worker_layer_wait_seconds_total", "eighth")},
                    "s",
                    "Seconds a second, by the depth of the layer in eighths: the first ones wait for a transfer to begin, later"
                    " ones for its speed.",
                    is_stacked=True,
                ),
            ),
        ),
        Row(
            "What is the hit ratio by tier?",
            (
                HIT_RATIO,
                Panel(
                    "Plans by outcome",
                    {"{{outcome}}": rate("hypic_cache_plan_entries_total", "outcome", 'kind="segment"')},
                    is_stacked=True,
                ),
                Panel(
                    "Bytes fetched, by tier",
                    {"{{tier}}": rate("hypic_worker_fetched_bytes_total", "tier")},
                    "Bps",
                ),
                Panel(
                    "Time of a fetch, p90",
                    {"{{tier}}": quantile("0.9", "hypic_worker_fetch_time_seconds", "tier")},
                    "s",
                ),
                Panel("Fetches that failed", {"{{tier}}": rate("hypic_worker_failed_fetches_total", "tier")}),
                Panel(
                    "Tiers below the engine's memory",
                    {"{{instance}} {{tier}}": "sum by (instance, tier) (hypic_worker_tier_bytes)"},
                    "bytes",
                ),
            ),
        ),
        Row(
            "What would more memory buy?",
            (
                MORE_MEMORY,
                Panel(
                    "Tokens of absent segments, by the budget that would have kept them",
                    {"{{budget}}": rate("hypic_cache_missed_tokens_total", "budget")},
                    about="new: no budget would have helped. tenant_budget: the tenant's own budget was full. more: beyond eight"
                    " times.",
                    width=12,
                    is_stacked=True,
                ),
                Panel(
                    "Bytes of all copies, and the budget",
                    {"stored": "max (hypic_cache_bytes)", "budget": "max (hypic_cache_budget_bytes)"},
                    "bytes",
                ),
                Panel(
                    "Evictions by reason",
                    {"{{reason}}": rate("hypic_cache_evictions_total", "reason")},
                    about="Which tenant evicts whom: /console, GET /admin/evictions.",
                ),
                Panel(
                    "States that engines' memory dropped by itself",
                    {"{{instance}} {{reason}}": rate("hypic_worker_evictions_total", "instance, reason")},
                    about="Where this goes on, a worker's memory is smaller than what the budget promises it.",
                ),
            ),
        ),
        Row(
            "Which worker is sick?",
            (
                Panel(
                    "Workers by state, as the least fortunate router sees them",
                    {"{{role}} {{state}}": "max by (role, state) (hypic_workers)"},
                ),
                Panel(
                    "Time of a combine, on average",
                    {"{{instance}}": mean("hypic_worker_combine_time_seconds", "instance")},
                    "s",
                ),
                Panel("Requests that wait", {"{{instance}}": "sum by (instance) (hypic_worker_num_requests_waiting)"}),
                Panel(
                    "Captures that failed",
                    {"{{instance}}": rate("hypic_worker_captures_total", "instance", 'outcome="failed"')},
                ),
                Panel(
                    "Captures that routers asked for again",
                    {"{{cause}}": rate("hypic_captures_total", "cause", 'cause!="assigned"')},
                    about="retried after a failure, hedged when late.",
                ),
                Panel(
                    "Between tokens, p90",
                    {"{{instance}}": quantile("0.9", "hypic_worker_inter_token_latency_seconds", "instance")},
                    "s",
                ),
                Panel(
                    "Pages held",
                    {"{{instance}}": "max by (instance) (hypic_worker_kv_cache_usage_perc)"},
                    "percentunit",
                ),
                Panel(
                    "Damaged blobs",
                    {"{{instance}} {{tier}}": rate("hypic_worker_corrupt_blobs_total", "instance, tier")},
                ),
                Panel("Answers to scrapes", {"{{job}} {{instance}}": 'min by (job, instance) (up{job=~".*hypic.*"})'}),
            ),
        ),
        Row(
            "Does composing cost answers?",
            (
                Panel(
                    "Divergence of composed first tokens, mean",
                    {"{{tag}}": mean("hypic_guard_divergence_nats", "tag")},
                    about="Nats, of sampled requests that were recomputed in full behind their replies. Beyond its budget"
                    " (GET /admin/quality) a tag is answered without composing.",
                ),
                Panel(
                    "Greedy tokens as in a full recompute",
                    {"{{tag}}": mean("hypic_guard_agreement_ratio", "tag")},
                    "percentunit",
                ),
                Panel(
                    "Tags that are answered without composing",
                    {"{{tag}}": "max by (tag) (hypic_guard_exact)"},
                ),
                Panel(
                    "Samples by what became of them",
                    {"{{outcome}}": rate("hypic_guard_samples_total", "outcome")},
                    about="busy, full: no worker was quiet for long enough; where compared stays 0 the guard sees nothing.",
                    is_stacked=True,
                ),
            ),
        ),
    ),
)
