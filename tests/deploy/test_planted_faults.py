"""The checks see what they are for: every planted fault is reported, and nothing else is."""

from collections.abc import Callable, Mapping

import pytest

from tests.deploy.network_checks import faults_of_addresses
from tests.deploy.pod_checks import faults_of_config_maps, faults_of_pods
from tests.deploy.rendering import Manifest, changed, named, of_kind, workload
from tests.deploy.schemas import faults_of_schemas
from tests.deploy.settings_checks import faults_of_settings, read_settings
from tests.deploy.wiring_checks import faults_of_wiring

Plant = Callable[[list[Manifest]], None]
Rendered = Mapping[str, list[Manifest]]


def _container(component: str, **fields: object) -> Plant:
    """Set fields of a container; one that is None is removed."""

    def plant(manifests: list[Manifest]) -> None:
        (container,) = workload(manifests, component).containers
        for path, value in fields.items():
            *steps, last = path.split("__")
            place = container
            for step in steps:
                place = place[step]
            if value is None:
                del place[last]
            else:
                place[last] = value

    return plant


def _pod(component: str, **fields: object) -> Plant:
    def plant(manifests: list[Manifest]) -> None:
        workload(manifests, component).pod.update(fields)

    return plant


def _variable(component: str, name: str, value: str | None) -> Plant:
    """Set a variable, or leave it out."""

    def plant(manifests: list[Manifest]) -> None:
        (container,) = workload(manifests, component).containers
        data = named(manifests, "ConfigMap", container["envFrom"][0]["configMapRef"]["name"])["data"]
        data.pop(name, None)
        if value is not None:
            data[name] = value

    return plant


def _spec(kind: str, name: str, **fields: object) -> Plant:
    def plant(manifests: list[Manifest]) -> None:
        named(manifests, kind, name)["spec"].update(fields)

    return plant


def _without(kind: str, name: str) -> Plant:
    def plant(manifests: list[Manifest]) -> None:
        manifests.remove(named(manifests, kind, name))

    return plant


def _secret(manifests: list[Manifest]) -> None:
    manifests.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hypic-cache"}})


