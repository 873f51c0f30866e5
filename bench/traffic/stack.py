"""A whole stack of its own on this machine: cache, worker and router, with a key for every tenant and metrics of all."""

import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.traffic.client import Caller, Endpoint
from bench.traffic.connection import Target
from services.cli.ports import free_port
from services.cli.supervisor import Stack, StackOptions, StackStartError
from services.router.domain.tenancy import hash_key

__all__ = ["StackPlan", "serve_stack", "write_shape"]

_ROOT = Path(__file__).resolve().parent.parent.parent
_TOKENIZER = _ROOT / "models" / "demo"
# Of planes and pages; the rest is running requests'. A directory that promised more would be told so by evictions.
_STORED_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class StackPlan:
    """model: a checkpoint, or a folder with a `config.json` alone, whose weights are then drawn from `seed`; tenants: how many
    have a key; variables: of all services, in place of what is set here.
    """

    model: Path
    tenants: int = 1
    seed: int = 1
    device: str = "cpu"
    state_bytes: int = 1 << 30
    host_bytes: int = 0
    page_bytes: int = 1 << 29
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        """Of the directory: what the engine has beside running requests, or what the tier below holds."""
        return max(int(_STORED_SHARE * (self.state_bytes + self.page_bytes)), self.host_bytes)


@asynccontextmanager
async def serve_stack(plan: StackPlan) -> AsyncIterator[Endpoint]:
    """Ready when it is entered.

    Raises:
        StackStartError: a service does not come up; its message went to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="hypic-traffic-") as folder:
        keys = {f"tenant-{index}": f"traffic-key-{index:04}-{'x' * 16}" for index in range(plan.tenants)}
        key_file = Path(folder) / "keys.toml"
        key_file.write_text("".join(_key_section(tenant, key) for tenant, key in keys.items()))
        model = plan.model
        is_drawn = not any(model.glob("*.safetensors"))
        if is_drawn:
            model = Path(folder) / model.name
            write_shape(plan.model, model)
        metrics = {service: free_port() for service in ("CACHE", "WORKER")}
        variables = {
            "HYPIC_ROUTER_API_KEYS_FILE": str(key_file),
            "HYPIC_ROUTER_GUARD_SHARE": "0",
            "HYPIC_WORKER_DEVICE": plan.device,
            "HYPIC_WORKER_DTYPE": "float32" if plan.device == "cpu" else "bfloat16",
            "HYPIC_WORKER_STATE_BYTES": str(plan.state_bytes),
            "HYPIC_WORKER_PAGE_BYTES": str(plan.page_bytes),
            "HYPIC_WORKER_HOST_BYTES": str(plan.host_bytes),
            "HYPIC_CACHE_BUDGET_BYTES": str(plan.budget_bytes),
            **({"HYPIC_WORKER_WEIGHTS": f"random:{plan.seed}"} if is_drawn else {}),
            **{f"HYPIC_{service}_METRICS_PORT": str(port) for service, port in metrics.items()},
            **plan.variables,
        }
        options = StackOptions(model, port=0, log_level="warning", variables=variables)
        stack = Stack(options)
        await stack.start()
        try:
            pages = [f"{stack.base_url}/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in metrics.values())]
            callers = {tenant: Caller(tenant, key) for tenant, key in keys.items()}
            yield Endpoint(Target(stack.base_url), callers, pages)
        finally:
            await stack.stop()


def write_shape(source: Path, target: Path) -> None:
    """A checkpoint without weights: the source's `config.json`, and the demo model's tokenizer and template, filled up with
    words that no text is made of until every id of the config's vocabulary is spelled somehow.

    Raises:
        StackStartError: the vocabulary is smaller than that tokenizer's.
    """
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((_TOKENIZER / "tokenizer.json").read_text())
    settings = json.loads((_TOKENIZER / "tokenizer_config.json").read_text())
    size = int(config.get("text_config", config)["vocab_size"])
    vocabulary = tokenizer["model"]["vocab"]
    if size <= max(vocabulary.values()):
        raise StackStartError(f"{source}: vocab_size {size} is too small for the demo's tokenizer; take another shape")
    for token_id in range(max(vocabulary.values()) + 1, size):
        vocabulary[f"Ġ{token_id}"] = token_id
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(source / "config.json", target / "config.json")


def _key_section(tenant: str, key: str) -> str:
    scopes = ["generate", "documents"]
    lines = [f"name = {json.dumps(tenant)}", f"tenant = {json.dumps(tenant)}", f"scopes = {json.dumps(scopes)}"]
    return "\n".join(["[[keys]]", *lines, f'sha256 = "{hash_key(key).hex()}"', ""])
