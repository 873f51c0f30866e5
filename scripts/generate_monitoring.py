"""Generates the kustomize component `deploy/monitoring` from its rules and dashboards. With --check: fails when out of date.

`rules/hypic.yaml`, a rule file as Prometheus reads it, becomes a PrometheusRule; `dashboards/*.json` a ConfigMap that
Grafana's sidecar collects. Kustomize lists files one by one, hence the generated list.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parent.parent / "deploy" / "monitoring"
_NOTE = "# Made from rules/ and dashboards/ by `python scripts/generate_monitoring.py`.\n"
_RULES = Path("rules/hypic.yaml")
_SCRAPING = "pod-monitor.yaml"
_RULE_OBJECT = "prometheus-rule.yaml"


def component_files(folder: Path) -> Mapping[str, str]:
    """The generated files of `folder`, by name.

    Raises:
        ValueError: the rule file is not a mapping with `groups` alone.
    """
    files = {}
    if (folder / _RULES).exists():
        files[_RULE_OBJECT] = _NOTE + _dump(_prometheus_rule((folder / _RULES).read_text()))
    dashboards = sorted(path.relative_to(folder).as_posix() for path in folder.glob("dashboards/*.json"))
    files["kustomization.yaml"] = _NOTE + _dump(_component([_SCRAPING, *files], dashboards))
    return files


def _prometheus_rule(text: str) -> Mapping[str, object]:
    rules = yaml.safe_load(text)
    if not isinstance(rules, dict) or set(rules) != {"groups"}:
        raise ValueError(f"{_RULES}: a rule file is a mapping with the one key `groups`")
    labels = {"app.kubernetes.io/name": "hypic"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "hypic", "labels": labels},
        "spec": rules,
    }


def _component(resources: list[str], dashboards: list[str]) -> Mapping[str, object]:
    component: dict[str, object] = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    component["resources"] = resources
    if dashboards:
        # Under a name with a hash the sidecar would collect the old dashboards beside the new ones.
        options = {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}}
        component["configMapGenerator"] = [{"name": "hypic-dashboards", "files": dashboards, "options": options}]
    return component


def _dump(value: object) -> str:
    text: str = yaml.safe_dump(value, sort_keys=False, width=1_000, allow_unicode=True)
    return text


def main() -> None:
    """Parse the arguments and write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = [(MONITORING / name, text) for name, text in component_files(MONITORING).items()]
    stale = [(path, text) for path, text in stale if not path.exists() or path.read_text() != text]
    for path, text in stale:
        if is_check:
            sys.stderr.write(f"{path} is out of date; run python scripts/generate_monitoring.py\n")
        else:
            path.write_text(text)
    if is_check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
