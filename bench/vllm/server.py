"""A vLLM server with the connector, in an environment of its own, which `HYPIC_VLLM_PYTHON` names."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.ports import free_port

__all__ = ["VARIABLE", "RunningVllm", "find_python", "serve_vllm"]

VARIABLE = "HYPIC_VLLM_PYTHON"
MODEL = "demo"
_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 900.0
_END_SECONDS = 30.0
_SOURCES = (_ROOT, _ROOT / "proto", _ROOT / "integrations" / "vllm" / "src")
_VARIABLES = {
    "PYTHONPATH": os.pathsep.join(map(str, _SOURCES)),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Cores are shared with the services beside it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def find_python() -> Path | None:
    """The interpreter of an environment that has vLLM; None where none is named."""
    named = os.environ.get(VARIABLE, "")
    return Path(named) if named and Path(named).exists() else None


@dataclass(frozen=True, slots=True)
class RunningVllm:
    """A server on loopback."""

    url: str
    pid: int
    log: Path

    def complete(self, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:  # noqa: ANN401
        """One greedy reply to a prompt of token ids, as the endpoint gives it."""
        body = {"model": MODEL, "prompt": list(token_ids), "temperature": 0, "return_token_ids": True, **more}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextmanager
def serve_vllm(
    python: Path, checkpoint: Path, log: Path, arguments: Sequence[str] = (), connector: dict[str, Any] | None = None
) -> Iterator[RunningVllm]:
    """A server that is ready. arguments: further ones; connector: fields in place of the usual transfer configuration's.

    Raises:
        RuntimeError: it did not start; its log says why.
    """
    port = free_port()
    transfer = {
        "kv_connector": "HypicConnector",
        "kv_connector_module_path": "hypic_vllm.connector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"workers": ["127.0.0.1:*"]},
        **(connector or {}),
    }
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--enforce-eager", "--max-num-seqs", "16", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer), *arguments),
    ]
    environment = {**os.environ, **_VARIABLES}
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, cwd=log.parent) as process,
    ):
        try:
            _await_ready(process, port, log)
            yield RunningVllm(f"http://127.0.0.1:{port}", process.pid, log)
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"vLLM did not start; {log} says why") from None
            time.sleep(0.2)
