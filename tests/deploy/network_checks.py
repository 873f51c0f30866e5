"""Network policies as Kubernetes reads them, asked about the connections that the settings name."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.deploy.rendering import Manifest, Workload, matches, named, of_kind, workload, workloads
from tests.deploy.settings_checks import Settings

__all__ = ["Outside", "allows", "faults_of_addresses"]


@dataclass(frozen=True, slots=True)
class Outside:
    """A peer that is no pod of ours: labels of its namespace and of its pod, or an address."""

    namespace: str = ""
    labels: Mapping[str, str] | None = None
    address: str = ""


Peer = Workload | Outside


def allows(manifests: Sequence[Manifest], source: Peer, target: Peer, port: int) -> bool:
    """Whether a connection may be opened: the source's egress and the target's ingress both let it."""
    leaves = not isinstance(source, Workload) or _is_open(manifests, source, "egress", target, port)
    enters = not isinstance(target, Workload) or _is_open(manifests, target, "ingress", source, port)
    return leaves and enters


def faults_of_addresses(manifests: Sequence[Manifest], settings: Settings, redis_address: str) -> list[str]:
    """Connections that the settings need and a name, port or policy prevents.

    redis_address: where a Redis outside the cluster lies, which its name does not tell.
    """
    return list(_faults(manifests, settings, redis_address))


def _faults(manifests: Sequence[Manifest], settings: Settings, redis_address: str) -> Iterator[str]:
    router, cache, worker = (workload(manifests, each) for each in ("router", "cache", "worker"))
    for source, address in ((router, settings.router.cache_address), (worker, settings.worker.cache_address)):
        if not address.startswith("dns:///"):
            yield f"{source.name}: {address} sticks to one pod of a headless service"
        yield from _fault_of_target(manifests, source, cache, address.removeprefix("dns:///"))
    for source in (router, worker):
        yield from _fault_of_target(manifests, source, worker, settings.worker.reached_at)
    urls = [(cache, settings.cache.redis_url), (worker, settings.worker.redis_url or "")]
    for source, url in urls:
        if url:
            yield from _fault_of_redis(manifests, source, url, redis_address)


def _fault_of_target(manifests: Sequence[Manifest], source: Workload, target: Workload, address: str) -> Iterator[str]:
    host, _, port = address.rpartition(":")
    names = {each["metadata"]["name"] for each in of_kind(manifests, "Service")}
    labels = host.split(".")
    # A pod of a StatefulSet has a name below that of its Service.
    service = labels[0] if labels[0] in names else labels[1] if len(labels) > 1 else ""
    if service not in names:
        yield f"{source.name}: {address} names no service"
        return
    spec = named(manifests, "Service", service)["spec"]
    if not matches({"matchLabels": spec["selector"]}, target.labels):
        yield f"{source.name}: {address} is not {target.name}"
    if int(port) not in [each["port"] for each in spec["ports"]]:
        yield f"{source.name}: service {service} has no port {port}"
    elif not allows(manifests, source, target, int(port)):
        yield f"{source.name}: a policy keeps it from {address}"


def _fault_of_redis(manifests: Sequence[Manifest], source: Workload, url: str, outside: str) -> Iterator[str]:
    parts = urlsplit(url)
    inside = [each for each in workloads(manifests) if each.component == "redis"]
    if inside:
        yield from _fault_of_target(manifests, source, inside[0], f"{parts.hostname}:{parts.port}")
    elif parts.scheme != "rediss":
        yield f"{source.name}: {url} crosses the network in clear text"
    elif not allows(manifests, source, Outside(address=outside), parts.port or 6379):
        yield f"{source.name}: a policy keeps it from {url}"


def _is_open(manifests: Sequence[Manifest], each: Workload, direction: str, peer: Peer, port: int) -> bool:
    """Closed as soon as one policy speaks of this direction, but for what any of them lets through."""
    policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")]
    speaking = [
        spec
        for spec in policies
        if direction.capitalize() in spec["policyTypes"] and matches(spec["podSelector"], each.labels)
    ]
    side = "to" if direction == "egress" else "from"
    listener = peer if direction == "egress" else each
    return not speaking or any(
        _is_port(rule, listener, port) and (side not in rule or any(_is_peer(one, peer) for one in rule[side]))
        for spec in speaking
        for rule in spec.get(direction, [])
    )


def _is_port(rule: Mapping[str, Any], listener: Peer, port: int) -> bool:
    if "ports" not in rule:
        return True
    named_ports = listener.ports if isinstance(listener, Workload) else {}
    return any(named_ports.get(each["port"], each["port"]) == port for each in rule["ports"])


def _is_peer(one: Mapping[str, Any], peer: Peer) -> bool:
    if "ipBlock" in one:
        network = ipaddress.ip_network(one["ipBlock"]["cidr"])
        return isinstance(peer, Outside) and bool(peer.address) and ipaddress.ip_address(peer.address) in network
    if isinstance(peer, Workload):
        return "namespaceSelector" not in one and matches(one["podSelector"], peer.labels)
    if peer.labels is None or "namespaceSelector" not in one:
        return False
    space = {"kubernetes.io/metadata.name": peer.namespace}
    return matches(one["namespaceSelector"], space) and matches(one.get("podSelector", {}), peer.labels)
