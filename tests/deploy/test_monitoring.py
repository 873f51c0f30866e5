"""Rules and dashboards become objects that the Prometheus operator and Grafana's sidecar take."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from scripts.generate_monitoring import MONITORING, component_files
from tests.deploy.rendering import KUBERNETES, Manifest, kustomize, named, workloads
from tests.deploy.schemas import faults_of_schemas

# `kubectl apply` keeps what it applied in an annotation, which holds less than a ConfigMap does.
_ANNOTATION_BYTES = 256 << 10
_RULES = {
    "groups": [
        {
            "name": "hypic",
            "rules": [
                {
                    "alert": "HypicQueue",
                    "expr": "sum(hypic_worker_num_requests_waiting) > 10",
                    "for": "5m",
                    "annotations": {"summary": "{{ $value }} requests wait"},
                }
            ],
        }
    ]
}


def _folder(path: Path, rules: object) -> Path:
    """A checkout's deploy/, with these rules and one dashboard."""
    shutil.copytree(KUBERNETES.parent, path / "deploy")
    folder = path / "deploy" / "monitoring"
    for name in ("rules", "dashboards"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    (folder / "rules" / "hypic.yaml").write_text(yaml.safe_dump(rules))
    (folder / "dashboards" / "hypic.json").write_text(json.dumps({"title": "HYPIC"}))
    return folder


@pytest.mark.usefixtures("rendered")
def test_rules_and_dashboards_are_rendered_as_they_are_written(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _RULES)
    for name, text in component_files(folder).items():
        (folder / name).write_text(text)
    manifests = kustomize(tmp_path / "deploy" / "k8s" / "overlays" / "prod")
    rule = named(manifests, "PrometheusRule", "hypic")
    assert rule["spec"] == _RULES
    assert faults_of_schemas([rule], "1.37") == []
    dashboards = named(manifests, "ConfigMap", "hypic-dashboards")
    assert json.loads(dashboards["data"]["hypic.json"]) == {"title": "HYPIC"}
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_misspelt_rule_is_refused(tmp_path: Path) -> None:
    rules = {"groups": [{"name": "hypic", "rules": [{"alert": "HypicQueue", "expression": "up"}]}]}
    text = component_files(_folder(tmp_path, rules))["prometheus-rule.yaml"]
    assert any("'expression' was unexpected" in fault for fault in faults_of_schemas([yaml.safe_load(text)], "1.37"))


def test_what_is_no_rule_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rules/hypic\.yaml: a rule file is a mapping"):
        component_files(_folder(tmp_path, [{"alert": "HypicQueue"}]))


def test_generated_files_are_those_of_the_rules_and_dashboards_that_are_there() -> None:
    for name, text in component_files(MONITORING).items():
        assert (MONITORING / name).read_text() == text, "run python scripts/generate_monitoring.py"


def test_every_job_is_one_that_the_rules_look_for(rendered: Mapping[str, list[Manifest]]) -> None:
    (endpoint,) = named(rendered["prod"], "PodMonitor", "hypic")["spec"]["podMetricsEndpoints"]
    (job,) = [each for each in endpoint["relabelings"] if each["targetLabel"] == "job"]
    (source,) = job["sourceLabels"]
    # Prometheus writes the dots and slashes of a label's name as underscores.
    label = source.removeprefix("__meta_kubernetes_pod_label_")
    seen = [
        job["replacement"].replace("$1", value)
        for each in workloads(rendered["prod"])
        for name, value in each.labels.items()
        if re.sub(r"[./]", "_", name) == label
    ]
    assert sorted(seen) == ["hypic-cache", "hypic-router", "hypic-worker"]


def test_everything_fits_what_kubectl_remembers_of_it(rendered: Mapping[str, list[Manifest]]) -> None:
    assert max(len(json.dumps(each)) for each in rendered["all"]) < _ANNOTATION_BYTES
