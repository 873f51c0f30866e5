"""Tiny checkpoints of any family, served one after the other, and what the public implementations reply."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx2
import torch
from tokenizers import Tokenizer

from services.cli.one_prompt import PromptText, describe_model
from services.cli.ports import free_port, grpc_ready
from services.worker.adapters.served_model import read_served_model
from services.worker.settings import WorkerSettings
from tests.e2e.stack.served import wait_until
from tests.models import Variant, reference_logits

__all__ = ["ChangingStack", "public_reply", "write_family"]

_PROFILE = """
seam_window = 8
prime = "<|im_start|>user\\n"
document_open = "<|document_start|>"
document_close = "<|document_end|>"
"""


class ChangingStack:
    """A router and a cache service that stay, for workers that come and go with one model each."""

    def __init__(self, log: Path) -> None:
        cache, worker, router = (free_port() for _ in range(3))
        self._log = log
        self._cache_address = f"127.0.0.1:{cache}"
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HYPIC_CACHE_LISTEN_ADDRESS": self._cache_address,
            "HYPIC_ROUTER_CACHE_ADDRESS": self._cache_address,
            "HYPIC_ROUTER_WORKERS": f"127.0.0.1:{worker}",
            "HYPIC_ROUTER_PORT": str(router),
            "HYPIC_WORKER_CACHE_ADDRESS": self._cache_address,
            "HYPIC_WORKER_LISTEN_ADDRESS": f"127.0.0.1:{worker}",
        }
        self.model = ""
        self.base_url = f"http://127.0.0.1:{router}"
        self.http = httpx2.Client(base_url=self.base_url, timeout=60)

    def __enter__(self) -> Self:
        self._services = [self._start(name) for name in ("cache", "router")]
        wait_until(lambda: asyncio.run(grpc_ready(self._cache_address)), 90)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        for service in reversed(self._services):
            _end(service)

    @contextmanager
    def serving(self, checkpoint: Path) -> Iterator[None]:
        """A worker with this model, from the moment that the router knows it."""
        worker = self._start("worker", HYPIC_WORKER_CHECKPOINT=str(checkpoint))
        try:
            wait_until(lambda: worker.poll() is not None or checkpoint.name in self._models(), 90)
            assert worker.poll() is None, self._log.read_text()[-2000:]
            self.model = checkpoint.name
            yield
        finally:
            _end(worker)

    def _models(self) -> list[str]:
        try:
            response = self.http.get("/v1/models")
        except httpx2.TransportError:
            return []
        return [model["id"] for model in response.json()["data"]] if response.status_code == 200 else []

    def _start(self, service: str, **variables: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "services.cli.main", service]
            return subprocess.Popen(command, env=self._environment | variables, stdout=log, stderr=log)


def _end(service: subprocess.Popen[bytes]) -> None:
    service.terminate()
    assert service.wait(60) == 0


def write_family(variant: Variant, directory: Path, tokenizer_from: Path) -> Any:  # noqa: ANN401 # transformers ships no types
    """The variant's public model, with as many tokens as a real tokenizer has; written with it to a directory."""
    tokenizer = Tokenizer.from_file(str(tokenizer_from / "tokenizer.json"))
    model = variant.build(variant.config)
    _widen(model, tokenizer)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, directory / name)
    (directory / "profile.toml").write_text(_PROFILE)
    return model


@torch.no_grad()
def _widen(model: Any, tokenizer: Tokenizer) -> None:  # noqa: ANN401 # transformers ships no types
    """Random rows for every token. Those of special tokens are zero in the head, so that no reply ends by itself."""
    size = tokenizer.get_vocab_size()
    embedding, head = model.model.embed_tokens, model.lm_head
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(size, embedding.weight.shape[1], generator=generator) * 0.25
    is_tied = head.weight is embedding.weight
    embedding.weight = torch.nn.Parameter(rows)
    head.weight = embedding.weight if is_tied else torch.nn.Parameter(rows.flip(0))
    head.weight[[token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special]] = 0.0
    model.config.vocab_size = size


def public_reply(model: Any, checkpoint: Path, text: PromptText, num_tokens: int) -> str:  # noqa: ANN401 # transformers ships no types
    """What the public implementation continues greedily with, the whole prompt anew for every token."""
    settings = WorkerSettings.from_environment(checkpoint=checkpoint)
    served = describe_model(settings, read_served_model(settings))
    token_ids = [token for part in served.assembler.assemble(text.conversation()).parts for token in part.token_ids]
    prompt_tokens = len(token_ids)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, tuple(token_ids))[-1].argmax()))
    return served.new_detokenizer().push(token_ids[prompt_tokens:])
