"""Time to the first token of 8 documents of 400 tokens: vLLM from a composed state, beside vLLM's own prefill and our engine."""

from collections.abc import Iterator
from statistics import median
from typing import Any

from bench.prompts import BenchPrompt, make_prompt
from bench.results import Row
from bench.vllm.server import MODEL
from bench.vllm.stack import Pair, post, stream_first_token

__all__ = ["first_token_rows"]


def first_token_rows(pair: Pair, rounds: int) -> Iterator[Row]:
    """The ways take turns within a round, so that a slow moment of the machine meets them all; documents in ever new orders."""
    prompt = make_prompt(seed=0)
    times: dict[str, list[float]] = {"composed": [], "own prefill": [], "our engine": []}
    composed: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        body = _body(prompt, number)
        ids = _token_ids(pair, body)
        chat = "/v1/chat/completions"
        found = {
            "composed": stream_first_token(pair.theirs + chat, body),
            # A salt of its own: nothing of another round lies in the prefix cache.
            "own prefill": stream_first_token(
                f"{pair.vllm.url}/v1/completions",
                {"model": MODEL, "prompt": ids, "temperature": 0, "max_tokens": 2, "return_token_ids": True,
                 "cache_salt": f"round-{number}"},
            ),
            "our engine": stream_first_token(pair.own + chat, body),
        }  # fmt: skip
        if number:
            for way, seconds in found.items():
                times[way].append(seconds)
            composed.append(post(pair.theirs + chat, body | {"hypic": {"explain": True}})["hypic"])
    means = {way: 1000 * median(values) for way, values in times.items()}
    assert all(each["decode"]["began_from"] == "state" for each in composed)
    name = "8 documents of 400 tokens, all stored"
    yield Row(f"time to first token, vLLM's own prefill over vLLM from the composed state, {name}",
              median(own / ours for own, ours in zip(times["own prefill"], times["composed"], strict=True)), "×")  # fmt: skip
    yield Row(f"time to first token, vLLM from the composed state, through the router, {name}", means["composed"], "ms",
              better="lower")  # fmt: skip
    yield Row(f"time to first token, vLLM's own prefill, asked directly, {name}", means["own prefill"], "ms",
              better="lower")  # fmt: skip
    yield Row(f"time to first token, our own engine, through the router, {name}", means["our engine"], "ms",
              better="lower")  # fmt: skip
    yield Row("of the composed way, combining in the worker",
              1000 * median(each["seconds"]["combine"] for each in composed), "ms", better="lower")  # fmt: skip


def _body(prompt: BenchPrompt, number: int) -> dict[str, Any]:
    turn = number % len(prompt.documents)
    documents = prompt.documents[turn:] + prompt.documents[:turn]
    return {
        "model": MODEL,
        "temperature": 0,
        "max_tokens": 2,
        "documents": [{"title": title, "text": text} for title, text in documents],
        "messages": [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": f"{prompt.questions[number % len(prompt.questions)]} ({number})"},
        ],
    }


def _token_ids(pair: Pair, body: dict[str, Any]) -> list[int]:
    """As many tokens as the prompt has: what they are does not change how long a prefill takes."""
    usage = post(f"{pair.own}/v1/chat/completions", body)["usage"]
    return [7 + place % 5000 for place in range(usage["prompt_tokens"])]
