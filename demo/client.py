"""A streaming client that measures the time to the first token."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from demo.scenario import DemoRequest

__all__ = ["Reply", "ask", "calibration_line"]

_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Reply:
    """text; seconds to the first token; prompt tokens, how many were reused; documents by how they were served."""

    text: str
    first_token_seconds: float
    prompt_tokens: int
    reused_tokens: int
    documents: Counter[str]


def ask(base_url: str, model: str, system: str, request: DemoRequest) -> Reply:
    """Send one request.

    Raises:
        httpx2.HTTPError: the stack does not answer.
        RuntimeError: it answers with an error.
    """
    body = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 48,
        "documents": [asdict(document) for document in request.documents],
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": request.question}],
        "hypic": {"reuse": request.reuse, "explain": True},
    }
    text: list[str] = []
    first_token = 0.0
    last: dict[str, Any] = {}
    started = time.perf_counter()
    for chunk in _stream(f"{base_url}/v1/chat/completions", body):
        delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
        if delta:
            first_token = first_token or time.perf_counter() - started
            text.append(delta)
        last = chunk
    return Reply(
        text="".join(text).strip(),
        first_token_seconds=first_token,
        prompt_tokens=last["usage"]["prompt_tokens"],
        reused_tokens=last["usage"]["prompt_tokens_details"]["cached_tokens"],
        documents=Counter(part["served"] for part in last["hypic"]["parts"] if part["kind"] == "segment"),
    )


def calibration_line(base_url: str) -> str:
    """What the stack says of its model's loss.

    Raises:
        httpx2.HTTPError: it does not answer.
    """
    told = httpx2.get(f"{base_url}/v1/models", timeout=_TIMEOUT_SECONDS).raise_for_status().json()
    calibration = told["data"][0]["calibration"]
    if calibration["status"] != "calibrated":
        return f"{calibration['status']}: {calibration['reason']}"
    kl, prompts = calibration["loss"]["kl_nats"], calibration["prompts"]
    alike = calibration["loss"]["agreement"]["value"]
    return (
        f"calibrated on {prompts['asked']} prompts of {prompts['file']}: composing moves the first {calibration['tokens']} tokens"
        f" by {kl['value']:.3f} nats each (95 %: up to {kl['high']:.3f}),\n{100 * alike:.0f} % of replies begin alike"
    )


def _stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx2.stream("POST", url, json=body, timeout=_TIMEOUT_SECONDS) as response:
        if response.status_code != 200:
            response.read()
            raise RuntimeError(f"{response.status_code}: {response.text}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk
