"""Every query of dashboards and rules, asked of a real Prometheus that scrapes a real stack."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.observed import Observed, ask_superseded
from tests.e2e.stack.prometheus import MONITORING, Prometheus
from tests.e2e.stack.served import wait_until

PROMETHEUS, PROMTOOL = shutil.which("prometheus") or "", shutil.which("promtool") or ""
RULES = MONITORING / "rules"
# What no healthy deployment has, or none without a GPU: such queries must be answered, with whatever there is.
MAY_BE_EMPTY = (
    "DCGM_FI_DEV_GPU_UTIL", "hypic_worker_corrupt_blobs_total", "hypic_worker_failed_fetches_total", 'outcome="failed"',
    'cause!="assigned"', "hypic_single_flighted_captures_total", "hypic_guard_divergence_nats", "hypic_guard_agreement_ratio",
    "hypic_guard_exact",
)  # fmt: skip
needs_prometheus = pytest.mark.skipif(not PROMETHEUS, reason="needs prometheus")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="needs promtool, which comes with prometheus")


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))}


def queries() -> list[tuple[str, str]]:
    """Titles and expressions, with a window in place of Grafana's."""
    return [
        (f"{name}: {panel['title']}", target["expr"].replace("$__rate_interval", "30s"))
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.fixture(scope="module")
def prometheus(observed: Observed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    stack = observed.stack
    targets = {
        "hypic-router": [stack.base_url.removeprefix("http://")],
        "hypic-cache": [stack.metrics_address("cache")],
        "hypic-worker": [stack.metrics_address(worker) for worker in stack.workers],
    }
    with Prometheus(PROMETHEUS, tmp_path_factory.mktemp("prometheus"), targets) as running:
        wait_until(lambda: running.num_scrapes() >= 2, 60)
        documents = [document(f"scraped {index}", 60) for index in range(4)]
        for tenant in ("acme", "acme", "beta"):
            ask(observed.clients[tenant], documents)
        ask_superseded(observed.clients["acme"])
        ask(observed.clients["acme"], documents[:1], reuse="off")
        assert observed.clients["acme"].http.post("/v1/chat/completions", json={}).status_code == 400
        seen = running.num_scrapes()
        wait_until(lambda: running.num_scrapes() >= seen + 3, 60)
        yield running


@needs_prometheus
def test_every_query_of_every_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    empty = [
        title
        for title, expression in queries()
        if not prometheus.query(expression) and not any(words in expression for words in MAY_BE_EMPTY)
    ]
    assert empty == []


@needs_prometheus
def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    wait_until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()))
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    wait_until(lambda: [name for name in recorded if not prometheus.query(name)] == [])
    critical = [rule["name"] for rule in prometheus.rules() if rule["type"] == "alerting" and rule["state"] == "firing"]
    assert critical == []


@needs_prometheus
def test_what_prometheus_says_of_reuse_is_what_replies_say(prometheus: Prometheus) -> None:
    """The share by tier adds up to the share of all, and so do tokens by how they were served."""
    (reused,) = prometheus.query('sum(hypic_prompt_tokens_total{served=~"hit|prefix"})')
    assert sum(prometheus.query("sum by (tier) (hypic_reused_tokens_total)")) == reused
    (router,) = prometheus.query("sum(hypic_prompt_tokens_total)")
    (workers,) = prometheus.query("sum(hypic_worker_prompt_tokens_total)")
    assert router == workers
    assert set(prometheus.query("hypic_cache_budget_bytes")) == {12 << 20}
    assert sum(prometheus.query('hypic_cache_missed_tokens_total{budget!="new"}')) > 0


def test_no_metric_names_a_tenant_a_document_or_its_text(observed: Observed) -> None:
    stack = observed.stack
    services = [stack.metrics_address(name) for name in ("cache", *stack.workers)]
    addresses = [stack.base_url, *(f"http://{address}" for address in services)]
    text = "".join(httpx2.get(f"{address}/metrics", timeout=20).text for address in addresses)
    assert 'tenant_group="gold"' in text
    assert 'tenant_group="other"' in text
    named = [words for words in ("acme", "beta", "handbook", *observed.secret_words) if words in text]
    assert named == []


def test_a_panel_of_each_dashboard_answers_each_question() -> None:
    titles = {panel["title"] for panel in dashboards()["operator"]["panels"] if panel["type"] == "row"}
    assert titles == {
        "Why is the time to first token high?",
        "What is the hit ratio by tier?",
        "What would more memory buy?",
        "Which worker is sick?",
        "Does composing cost answers?",
    }
    for dashboard in dashboards().values():
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        assert len(set(places)) == len(places)
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


@needs_promtool
@pytest.mark.parametrize("command", [("check", "rules", "hypic.yaml"), ("test", "rules", "hypic_test.yaml")])
def test_rules_pass_promtool(command: tuple[str, ...]) -> None:
    done = subprocess.run([PROMTOOL, *command], cwd=RULES, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    """Without a YAML reader: names stand behind `alert:` and `alertname:`."""
    rules, tests = (RULES / "hypic.yaml").read_text(), (RULES / "hypic_test.yaml").read_text()
    alerts = [line.split()[-1] for line in rules.splitlines() if line.strip().startswith("- alert:")]
    assert len(alerts) == rules.count("runbook:") == rules.count("severity:")
    assert [name for name in alerts if tests.count(name) < 2] == []


def test_every_metric_that_is_asked_for_is_in_the_catalogue() -> None:
    catalogue = Path("docs/metrics.md").read_text()
    words = " ".join(expression for _, expression in queries()) + (RULES / "hypic.yaml").read_text()
    named = {
        word
        for word in words.replace("{", " ").replace("(", " ").replace("[", " ").split()
        if word.startswith("hypic_")
    }
    bare = {name.rstrip(").,").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in named}
    assert sorted(name for name in bare if f"`{name}`" not in catalogue) == []
