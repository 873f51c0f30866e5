"""Cache service, combine worker and vLLM, with two routers over the same states: the replies of one are our own engine's."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vllm.server import MODEL, RunningVllm, serve_vllm
from services.cli.ports import free_port

__all__ = ["CHECKPOINT", "Pair", "serve_pair", "stream_first_token"]

CHECKPOINT = Path(__file__).resolve().parents[2] / "models" / "demo"
_START_SECONDS = 180.0
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """own: the router whose replies the worker writes; theirs: whose replies vLLM writes. Both use the same states."""

    own: str
    theirs: str
    vllm: RunningVllm


@contextmanager
def serve_pair(python: Path) -> Iterator[Pair]:
    """Everything on loopback, in bf16, ready.

    Raises:
        RuntimeError: something did not start.
    """
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        vllm = running.enter_context(serve_vllm(python, CHECKPOINT, folder / "vllm.log"))
        cache, worker = (f"127.0.0.1:{free_port()}" for _ in range(2))
        _start(running, "cache", {"HYPIC_CACHE_LISTEN_ADDRESS": cache}, folder)
        _start(running, "worker", {
            "HYPIC_WORKER_CHECKPOINT": str(CHECKPOINT),
            "HYPIC_WORKER_DTYPE": "bfloat16",
            "HYPIC_WORKER_MODEL_NAME": MODEL,
            "HYPIC_WORKER_LISTEN_ADDRESS": worker,
            "HYPIC_WORKER_CACHE_ADDRESS": cache,
        }, folder)  # fmt: skip
        ports = free_port(), free_port()
        common = {"HYPIC_ROUTER_WORKERS": worker, "HYPIC_ROUTER_CACHE_ADDRESS": cache}
        handing = {"HYPIC_ROUTER_DECODE": "vllm", "HYPIC_ROUTER_VLLM_URLS": vllm.url}
        for port, more in zip(ports, ({}, handing), strict=True):
            _start(running, "router", {"HYPIC_ROUTER_PORT": str(port), **common, **more}, folder)
        for port in ports:
            _await_ready(port)
        own, theirs = (f"http://127.0.0.1:{port}" for port in ports)
        yield Pair(own, theirs, vllm)


def _start(running: ExitStack, service: str, variables: Mapping[str, str], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYPIC_")}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1", **variables}
    sink = running.enter_context((folder / f"{service}-{len(list(folder.iterdir()))}.log").open("wb"))
    command = [sys.executable, "-m", "services.cli.main", service]
    process = running.enter_context(subprocess.Popen(command, env=environment, stdout=sink, stderr=sink))
    running.callback(process.terminate)


def _await_ready(port: int) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > give_up:
                raise RuntimeError("a router is not ready in time") from None
            time.sleep(0.1)


def post(url: str, body: Json) -> Json:
    """A reply as a whole."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        found: Json = json.load(response)
    return found


def stream_first_token(url: str, body: Json) -> float:
    """Seconds until the first chunk that carries a token, or ends the reply."""
    content = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {") and _has_token(json.loads(line.removeprefix(b"data: "))):
                elapsed = time.perf_counter() - started
                response.read()
                return elapsed
    raise RuntimeError("the stream ended without a token")


def _has_token(chunk: Json) -> bool:
    return any(
        choice.get("token_ids") or choice.get("delta", {}).get("content") or choice.get("finish_reason")
        for choice in chunk.get("choices", [])
    )
