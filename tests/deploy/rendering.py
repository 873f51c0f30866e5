"""Kustomize's output, and the pods, services and settings in it."""

import copy
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "k8s"
OVERLAYS = ("dev", "prod")

Manifest = dict[str, Any]
_POD_KINDS = ("Deployment", "StatefulSet")


def kustomize(folder: Path) -> list[Manifest]:
    """What `kubectl kustomize` makes of a folder.

    Raises:
        subprocess.CalledProcessError: it refuses the folder.
    """
    kubectl = shutil.which("kubectl")
    assert kubectl is not None
    done = subprocess.run([kubectl, "kustomize", str(folder)], check=True, capture_output=True, text=True, timeout=60)
    return parse(done.stdout)


def parse(text: str) -> list[Manifest]:
    """All documents of a stream."""
    return [document for document in yaml.safe_load_all(text) if document]


@dataclass(frozen=True, slots=True)
class Workload:
    """A Deployment or StatefulSet, by what the checks look at."""

    name: str
    manifest: Manifest

    @property
    def pod(self) -> Manifest:
        """The pod's spec."""
        spec: Manifest = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        """Of its pods."""
        labels: Mapping[str, str] = self.manifest["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        """Which service it runs."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def containers(self) -> Sequence[Manifest]:
        """Init containers too."""
        return [*self.pod.get("initContainers", []), *self.pod.get("containers", [])]

    @property
    def ports(self) -> Mapping[str, int]:
        """Of its containers, by name."""
        return {port["name"]: port["containerPort"] for one in self.containers for port in one.get("ports", [])}


def workloads(manifests: Iterable[Manifest]) -> list[Workload]:
    """Whatever runs pods."""
    return [Workload(each["metadata"]["name"], each) for each in manifests if each["kind"] in _POD_KINDS]


def workload(manifests: Iterable[Manifest], component: str) -> Workload:
    """The one of this component."""
    (found,) = [each for each in workloads(manifests) if each.component == component]
    return found


def of_kind(manifests: Iterable[Manifest], kind: str) -> Iterator[Manifest]:
    """The manifests of a kind."""
    return (each for each in manifests if each["kind"] == kind)


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name]
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether `matchLabels` of a selector holds; nothing here uses expressions."""
    assert set(selector) <= {"matchLabels"}, selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def environment(manifests: Sequence[Manifest], container: Manifest) -> dict[str, str]:
    """The variables that a container starts with; what secrets hold stands there as a long stand-in."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found.update(named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"])
    for entry in container.get("env", []):
        found[entry["name"]] = _value(entry, found)
    return found


def _value(entry: Mapping[str, Any], before: Mapping[str, str]) -> str:
    if "value" in entry:
        text = str(entry["value"])
        for name, value in before.items():
            text = text.replace(f"$({name})", value)
        return text
    source = entry["valueFrom"]
    if "fieldRef" in source:
        return {"metadata.name": "hypic-worker-0", "metadata.namespace": "hypic"}[source["fieldRef"]["fieldPath"]]
    return "stands-in-for-" + str(source["secretKeyRef"]["key"]).replace(".", "-")


def changed(manifests: Sequence[Manifest]) -> list[Manifest]:
    """A copy to plant faults in."""
    return copy.deepcopy(list(manifests))
