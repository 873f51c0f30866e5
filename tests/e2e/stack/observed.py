"""A served stack that has seen traffic of every kind: for whatever looks at a deployment from outside."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack.asking import CHAT, ask, body, document
from tests.e2e.stack.callers import Client, client_of
from tests.e2e.stack.otlp import Collector
from tests.e2e.stack.served import ServedStack, wait_until

__all__ = ["OBSERVED_KEYS", "Observed", "ask_superseded", "observe", "observed_variables"]

OBSERVED_KEYS = {
    "acme": ("acme", '"generate", "documents"'),
    "beta": ("beta", '"generate"'),
    "root": ("operations", '"admin"'),
}
_SECRET_TEXT = "a sentence that nobody but its tenant may read"


@dataclass(slots=True)
class Observed:
    """The stack, its callers, and words that no page may hold."""

    stack: ServedStack
    collector: Collector
    log: Path
    clients: Mapping[str, Client]
    secret_words: tuple[str, ...]

    def close(self) -> None:
        """Give up the callers' connections."""
        for client in self.clients.values():
            client.http.close()


def observed_variables(folder: Path, traces: str) -> dict[str, str]:
    """Settings beside those of every served stack."""
    return {
        "HYPIC_ROUTER_API_KEYS_FILE": str(folder / "keys.toml"),
        "HYPIC_ROUTER_TENANT_GROUPS": '{"acme": "gold"}',
        "HYPIC_ROUTER_DEFAULT_MAX_TOKENS": "16",
        "HYPIC_ROUTER_OTLP_ENDPOINT": traces,
        "HYPIC_CACHE_OTLP_ENDPOINT": traces,
        "HYPIC_WORKER_OTLP_ENDPOINT": traces,
        # Spans leave soon, for the tests' sake.
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        # Room for about ten documents' states: more are asked for.
        "HYPIC_CACHE_BUDGET_BYTES": str(12 << 20),
        "HYPIC_CACHE_SHARE_SECONDS": "1",
        "HYPIC_WORKER_DISK_DIRECTORY": str(folder / "disk"),
        "HYPIC_WORKER_DISK_BYTES": str(64 << 20),
    }


def ask_superseded(caller: Client) -> list[str]:
    """Bring another text than the registered one: why the document is computed in place."""
    answer = ask(caller, [{"id": "renewed"} | document("old text", 60)])
    return [part["reason"] for part in answer.segments]


def observe(stack: ServedStack, collector: Collector, log: Path) -> Observed:
    """Traffic: cold and warm requests of two tenants that push each other out, every mode, and errors."""
    clients = {name: client_of(name, stack.model, stack.base_url) for name in OBSERVED_KEYS}
    documents = [{"id": f"handbook-{number}"} | document(f"observed {number}", 90) for number in range(6)]
    question = f"What opens? {_SECRET_TEXT}"
    system = {"role": "system", "content": document("observed system", 40)["text"]}
    messages = [system, {"role": "user", "content": question}]
    for tenant in ("acme", "beta", "acme"):
        for first in (0, 2, 3):
            ask(clients[tenant], documents[first : first + 3], messages=messages)
    ask(clients["acme"], documents[3:6][::-1], messages=messages)
    ask(clients["acme"], documents[:2], question, reuse="off")
    ask(clients["acme"], [document("observed live")], question, cold="live")
    clients["acme"].call("POST", "/v1/documents", json={"id": "renewed", "text": document("new text", 60)["text"]})
    assert ask_superseded(clients["acme"]) == ["superseded"]
    too_long = body(clients["acme"], [], question, max_tokens=10**6)
    assert clients["acme"].http.post(CHAT, json=too_long).status_code == 400
    # Gauges and reports are a second old.
    wait_until(lambda: stack.gauge("cache", "hypic_cache_evictions_total") > 0)
    wait_until(lambda: stack.gauge("workers", "hypic_worker_state_bytes") > 0)
    return Observed(stack, collector, log, clients, (_SECRET_TEXT, documents[0]["title"], documents[0]["text"][:40]))