def _query(manifests: list[Manifest]) -> None:
    named(manifests, "ScaledObject", "hypic-worker")["spec"]["triggers"][0]["metadata"] = {
        "query": "hypic_worker_num_requests_waiting"
    }


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_pod("router", securityContext={"seccompProfile": {"type": "RuntimeDefault"}}), "runs as root"),
        (_pod("cache", securityContext={"runAsNonRoot": True, "runAsUser": 1}), "no seccomp profile"),
        (_pod("worker", automountServiceAccountToken=True), "token of a service account"),
        (_pod("router", enableServiceLinks=True), "variables of Services"),
        (_pod("router", hostNetwork=True), "hostNetwork"),
        (_pod("cache", volumes=[{"name": "tmp", "hostPath": {"path": "/"}}]), "is the host's"),
        (_pod("cache", volumes=[{"name": "tmp", "emptyDir": {}}]), "no bound"),
        (_container("router", image="hypic/services:latest"), "no fixed tag"),
        (_container("router", image="hypic/services"), "no fixed tag"),
        (_container("router", image="registry:5000/hypic"), "no fixed tag"),
        (_container("worker", securityContext__readOnlyRootFilesystem=False), "writable root"),
        (_container("worker", securityContext__runAsUser=0), "container runs as root"),
        (_container("worker", securityContext__allowPrivilegeEscalation=True), "gain privileges"),
        (_container("worker", securityContext__capabilities={"drop": ["NET_RAW"]}), "keeps capabilities"),
        (_container("cache", resources__limits=None), "resource requests"),
        (_container("cache", readinessProbe=None), "has no readinessProbe"),
        (_container("cache", livenessProbe__grpc__service="readiness"), "not for liveness"),
        (_container("worker", startupProbe__failureThreshold=6), "given up after 60 seconds"),
        (_container("cache", env=[{"name": "HYPIC_CACHE_SECRET", "value": "x"}]), "stands in the manifest"),
    ],
)
def test_pods(rendered: Rendered, plant: Plant, words: str) -> None:
    _is_reported(faults_of_pods, rendered["prod"], plant, words)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_secret, "Secret hypic-cache"),
        (_variable("cache", "HYPIC_CACHE_SECRET", "0123456789abcdef"), "HYPIC_CACHE_SECRET belongs"),
        (_variable("cache", "HYPIC_CACHE_REDIS_URL", "redis://:word@redis:6379/0"), "HYPIC_CACHE_REDIS_URL belongs"),
    ],
)
def test_secrets_in_plain_sight(rendered: Rendered, plant: Plant, words: str) -> None:
    _is_reported(faults_of_config_maps, rendered["prod"], plant, words)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_spec("Deployment", "hypic-router", selector={"matchLabels": {"app": "router"}}), "does not match its pods"),
        (_spec("Service", "hypic-cache", selector={"app": "cache"}), "selects 0 workloads"),
        (_spec("Service", "hypic-router", ports=[{"port": 8000, "targetPort": "web"}]), "port web is none"),
        (_spec("Service", "hypic-cache", ports=[{"port": 80, "targetPort": "grpc"}]), "is headless"),
        (_without("Service", "hypic-worker"), "no service hypic-worker"),
        (_without("ServiceAccount", "hypic-cache"), "no service account"),
        (_without("PodDisruptionBudget", "hypic-worker"), "has 0 disruption budgets"),
        (_spec("PodDisruptionBudget", "hypic-worker", maxUnavailable=0), "more than one pod go, or none"),
        (_container("router", livenessProbe__httpGet__port=9), "asks port 9"),
        (_container("router", volumeMounts=[{"name": "gone", "mountPath": "/x"}]), "no volume gone"),
        (_container("router", envFrom=[{"configMapRef": {"name": "gone"}}]), "no config map gone"),
        (_pod("router", volumes=[{"name": "keys", "secret": {"secretName": "other"}}]), "secret other/?"),
        (_pod("worker", volumes=[{"name": "tls", "secret": {"secretName": "hypic-tls"}}]), "secret hypic-tls/?"),
        (_spec("InferencePool", "hypic", targetPorts=[{"number": 9}]), "port 9 is none of the routers'"),
        (_spec("InferencePool", "hypic", selector={"matchLabels": {}}), "is not the routers"),
        (_without("InferencePool", "hypic"), "the route leads to hypic, which is not there"),
        (_spec("StatefulSet", "hypic-worker", replicas=3), "both its manifest and KEDA"),
        (_query, "may give several numbers"),
        (_query, "counts as no load"),
        (
            _spec("PodMonitor", "hypic", podMetricsEndpoints=[{"port": "http"}]),
            "nobody reads the metrics of hypic-cache",
        ),
    ],
)
def test_wiring(rendered: Rendered, plant: Plant, words: str) -> None:
    _is_reported(faults_of_wiring, rendered["all"], plant, words)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_variable("worker", "HYPIC_WORKER_PAGE_BYTE", "1"), "unknown variable HYPIC_WORKER_PAGE_BYTE"),
        (_variable("worker", "HYPIC_WORKER_DEVICE", "gpu"), "HYPIC_WORKER_DEVICE"),
        (_variable("worker", "HYPIC_CACHE_BUDGET_BYTES", "1"), "nothing reads HYPIC_CACHE_BUDGET_BYTES"),
        (_variable("router", "HYPIC_ROUTER_API_KEYS_FILE", None), "api_keys_file"),
        (_variable("router", "HYPIC_ROUTER_SHUTDOWN_GRACE_SECONDS", "140"), "hypic-router is killed"),
        (_variable("cache", "HYPIC_CACHE_GRACE_SECONDS", "30"), "hypic-cache is killed"),
        (_variable("worker", "HYPIC_WORKER_DRAIN_SECONDS", "135"), "hypic-worker is killed"),
        (_container("worker", lifecycle__preStop__sleep__seconds=60), "hypic-worker is killed"),
        (_variable("cache", "HYPIC_CACHE_METRICS_PORT", "9200"), "hypic-cache listens on"),
        (_variable("router", "HYPIC_ROUTER_API_KEYS_FILE", "/keys.toml"), "lies on no volume"),
        (_variable("cache", "HYPIC_CACHE_TLS_CA_FILE", "/tls/ca.crt"), "lies on no volume"),
        (_variable("cache", "HYPIC_CACHE_TLS_CA_FILE", None), "or none"),
        (_container("worker", resources__limits__memory="64Gi"), "less than its budgets"),
        (_variable("worker", "HYPIC_WORKER_DISK_BYTES", str(1 << 40)), "its disk holds less"),
    ],
)
def test_settings(rendered: Rendered, plant: Plant, words: str) -> None:
    _is_reported(faults_of_settings, rendered["prod"], plant, words)


