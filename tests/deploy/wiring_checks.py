"""Whether names, labels and ports of one manifest are those of the others; each check gives a list of faults."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from tests.deploy.rendering import Manifest, Workload, matches, of_kind, workloads

__all__ = ["OUTSIDE_SECRETS", "faults_of_wiring"]

# Made by the operator ahead of the first apply (docs/kubernetes.md), with their keys.
OUTSIDE_SECRETS: Mapping[str, frozenset[str]] = {
    "hypic-api-keys": frozenset({"keys.toml"}),
    "hypic-cache": frozenset({"secret"}),
    "hypic-redis": frozenset({"password", "ca.crt"}),
    **{f"hypic-tls-{each}": frozenset({"tls.crt", "tls.key", "ca.crt"}) for each in ("router", "cache", "worker")},
}


def faults_of_wiring(manifests: Sequence[Manifest]) -> list[str]:
    """One line for each name, label or port that leads nowhere."""
    found = workloads(manifests)
    return [
        *chain.from_iterable(_faults_of_workload(manifests, each) for each in found),
        *chain.from_iterable(_faults_of_service(each, found) for each in of_kind(manifests, "Service")),
        *_faults_of_budgets(manifests, found),
        *_faults_of_monitors(manifests, found),
        *_faults_of_pools(manifests, found),
        *_faults_of_routes(manifests),
        *_faults_of_scaling(manifests, found),
    ]


def _names(manifests: Sequence[Manifest], kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in of_kind(manifests, kind)}


def _faults_of_workload(manifests: Sequence[Manifest], each: Workload) -> Iterator[str]:
    spec, pod = each.manifest["spec"], each.pod
    if not matches(spec["selector"], each.labels):
        yield f"{each.name}: its selector does not match its pods"
    if pod["serviceAccountName"] not in _names(manifests, "ServiceAccount"):
        yield f"{each.name}: no service account {pod['serviceAccountName']}"
    if "serviceName" in spec and spec["serviceName"] not in _names(manifests, "Service"):
        yield f"{each.name}: no service {spec['serviceName']}"
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    volumes = {volume["name"] for volume in pod.get("volumes", [])} | claims
    maps = _names(manifests, "ConfigMap")
    for container in each.containers:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{each.name}: no volume {mount['name']}"
        for source in container.get("envFrom", []):
            if source["configMapRef"]["name"] not in maps:
                yield f"{each.name}: no config map {source['configMapRef']['name']}"
        yield from _faults_of_probe_ports(each, container)
    for secret, key in _used_secrets(each):
        if key not in OUTSIDE_SECRETS.get(secret, ()):
            yield f"{each.name}: secret {secret}/{key} is not among those that the docs tell to make"


def _used_secrets(each: Workload) -> Iterator[tuple[str, str]]:
    for container in each.containers:
        for entry in container.get("env", []):
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                yield reference["name"], reference["key"]
    for volume in each.pod.get("volumes", []):
        if secret := volume.get("secret"):
            keys = [item["key"] for item in secret.get("items", [])] or OUTSIDE_SECRETS.get(secret["secretName"], ["?"])
            yield from ((secret["secretName"], key) for key in keys)


def _faults_of_probe_ports(each: Workload, container: Manifest) -> Iterator[str]:
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        for way in ("httpGet", "grpc", "tcpSocket"):
            port = container.get(name, {}).get(way, {}).get("port")
            if port is not None and port not in ports and port not in ports.values():
                yield f"{each.name}: {name} asks port {port}, which the container has not"


def _faults_of_service(service: Manifest, found: Sequence[Workload]) -> Iterator[str]:
    name, spec = service["metadata"]["name"], service["spec"]
    behind = [each for each in found if matches({"matchLabels": spec["selector"]}, each.labels)]
    if len(behind) != 1:
        yield f"service {name} selects {len(behind)} workloads"
    for each, port in ((each, port) for each in behind for port in spec["ports"]):
        target = port.get("targetPort", port["port"])
        number = each.ports.get(target) if isinstance(target, str) else target
        if number not in each.ports.values():
            yield f"service {name}: port {target} is none of {each.name}'s"
        elif spec.get("clusterIP") == "None" and number != port["port"]:
            yield f"service {name} is headless, and callers reach {port['port']} where {each.name} has {number}"


def _faults_of_budgets(manifests: Sequence[Manifest], found: Sequence[Workload]) -> Iterator[str]:
    budgets = [each["spec"] for each in of_kind(manifests, "PodDisruptionBudget")]
    for budget in budgets:
        if budget.get("maxUnavailable") != 1:
            yield "a disruption budget lets more than one pod go, or none"
    for each in found:
        own = [budget for budget in budgets if matches(budget["selector"], each.labels)]
        if each.component != "redis" and len(own) != 1:
            yield f"{each.name} has {len(own)} disruption budgets"


def _faults_of_monitors(manifests: Sequence[Manifest], found: Sequence[Workload]) -> Iterator[str]:
    for monitor in of_kind(manifests, "PodMonitor"):
        ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for each in found:
            is_seen = matches(monitor["spec"]["selector"], each.labels) and ports & set(each.ports)
            if each.component in ("router", "cache", "worker") and not is_seen:
                yield f"nobody reads the metrics of {each.name}"


def _faults_of_pools(manifests: Sequence[Manifest], found: Sequence[Workload]) -> Iterator[str]:
    for pool in of_kind(manifests, "InferencePool"):
        behind = [each for each in found if matches(pool["spec"]["selector"], each.labels)]
        if [each.component for each in behind] != ["router"]:
            yield "the inference pool is not the routers"
        for port in pool["spec"]["targetPorts"]:
            if not all(port["number"] in each.ports.values() for each in behind):
                yield f"the inference pool's port {port['number']} is none of the routers'"


def _faults_of_routes(manifests: Sequence[Manifest]) -> Iterator[str]:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "Service")}
    for route in of_kind(manifests, "HTTPRoute"):
        for backend in (backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]):
            if backend.get("kind") == "InferencePool":
                is_there = backend["name"] in _names(manifests, "InferencePool")
            else:
                ports: Sequence[Mapping[str, Any]] = services.get(backend["name"], {}).get("ports", [])
                is_there = any(port["port"] == backend["port"] for port in ports)
            if not is_there:
                yield f"the route leads to {backend['name']}, which is not there"


def _faults_of_scaling(manifests: Sequence[Manifest], found: Sequence[Workload]) -> Iterator[str]:
    for scaled in of_kind(manifests, "ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        own = [each for each in found if (each.manifest["kind"], each.name) == (target["kind"], target["name"])]
        if not own:
            yield f"there is no {target['kind']} {target['name']} to scale"
        if any("replicas" in each.manifest["spec"] for each in own):
            yield f"{target['name']}: both its manifest and KEDA set the number of replicas"
        for trigger in scaled["spec"]["triggers"]:
            metadata = trigger["metadata"]
            if not metadata["query"].startswith("sum("):
                yield "the query of a trigger may give several numbers"
            if metadata.get("ignoreNullValues") != "false":
                yield "a dead Prometheus counts as no load"
