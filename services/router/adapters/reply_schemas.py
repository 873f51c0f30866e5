"""Schemas of replies for the OpenAPI document."""

from typing import Any

from services.router.adapters.shapes import list_of, ref

__all__ = ["REPLIES"]

Json = dict[str, Any]

_INTEGER: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number", "minimum": 0}
_STRING: Json = {"type": "string"}
_BOOLEAN: Json = {"type": "boolean"}


def _object(description: str, optional: tuple[str, ...] = (), **properties: Json) -> Json:
    """An object whose properties are all there, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "description": description, "properties": properties, "required": required}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _constant(value: str | bool) -> Json:
    return {"const": value}


_REASON: Json = {"enum": ["stop", "length", "tool_calls", None]}
_PART = _object(
    "One part of the prompt: `tokens` are live, captured and reused ones together.",
    kind={"enum": ["prefix", "segment", "live"]},
    document_id=_STRING,
    title=_STRING,
    tokens=_INTEGER,
    planned=_STRING,
    served=_STRING,
    live_tokens=_INTEGER,
    captured_tokens=_INTEGER,
    reused_tokens=_INTEGER,
    tier=_STRING,
    reason=_or_null(_STRING),
    capture=_or_null(_object("Who captured it.", worker=_STRING, cause=_STRING, seconds=_or_null(_NUMBER))),
    fetch=_or_null(_object("Where its state came from.", worker=_STRING, seconds=_NUMBER)),
    refreshed_tokens=_INTEGER,
)
_EXPLANATION = _object(
    "How every part was served, where `hypic.explain` asked for it.",
    reuse=_STRING,
    cold=_STRING,
    parts=list_of(ref("PartExplanation")),
    seconds={"type": "object", "additionalProperties": _NUMBER, "description": "Where the time went, in seconds."},
    placing={"type": "object", "description": "The worker that combined, and what was expected of it."},
    decode=_or_null(
        _object(
            "The engine that wrote the reply, where that may be another one than the worker that combined.",
            engine=_STRING,
            began_from={"enum": ["state", "prompt", "worker"]},
            reason=_or_null(_STRING),
        )
    ),
    cold_choice=_or_null(
        _object(
            "What `cold: auto` came to.",
            chosen=_STRING,
            reason=_STRING,
            parallel_seconds=_or_null(_NUMBER),
            live_seconds=_or_null(_NUMBER),
        )
    ),
    refresh={"anyOf": [_INTEGER, _constant("auto")]},
    ttft_budget_seconds=_or_null(_NUMBER),
)
_USAGE = _object(
    "Token counts; `cached_tokens` of the prompt were not computed for this request.",
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details=_object("Of the prompt.", cached_tokens=_INTEGER),
)
_VERSION = _object("What is served.", id=_STRING, revision=_STRING, profile=_STRING)
_WATCHED: Json = {
    "tag": _STRING,
    "mode": {"enum": ["compose", "exact"]},
    "budget_nats": _NUMBER,
    "num_samples": _INTEGER,
    "mean_divergence_nats": _NUMBER,
    "mean_agreement": _NUMBER,
    "evidence_log10": {"type": "number", "description": "Odds for the other mode."},
}
_ESTIMATE = _object(
    "A mean over prompts with its 95 % interval.", value={"type": "number"}, low={"type": "number"}, high=_NUMBER
)
_CALIBRATION = _object(
    "What is known of the loss of composed answers: of a calibration card that fits what is served, else the reason alone.",
    optional=("reason", "card", "date", "device", "prompts", "tokens", "refresh", "live_share", "loss"),
    status={"enum": ["calibrated", "uncalibrated"]},
    reason=_STRING,
    card=_STRING,
    date=_STRING,
    device=_STRING,
    prompts=_object("What was asked, of which file.", file=_STRING, digest=_STRING, asked=_INTEGER),
    tokens=_INTEGER,
    refresh=_INTEGER,
    live_share=_NUMBER,
    loss=_object(
        "Against a full recompute: nats a token over a reply's first tokens, nats of the first, share of equal beginnings.",
        kl_nats=_ESTIMATE,
        first_token_kl_nats=_ESTIMATE,
        agreement=_ESTIMATE,
    ),
)
_HEAD: Json = {"id": _STRING, "created": _INTEGER, "model": _STRING}
_LOGPROBS: Json = {
    "type": "object",
    "description": "Log probabilities of the reply's tokens, where they were asked for.",
}
_CHOICE: Json = {"index": _INTEGER, "finish_reason": _REASON, "logprobs": _or_null(_LOGPROBS)}


def _reply(description: str, kind: str, choice: Json) -> Json:
    return _object(
        description,
        optional=("hypic",),
        **_HEAD,
        object=_constant(kind),
        choices=list_of(choice),
        usage=ref("Usage"),
        hypic=ref("Explanation"),
    )


def _chunk(description: str, kind: str, choice: Json) -> Json:
    return _object(
        description,
        optional=("usage", "hypic"),
        **_HEAD,
        object=_constant(kind),
        choices=list_of(choice),
        usage=_or_null(ref("Usage")),
        hypic=ref("Explanation"),
    )


_CALL: Json = {
    "id": _STRING,
    "type": _constant("function"),
    "function": _object("What is called; `arguments` is the JSON text of an object.", name=_STRING, arguments=_STRING),
}
_MESSAGE = _object(
    "What the model said.",
    optional=("tool_calls",),
    role=_constant("assistant"),
    content=_or_null(_STRING),
    tool_calls=list_of(_object("A call of a tool.", **_CALL)),
)
_DELTA = _object(
    "What is new.",
    optional=("role", "content", "tool_calls"),
    role=_constant("assistant"),
    content=_STRING,
    tool_calls=list_of(_object("A call, whole; `index` counts the reply's calls.", index=_INTEGER, **_CALL)),
)
_STATE = _object(
    "One stored state.",
    key=_STRING,
    kind=_STRING,
    tokens=_INTEGER,
    bytes=_INTEGER,
    holders=list_of(_object("Who holds it.", worker=_STRING, tier=_STRING)),
)
_DOCUMENT: Json = {
    "id": _STRING,
    "object": _constant("document"),
    "registered": _BOOLEAN,
    "title": _or_null(_STRING),
    "tags": list_of(_STRING),
    "version": _or_null(_INTEGER),
    "digest": _or_null(_STRING),
    "tokens": _or_null(_INTEGER),
    "pinned": _BOOLEAN,
    "bytes": _INTEGER,
    "states": list_of(ref("StateInfo")),
}
_REMOVAL: Json = {
    "documents": _INTEGER,
    "entries": _INTEGER,
    "bytes": _INTEGER,
    "copies": list_of(
        _object(
            "What went from one tier.", worker=_STRING, tier=_STRING, entries=_INTEGER, bytes=_INTEGER, dropped=_BOOLEAN
        )
    ),
}

REPLIES: dict[str, Json] = {
    "Error": _object(
        "OpenAI's envelope.",
        error=_object(
            "What went wrong; `param` is the path of the field, `code` the machine-readable kind.",
            message=_STRING,
            type=_STRING,
            param=_or_null(_STRING),
            code=_or_null(_STRING),
        ),
    ),
    "Usage": _USAGE,
    "AnthropicError": _object(
        "Anthropic's envelope; the field's path stands in the message.",
        type=_constant("error"),
        error=_object("What went wrong.", type=_STRING, message=_STRING),
        request_id=_STRING,
    ),
    "MessageReply": _object(
        "A whole reply of `/v1/messages`.",
        optional=("hypic",),
        id=_STRING,
        type=_constant("message"),
        role=_constant("assistant"),
        model=_STRING,
        content=list_of({"anyOf": [ref("TextBlock"), ref("ToolUseBlock")]}),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
        stop_sequence=_or_null(_STRING),
        usage=_object(
            "Token counts. The prompt's are computed, captured for this and later requests, and reused.",
            input_tokens=_INTEGER,
            cache_creation_input_tokens=_INTEGER,
            cache_read_input_tokens=_INTEGER,
            output_tokens=_INTEGER,
        ),
        hypic=ref("Explanation"),
    ),
    "TextBlock": _object("Words of the model.", type=_constant("text"), text=_STRING),
    "MessageEvent": _object(
        "An event of a streamed reply, in Anthropic's order; usage is complete in `message_delta`.", type=_STRING
    ),
    "TokenCount": _object("Tokens of the prompt.", input_tokens=_INTEGER),
    "PartExplanation": _PART,
    "Explanation": _EXPLANATION,
    "ChatReply": _reply(
        "A whole reply of `/v1/chat/completions`.",
        "chat.completion",
        _object("The reply.", **_CHOICE, message=_MESSAGE),
    ),
    "ChatChunk": _chunk(
        "An event of a streamed reply; the last one is the word `[DONE]`.",
        "chat.completion.chunk",
        _object("A piece of the reply.", **_CHOICE, delta=_DELTA),
    ),
    "CompletionReply": _reply(
        "A whole reply of `/v1/completions`.", "text_completion", _object("The reply.", **_CHOICE, text=_STRING)
    ),
    "CompletionChunk": _chunk(
        "An event of a streamed reply; the last one is the word `[DONE]`.",
        "text_completion",
        _object("A piece of the reply.", **_CHOICE, text=_STRING),
    ),
    "ModelList": _object(
        "The served model.",
        object=_constant("list"),
        data=list_of(
            _object(
                "A model; `max_model_len` is its context length in tokens.",
                id=_STRING,
                object=_constant("model"),
                created=_INTEGER,
                owned_by=_STRING,
                max_model_len=_INTEGER,
                revision=_STRING,
                calibration=ref("Calibration"),
            )
        ),
    ),
    "Calibration": _CALIBRATION,
    "Health": _object(
        "The state of this process.", optional=("reason", "model"), status=_STRING, reason=_STRING, model=_STRING
    ),
    "StateInfo": _STATE,
    "DocumentInfo": _object("A document, and the states that hold it.", **_DOCUMENT),
    "RegisteredDocument": _object(
        "A document as it was registered.",
        **_DOCUMENT,
        outcome=_STRING,
        status={"enum": ["stored", "not_stored", "too_short"]},
        reason=_or_null(_STRING),
        removed=_object("What fell because the text is new.", **_REMOVAL),
    ),
    "DocumentList": _object(
        "A page of documents.",
        object=_constant("list"),
        data=list_of(ref("DocumentInfo")),
        last_id=_or_null(_STRING),
        has_more=_BOOLEAN,
    ),
    "DeletedDocument": _object(
        "What was deleted, and from where.",
        id=_STRING,
        object=_constant("document.deleted"),
        deleted=_constant(True),
        **_REMOVAL,
    ),
    "Invalidation": _object(
        "What became unreachable, and from where.",
        optional=("tag", "tenant", "model"),
        object=_constant("invalidation"),
        tag=_STRING,
        tenant=_STRING,
        model=_STRING,
        **_REMOVAL,
    ),
    "Pin": _object(
        "What is pinned now.",
        object=_constant("pin"),
        tenant=_STRING,
        document=_or_null(_STRING),
        entries=_INTEGER,
        promised_bytes=_INTEGER,
        limit_bytes=_INTEGER,
        pinned=_BOOLEAN,
    ),
    "Quality": _object(
        "What the guard knows since the router's start. `samples` by what became of them; events newest first.",
        object=_constant("quality"),
        share=_NUMBER,
        model=_VERSION,
        samples={"type": "object", "additionalProperties": _INTEGER},
        tags=list_of(_object("A tag, and how its requests are answered.", **_WATCHED)),
        events=list_of(
            _object("A change; `at` is a Unix time.", **_WATCHED, at=_NUMBER, model=_VERSION, cause=_STRING)
        ),
    ),
    "EvictionList": _object(
        "Whose states made room for whose, most first.",
        object=_constant("list"),
        data=list_of(
            _object(
                "`bytes` of all copies; tenants by name, or by a digest where the name is not known.",
                object=_constant("eviction"),
                evictor=_STRING,
                victim=_STRING,
                entries=_INTEGER,
                bytes=_INTEGER,
                tokens=_INTEGER,
            )
        ),
    ),
}
