"""Generates docs/configuration.md and docs/metrics.md from the code. With --check: fails when they are out of date."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.cache.adapters.memory import MemoryDirectory
from services.cache.adapters.metered import MeteredDirectory
from services.cache.settings import CacheSettings
from services.common.settings import ServiceSettings
from services.router.adapters.guard_metrics import GuardInstruments
from services.router.adapters.metrics import RouterMetrics
from services.router.settings import RouterSettings
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.settings import WorkerSettings

DOCS = Path(__file__).resolve().parent.parent / "docs"
_SETTINGS: tuple[tuple[str, type[ServiceSettings]], ...] = (
    ("Router", RouterSettings),
    ("Cache service", CacheSettings),
    ("Worker", WorkerSettings),
)


def configuration_page() -> str:
    """Every variable of every service."""
    lines = [
        "# Configuration",
        "",
        "Made from the settings classes by `python scripts/generate_docs.py`. An unknown or malformed variable stops the",
        "start with a line that names it. Durations are in seconds, sizes in bytes. `hypic up` sets the addresses of its",
        "children itself.",
    ]
    for title, settings in _SETTINGS:
        lines += ["", f"## {title}", "", "| variable | default | meaning |", "| --- | --- | --- |"]
        prefix = settings.model_config.get("env_prefix", "")
        lines += [_variable(f"{prefix}{name}".upper(), field) for name, field in settings.model_fields.items()]
    return "\n".join(lines) + "\n"


def _variable(name: str, field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        default = "computed" if field.default_factory else "required"
    else:
        default = "" if field.default in (None, "") else f"`{field.default}`"
    return f"| `{name}` | {default} | {field.description or ''} |"


def metrics_page() -> str:
    """Every metric of every registry."""
    router, cache, worker = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    RouterMetrics(router)
    GuardInstruments(router)
    limits = CacheSettings.from_environment().limits()
    MeteredDirectory(MemoryDirectory(limits), cache, limits.budget_bytes)
    WorkerMetrics(worker)
    lines = [
        "# Metrics",
        "",
        "Made from the registries by `python scripts/generate_docs.py`. The router serves `/metrics` on its own port; cache",
        "service and worker on `…_METRICS_PORT` when it is set. No label carries a tenant's or a document's text:",
        "`tenant_group` is one of at most 16 names of `HYPIC_ROUTER_TENANT_GROUPS`. Names and buckets are vLLM's where the thing",
        "is the same. A worker's counts and the router's add up to the prompts, as `usage` does; a router that has not counted a",
        "reply yet (its client left, or it goes on) is behind its worker, and what the guard looks at again counts in workers",
        "alone. Which panel answers which question:",
        "[troubleshooting](troubleshooting.md).",
    ]
    for title, registry in (("Router", router), ("Cache service", cache), ("Worker", worker)):
        lines += [
            "",
            f"## {title}",
            "",
            "| metric | type | labels | meaning |",
            "| --- | --- | --- | --- |",
            *_metrics(registry),
        ]
    return "\n".join(lines) + "\n"


def _metrics(registry: CollectorRegistry) -> Iterator[str]:
    labels = {name: _labels(collector) for collector, names in registry._collector_to_names.items() for name in names}
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield f"| `{name}` | {metric.type} | {labels[metric.name]} | {metric.documentation} |"


def _labels(collector: Collector) -> str:
    """An instrument knows the names of its labels, and so does the family that a collector describes."""
    described = next(iter(collector.describe())) if not isinstance(collector, MetricWrapperBase) else collector
    return ", ".join(f"`{name}`" for name in getattr(described, "_labelnames", ()))


def main() -> None:
    """Parse the arguments and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    pages = {DOCS / "configuration.md": configuration_page(), DOCS / "metrics.md": metrics_page()}
    for path, content in pages.items():
        if not is_check:
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            sys.exit(f"docs/{path.name} is out of date: run `python scripts/generate_docs.py`")


if __name__ == "__main__":
    main()
