"""Whether the services start with the variables that the manifests give them, and end within the time that they get."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from services.cache.settings import CacheSettings
from services.common.settings import ServiceSettings, SettingsError
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.deploy.rendering import Manifest, Workload, environment, workload

__all__ = ["Settings", "bytes_of", "faults_of_settings", "read_settings"]

_CLASSES: Mapping[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "cache": CacheSettings,
    "worker": WorkerSettings,
}
# Beyond the drain itself: background work, the last chunks, closing connections.
_MARGIN_SECONDS = 5
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
# The libraries of torch, the runtime, messages on their way: what a worker takes beside its budgets.
_PROCESS_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """What the three services read."""

    router: RouterSettings
    cache: CacheSettings
    worker: WorkerSettings


def read_settings(manifests: Sequence[Manifest]) -> Settings:
    """As the services would.

    Raises:
        SettingsError: a variable is unknown, or its value is refused.
    """
    found = {name: _read(manifests, name) for name in _CLASSES}
    router, cache, worker = found["router"], found["cache"], found["worker"]
    assert isinstance(router, RouterSettings)
    assert isinstance(cache, CacheSettings)
    assert isinstance(worker, WorkerSettings)
    return Settings(router, cache, worker)


def faults_of_settings(manifests: Sequence[Manifest]) -> list[str]:
    """One line for each value that is refused, or does not go with the manifest around it."""
    try:
        settings = read_settings(manifests)
    except SettingsError as error:
        return [str(error)]
    return [
        *_foreign_variables(manifests),
        *_faults_of_endings(manifests, settings),
        *_faults_of_ports(manifests, settings),
        *_faults_of_paths(manifests),
        *_faults_of_sizes(manifests, settings),
    ]


def bytes_of(quantity: str) -> int:
    """A quantity of memory or storage."""
    match = re.fullmatch(r"(\d+)(|[KMGT]i)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _UNITS[match[2]]


def _read(manifests: Sequence[Manifest], component: str) -> ServiceSettings:
    (container,) = workload(manifests, component).containers
    variables = mock.patch.dict(os.environ, environment(manifests, container), clear=True)
    # What lies in secrets is not here.
    with variables, mock.patch("services.common.settings.check_files"):
        return _CLASSES[component].from_environment()


def _foreign_variables(manifests: Sequence[Manifest]) -> Iterator[str]:
    """The settings refuse what is unknown under their own prefix only."""
    for component in _CLASSES:
        (container,) = workload(manifests, component).containers
        for name in environment(manifests, container):
            if name.startswith("HYPIC_") and not name.startswith(f"HYPIC_{component.upper()}_"):
                yield f"{component}: nothing reads {name}"


def _faults_of_endings(manifests: Sequence[Manifest], settings: Settings) -> Iterator[str]:
    """A worker waits for streams, and then as long for states on their way to a tier."""
    drains = {
        "router": settings.router.shutdown_grace_seconds,
        "cache": settings.cache.grace_seconds,
        "worker": 2 * settings.worker.drain_seconds,
    }
    for component, seconds in drains.items():
        each = workload(manifests, component)
        (container,) = each.containers
        needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + seconds + _MARGIN_SECONDS
        if each.pod["terminationGracePeriodSeconds"] < needed:
            yield f"{each.name} is killed before its {needed:.0f} seconds of draining are over"


def _faults_of_ports(manifests: Sequence[Manifest], settings: Settings) -> Iterator[str]:
    listening = {
        "router": {"http": settings.router.port, "metrics": _port(settings.router.operations_address)},
        "cache": {
            "grpc": _port(settings.cache.listen_address),
            "health": _port(settings.cache.health_address),
            "metrics": settings.cache.metrics_port,
        },
        "worker": {
            "grpc": _port(settings.worker.listen_address),
            "health": _port(settings.worker.health_address),
            "metrics": settings.worker.metrics_port,
        },
    }
    for component, ports in listening.items():
        each = workload(manifests, component)
        if each.ports != ports:
            yield f"{each.name} listens on {ports}, and its manifest says {each.ports}"


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _faults_of_paths(manifests: Sequence[Manifest]) -> Iterator[str]:
    for component in _CLASSES:
        each = workload(manifests, component)
        (container,) = each.containers
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        for name, value in environment(manifests, container).items():
            is_path = name.endswith(("_FILE", "_DISK_DIRECTORY"))
            if is_path and not any(Path(value).is_relative_to(mount) for mount in mounts):
                yield f"{each.name}: {value} lies on no volume"


def _faults_of_sizes(manifests: Sequence[Manifest], settings: Settings) -> Iterator[str]:
    each, worker = workload(manifests, "worker"), settings.worker
    (container,) = each.containers
    limit = bytes_of(container["resources"]["limits"]["memory"])
    if worker.device == "cpu":
        needed = worker.host_bytes + (worker.memory_bytes or worker.page_bytes + worker.state_bytes)
    else:
        # Pinned blocks are rounded up to powers of two.
        needed = 2 * worker.host_bytes
    if limit < needed + worker.fetch_bytes + _PROCESS_BYTES:
        yield f"{each.name}: a limit of {limit} bytes of memory is less than its budgets"
    if worker.disk_directory is not None and worker.disk_bytes > _claimed_bytes(each):
        yield f"{each.name}: its disk holds less than HYPIC_WORKER_DISK_BYTES"


def _claimed_bytes(each: Workload) -> int:
    claims = each.manifest["spec"].get("volumeClaimTemplates", [])
    return sum(bytes_of(claim["spec"]["resources"]["requests"]["storage"]) for claim in claims)
