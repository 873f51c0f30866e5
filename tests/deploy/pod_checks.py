"""What every pod must keep to: confined, bounded, probed, pinned; each check gives a list of faults."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from tests.deploy.rendering import Manifest, Workload, of_kind, workloads

__all__ = ["faults_of_config_maps", "faults_of_pods"]

_TAG = re.compile(r"^(?:.*/)?[^:@/]+:(?P<tag>[^:@/]+)(@sha256:[0-9a-f]{64})?$")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
_SECRET_WORDS = ("SECRET", "PASSWORD", "API_KEY", "TOKEN")
_STARTUP_SECONDS = {"worker": 600}


def faults_of_pods(manifests: Sequence[Manifest]) -> list[str]:
    """What is wrong with the pods, one line each."""
    return [
        f"{each.name}: {fault}"
        for each in workloads(manifests)
        for fault in chain(_faults_of_pod(each), *(_faults_of_container(each, one) for one in each.containers))
    ]


def faults_of_config_maps(manifests: Sequence[Manifest]) -> list[str]:
    """Secrets in plain sight, whether in a map or in a manifest of their own."""
    faults = [f"Secret {each['metadata']['name']} is part of the manifests" for each in of_kind(manifests, "Secret")]
    for each in of_kind(manifests, "ConfigMap"):
        for name, value in each.get("data", {}).items():
            if _is_secret(name) or "@" in value.partition("://")[2].partition("/")[0]:
                faults.append(f"ConfigMap {each['metadata']['name']}: {name} belongs into a Secret")
    return faults


def _faults_of_pod(each: Workload) -> Iterator[str]:
    pod, context = each.pod, each.pod.get("securityContext", {})
    if not context.get("runAsNonRoot") or not context.get("runAsUser"):
        yield "runs as root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if pod.get("automountServiceAccountToken") is not False or not pod.get("serviceAccountName"):
        yield "has the token of a service account"
    if pod.get("enableServiceLinks") is not False:
        yield "gets variables of Services, such as HYPIC_ROUTER_PORT, which the settings refuse"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"has {name}"
    for volume in pod.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is the host's"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} has no bound"


def _faults_of_container(each: Workload, container: Manifest) -> Iterator[str]:
    context = container.get("securityContext", {})
    tag = _TAG.match(container["image"])
    if tag is None or tag["tag"] == "latest":
        yield f"image {container['image']} has no fixed tag"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "has a writable root"
    if context.get("runAsUser", 1) == 0 or context.get("runAsNonRoot") is False:
        yield "its container runs as root"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may gain privileges"
    if context.get("capabilities", {}).get("drop") != ["ALL"] or context.get("capabilities", {}).get("add"):
        yield "keeps capabilities"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= set(resources.get("requests", {})) or "memory" not in resources.get("limits", {}):
        yield "lacks resource requests or a memory limit"
    yield from _faults_of_probes(each, container)
    for entry in container.get("env", []):
        if _is_secret(entry["name"]) and "value" in entry:
            yield f"{entry['name']} stands in the manifest"


def _faults_of_probes(each: Workload, container: Manifest) -> Iterator[str]:
    for name in _PROBES:
        if name not in container:
            yield f"has no {name}"
    startup: Mapping[str, int] = container.get("startupProbe", {})
    seconds = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
    if seconds < _STARTUP_SECONDS.get(each.component, 30):
        yield f"is given up after {seconds} seconds of starting"
    for name, service in (("readinessProbe", "readiness"), ("livenessProbe", "liveness"), ("startupProbe", "liveness")):
        probe = container.get(name, {})
        if "grpc" in probe and probe["grpc"].get("service") != service:
            yield f"{name} asks for {probe['grpc'].get('service')}, not for {service}"


def _is_secret(name: str) -> bool:
    return name.endswith(_SECRET_WORDS)
