"""Time to first token through HTTP against a freshly started stack."""

import json
import time
import urllib.request
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.prompts import BenchPrompt, make_prompt
from services.cli.supervisor import Stack

__all__ = ["HttpTimes", "measure_http"]

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Medians in seconds of the time to the first streamed token; prompt_tokens of one request."""

    off: float
    exact: float
    all_hits: float
    cold: float
    live_share: float
    prompt_tokens: int


def measure_http(stack: Stack) -> HttpTimes:
    """Modes take turns within each round, so that a slow moment of the machine meets them all."""
    times: dict[str, list[float]] = {"off": [], "exact": [], "all_hits": [], "cold": []}
    prompt = make_prompt(seed=0)
    _first_token(stack, prompt, 0, "compose")
    _first_token(stack, prompt, 0, "exact")
    for number in range(_ROUNDS):
        times["cold"].append(_first_token(stack, make_prompt(seed=1 + number), number, "compose"))
        times["all_hits"].append(_first_token(stack, prompt, number + 1, "compose"))
        times["exact"].append(_first_token(stack, prompt, number + 1, "exact"))
        times["off"].append(_first_token(stack, prompt, number + 1, "off"))
    usage = _request(stack, _body(stack, prompt, 1, "compose", stream=False))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return HttpTimes(
        **{mode: median(values) for mode, values in times.items()},
        live_share=1 - cached / usage["prompt_tokens"],
        prompt_tokens=usage["prompt_tokens"],
    )


def _body(stack: Stack, prompt: BenchPrompt, number: int, reuse: str, stream: bool) -> bytes:
    # Every round rotates the documents: reuse must not depend on their order.
    turn = number % len(prompt.documents)
    documents = prompt.documents[turn:] + prompt.documents[:turn]
    body = {
        "model": stack.model_name,
        "stream": stream,
        "temperature": 0,
        "max_tokens": 2,
        "documents": [{"title": title, "text": text} for title, text in documents],
        "messages": [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": f"{prompt.questions[number % len(prompt.questions)]} ({number})"},
        ],
        "hypic": {"reuse": reuse},
    }
    return json.dumps(body).encode()


def _open(stack: Stack, body: bytes) -> Any:  # noqa: ANN401 # urllib's response type depends on the scheme
    headers = {"content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(f"{stack.base_url}/v1/chat/completions", body, headers))


def _request(stack: Stack, body: bytes) -> Any:  # noqa: ANN401 # JSON
    with _open(stack, body) as response:
        return json.load(response)


def _first_token(stack: Stack, prompt: BenchPrompt, number: int, reuse: str) -> float:
    body = _body(stack, prompt, number, reuse, stream=True)
    started = time.perf_counter()
    with _open(stack, body) as response:
        for line in response:
            if _has_token(line):
                elapsed = time.perf_counter() - started
                response.read()
                return elapsed
    raise RuntimeError("the stream ended without a token")


def _has_token(line: bytes) -> bool:
    """A chunk with text, or the finish of a reply whose first token ends it."""
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line.removeprefix(b"data: ")).get("choices", [])
    return any(choice["delta"].get("content") or choice["finish_reason"] for choice in choices)
