"""Every overlay is one that a cluster takes, confined and wired, whose services start with what it sets."""

from collections.abc import Callable, Mapping

import pytest

from tests.deploy.network_checks import Outside, allows, faults_of_addresses
from tests.deploy.pod_checks import faults_of_config_maps, faults_of_pods
from tests.deploy.rendering import Manifest, named, of_kind, workload, workloads
from tests.deploy.schemas import faults_of_schemas, versions
from tests.deploy.settings_checks import faults_of_settings, read_settings
from tests.deploy.wiring_checks import faults_of_wiring

NAMES = ("dev", "prod", "all", "dev-tls", "mine")
Rendered = Mapping[str, list[Manifest]]
# In the networks that the overlays give to Redis.
REDIS_ADDRESSES = dict.fromkeys(NAMES, "10.20.0.7") | {"mine": "10.9.0.7"}


@pytest.mark.usefixtures("_remembered_schemas")
@pytest.mark.parametrize("version", versions())
def test_every_overlay_follows_the_schemas_strictly(rendered: Rendered, version: str) -> None:
    unique = {repr(each): each for name in NAMES for each in rendered[name]}
    assert faults_of_schemas(list(unique.values()), version) == []


def test_versions_reach_from_the_oldest_claimed_to_one_of_today() -> None:
    assert versions()[0] == "1.30"
    assert len(versions()) >= 8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", [faults_of_pods, faults_of_config_maps, faults_of_wiring, faults_of_settings])
def test_every_overlay_is_without_fault(
    rendered: Rendered, name: str, check: Callable[[list[Manifest]], list[str]]
) -> None:
    assert check(rendered[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_policies_let_through_what_the_settings_name(rendered: Rendered, name: str) -> None:
    manifests = rendered[name]
    assert faults_of_addresses(manifests, read_settings(manifests), REDIS_ADDRESSES[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_policies_keep_everybody_else_out(rendered: Rendered, name: str) -> None:
    manifests = rendered[name]
    router, cache, worker = (workload(manifests, each) for each in ("router", "cache", "worker"))
    gateway = Outside("gateway", {"app": "envoy"})
    prometheus = Outside("monitoring", {"app.kubernetes.io/name": "prometheus"})
    stranger = Outside("default", {"app.kubernetes.io/name": "hypic", "app.kubernetes.io/component": "router"})
    assert allows(manifests, gateway, router, 8000)
    for target, ports in ((router, [8000, 9100]), (cache, [7101, 7201, 9101]), (worker, [7102, 7202, 9102])):
        assert not any(allows(manifests, stranger, target, port) for port in ports)
        assert [port for port in ports if allows(manifests, gateway, target, port)] == [8000] * (target is router)
        assert [port for port in ports if allows(manifests, prometheus, target, port)] == [ports[-1]]
    assert not allows(manifests, router, Outside(address=REDIS_ADDRESSES[name]), 6380)
    assert not allows(manifests, cache, router, 8000)
    assert not allows(manifests, worker, Outside(address="1.1.1.1"), 443)
    dns = Outside("kube-system", {"k8s-app": "kube-dns"})
    assert all(allows(manifests, each, dns, 53) for each in (router, cache, worker))


def test_redis_in_the_cluster_is_reached_by_cache_service_and_workers_alone(rendered: Rendered) -> None:
    manifests = rendered["dev"]
    redis = workload(manifests, "redis")
    reaching = [each.component for each in workloads(manifests) if allows(manifests, each, redis, 6379)]
    assert sorted(reaching) == ["cache", "worker"]


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_variable_restarts_the_pods_that_read_it(rendered: Rendered, name: str) -> None:
    for each in workloads(rendered[name]):
        for container in each.containers:
            for source in container.get("envFrom", []):
                prefix, _, digest = source["configMapRef"]["name"].rpartition("-")
                assert prefix == each.name
                assert len(digest) == 10


def test_development_has_one_worker_with_both_roles_on_a_cpu(rendered: Rendered) -> None:
    worker = read_settings(rendered["dev"]).worker
    assert (worker.can_capture, worker.can_combine, worker.device) == (True, True, "cpu")
    assert workload(rendered["dev"], "worker").manifest["spec"]["replicas"] == 1


def test_production_has_gpus_tiers_and_several_of_everything(rendered: Rendered) -> None:
    manifests, settings = rendered["prod"], read_settings(rendered["prod"])
    (container,) = workload(manifests, "worker").containers
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert settings.worker.device == "cuda"
    assert settings.worker.disk_directory is not None
    assert settings.cache.redis_url.startswith("rediss://")
    assert all(each.tls for each in (settings.router, settings.cache, settings.worker))
    assert all(workload(manifests, each).manifest["spec"]["replicas"] > 1 for each in ("router", "cache", "worker"))
    assert next(of_kind(manifests, "PodMonitor"))
    num_workers = workload(manifests, "worker").manifest["spec"]["replicas"]
    assert settings.cache.budget_bytes == num_workers * settings.worker.disk_bytes


def test_the_example_of_the_page_says_what_differs(rendered: Rendered) -> None:
    images = {one["image"] for each in workloads(rendered["mine"]) for one in each.containers}
    assert images == {f"registry.example.com/hypic/{name}:0.1.0" for name in ("services", "worker-gpu")}
    settings = read_settings(rendered["mine"])
    assert settings.cache.redis_url == "rediss://redis.internal:6380/0"
    assert settings.cache.budget_bytes == 2 * settings.worker.disk_bytes
    assert named(rendered["mine"], "HTTPRoute", "hypic")["spec"]["hostnames"] == ["llm.example.com"]


def test_the_route_outlives_the_longest_request(rendered: Rendered) -> None:
    route = named(rendered["prod"], "HTTPRoute", "hypic")["spec"]["rules"][0]
    settings = read_settings(rendered["prod"]).router
    for seconds in route["timeouts"].values():
        assert float(seconds.removesuffix("s")) > settings.request_timeout_seconds
    assert [match["path"]["value"] for match in route["matches"]] == ["/v1"]


def test_a_worker_is_named_after_its_pod(rendered: Rendered) -> None:
    worker = read_settings(rendered["prod"]).worker
    assert worker.worker_id == "hypic-worker-0"
    assert worker.reached_at == "hypic-worker-0.hypic-worker.hypic.svc:7102"
