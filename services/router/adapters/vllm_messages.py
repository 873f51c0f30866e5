"""vLLM's completions endpoint: an order as its request body, its chunks as events."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InternalError, UnavailableError
from services.router.domain.decoding import DecodeOrder, salt_of
from services.router.domain.ports import FinishReason, TokenLogprobs, Tokens
from services.router.domain.request import Grammar, GrammarKind

__all__ = ["Chunk", "completion_body", "read_chunk"]

_TOKEN = "token_id:"  # vLLM's spelling of an id
_GRAMMARS = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.GRAMMAR: "grammar"}
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_SIGNED = 1 << 63
_FEWEST_LOGPROB = -9999.0


def completion_body(model: str, order: DecodeOrder) -> dict[str, Any]:
    """The JSON of a request: token ids in and out, and the decode state to begin from where there is one."""
    sampling = order.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(order.token_ids),
        "stream": True,
        "return_token_ids": True,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
        # All that end the reply are named: neither the model's nor the server's own come on top.
        "stop_token_ids": list(order.stop_token_ids),
        "ignore_eos": True,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed if sampling.seed < _SIGNED else sampling.seed - 2 * _SIGNED
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.grammar is not None:
        body["structured_outputs"] = _grammar(sampling.grammar)
    if order.offer is not None:
        offer = order.offer
        fields = {"handle": offer.handle.hex(), "address": offer.address, "num_tokens": offer.num_tokens}
        body |= {"cache_salt": salt_of(offer.handle), "kv_transfer_params": {"hypic": fields}}
    return body


def _grammar(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind is GrammarKind.CHOICES:
        return {"choice": json.loads(grammar.source)}
    return {_GRAMMARS[grammar.kind]: grammar.source}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a chunk adds; `reason` with the last one. num_tokens: with the one that ends the reply."""

    tokens: Tokens
    num_tokens: int
    reason: FinishReason | None


def read_chunk(fields: Mapping[str, Any], stop_token_ids: frozenset[int]) -> Chunk | None:
    """One chunk of a stream; None of one without a choice.

    Raises:
        UnavailableError: the engine gave the request up.
        InternalError: it is not a chunk as vLLM sends it with `return_token_ids`.
    """
    if error := fields.get("error"):
        raise UnavailableError(f"vLLM ended the reply: {error}")
    try:
        if not fields["choices"]:
            return None
        (choice,) = fields["choices"]
        token_ids = tuple(choice["token_ids"] or ())
        logprobs = _logprobs(choice["logprobs"]) if choice.get("logprobs") else ()
        finish = choice.get("finish_reason")
    except (KeyError, TypeError, ValueError) as error:
        raise InternalError(f"vLLM sent a chunk that is none: {error!r}") from error
    if finish is not None and finish not in _REASONS:
        raise UnavailableError(f"vLLM gave the request up: {finish}")
    num_tokens = len(token_ids)
    # As a worker tells a reply: the token that ends it is counted and not shown.
    if finish == "stop" and token_ids and token_ids[-1] in stop_token_ids:
        token_ids, logprobs = token_ids[:-1], logprobs[: len(token_ids) - 1]
    return Chunk(Tokens(token_ids, logprobs), num_tokens, None if finish is None else _REASONS[finish])


def _logprobs(fields: Mapping[str, Any]) -> tuple[TokenLogprobs, ...]:
    """`top_logprobs` of vLLM holds the drawn token too, whatever its rank; it stands first there."""
    found = []
    for own, top in zip(fields["token_logprobs"], fields["top_logprobs"], strict=True):
        ranked = sorted(((_token_id(name), value) for name, value in (top or {}).items()), key=lambda each: -each[1])
        found.append(TokenLogprobs(_FEWEST_LOGPROB if own is None else own, tuple(ranked)))
    return tuple(found)


def _token_id(name: str) -> int:
    return int(name.removeprefix(_TOKEN))