@pytest.mark.parametrize(
    ("name", "plant", "words"),
    [
        ("prod", _variable("router", "HYPIC_ROUTER_CACHE_ADDRESS", "hypic-cache:7101"), "sticks to one pod"),
        ("prod", _variable("router", "HYPIC_ROUTER_CACHE_ADDRESS", "dns:///cache:7101"), "names no service"),
        ("prod", _variable("worker", "HYPIC_WORKER_CACHE_ADDRESS", "dns:///hypic-cache:7102"), "has no port 7102"),
        ("prod", _variable("worker", "HYPIC_WORKER_CACHE_ADDRESS", "dns:///hypic-router:8000"), "is not hypic-cache"),
        ("prod", _without("NetworkPolicy", "hypic-worker"), "keeps it from hypic-worker-0"),
        ("prod", _spec("NetworkPolicy", "hypic-cache", ingress=[]), "keeps it from hypic-cache:7101"),
        ("prod", _spec("NetworkPolicy", "hypic-router", egress=[]), "keeps it from hypic-cache:7101"),
        ("prod", _spec("NetworkPolicy", "hypic-cache", egress=[]), "keeps it from rediss://"),
        ("prod", _variable("cache", "HYPIC_CACHE_REDIS_URL", "redis://redis.example.com:6380/0"), "in clear text"),
        (
            "prod",
            _variable("worker", "HYPIC_WORKER_REDIS_URL", "rediss://r.example.com:6380/1"),
            "keeps it from rediss",
        ),
        ("dev", _without("NetworkPolicy", "hypic-redis"), "keeps it from hypic-redis:6379"),
        ("dev", _variable("cache", "HYPIC_CACHE_REDIS_URL", "redis://hypic-redis:6380/0"), "has no port 6380"),
    ],
)
def test_addresses(rendered: Rendered, name: str, plant: Plant, words: str) -> None:
    def check(manifests: list[Manifest]) -> list[str]:
        return faults_of_addresses(manifests, read_settings(manifests), "10.20.0.7")

    _is_reported(check, rendered[name], plant, words)


@pytest.mark.usefixtures("_remembered_schemas")
@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_container("router", imagePullPolcy="Always"), "imagePullPolcy"),
        (_container("router", readinessProbe__periodSeconds="5"), "periodSeconds"),
        (_spec("Service", "hypic-router", port=8000), "'port' was unexpected"),
        (_spec("HTTPRoute", "hypic", hostname="x.example.com"), "'hostname' was unexpected"),
        (_spec("HTTPRoute", "hypic", hostnames=["X"]), "$.spec.hostnames[0]"),
        (_spec("InferencePool", "hypic", targetPortNumber=8000), "'targetPortNumber' was unexpected"),
        (_spec("InferencePool", "hypic", endpointPickerRef={"name": "picker"}), "'port' is a required property"),
        (_spec("PodMonitor", "hypic", podMetricsEndpoints=[{"port": 9101}]), "9101 is not of type 'string'"),
        (_spec("ScaledObject", "hypic-worker", minReplicas=1), "'minReplicas' was unexpected"),
        (_query, "'serverAddress' is a required property"),
    ],
)
def test_schemas(rendered: Rendered, plant: Plant, words: str) -> None:
    _is_reported(lambda manifests: faults_of_schemas(manifests, "1.37"), rendered["all"], plant, words)


@pytest.mark.usefixtures("_remembered_schemas")
def test_a_kind_without_schema_is_no_pass(rendered: Rendered) -> None:
    unknown = {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": "x"}}
    assert faults_of_schemas([unknown], "1.37") == ["Thing x: no schema of example.com/v1 Thing"]


def test_sleeping_ahead_of_the_end_is_unknown_to_older_versions(rendered: Rendered) -> None:
    router = workload(rendered["prod"], "router").manifest
    assert any("sleep" in fault for fault in faults_of_schemas([router], "1.28"))


def test_the_network_has_a_policy_for_every_service(rendered: Rendered) -> None:
    assert len(list(of_kind(rendered["prod"], "NetworkPolicy"))) >= 5


def _is_reported(check: Callable[[list[Manifest]], list[str]], sound: list[Manifest], plant: Plant, words: str) -> None:
    assert check(sound) == []
    broken = changed(sound)
    plant(broken)
    assert any(words in fault for fault in check(broken)), check(broken)
