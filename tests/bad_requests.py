"""Requests that must be refused: each with the field that the error has to name. For any router, stubbed or real."""

from dataclasses import dataclass
from typing import Any

__all__ = ["BadRequest", "bad_requests"]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class BadRequest:
    """`body` is sent as it is when it is bytes, as JSON otherwise; `field` stands in `param` or the message."""

    name: str
    body: object
    field: str
    path: str = CHAT
    status: int = 400
    method: str = "POST"


def bad_requests(model: str, context_length: int) -> list[BadRequest]:
    """About ninety kinds, for a server of this model."""
    return [
        *_bad_bodies(),
        *_bad_chats(model, context_length),
        *_bad_documents(model),
        *_bad_completions(model, context_length),
        BadRequest("unknown path", {}, "", path="/v1/nothing", status=404),
        BadRequest("wrong method", None, "", method="GET", status=405),
    ]


def _bad_bodies() -> list[BadRequest]:
    bodies: dict[str, bytes] = {
        "empty body": b"",
        "no JSON": b"hello",
        "cut JSON": b'{"model": "m", "messages": [',
        "not UTF-8": b'{"model": "\xff"}',
        "NaN": b'{"model": "m", "temperature": NaN}',
        "deep nesting": b"[" * 200_000,
        "array": b"[]",
        "string": b'"text"',
        "null": b"null",
    }
    return [BadRequest(name, body, "body") for name, body in bodies.items()]


def _bad_chats(model: str, context_length: int) -> list[BadRequest]:
    user = {"role": "user", "content": "hello"}
    image = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}
    fields: list[tuple[str, dict[str, Any]]] = [
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages[0]", {"messages": ["hello"]}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}),
        ("messages[0].tool_calls", {"messages": [user | {"tool_calls": [_call("{}")]}]}),
        ("messages[0].tool_calls[0].function", {"messages": [_calls({"id": "1", "type": "function"})]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [_calls(_call("[1]"))]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [_calls(_call('{"a": '))]}),
        ("messages[0].tool_calls[0].function.arguments", {"messages": [_calls(_call('{"a": "\\ud800"}'))]}),
        ("messages[0].role", {"messages": [{"role": "<|im_start|>", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": []}]}),
        ("messages[0].content[0]", {"messages": [{"role": "user", "content": ["x"]}]}),
        ("messages[1].content[0].type", {"messages": [user, {"role": "user", "content": [image]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}),
        ("model", {"model": None}),
        ("model", {"model": 3}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": -5}),
        ("max_tokens", {"max_tokens": "10"}),
        ("max_tokens", {"max_tokens": 1.5}),
        ("max_tokens", {"max_tokens": True}),
        ("max_tokens", {"max_tokens": context_length}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": 2.1}),
        ("temperature", {"temperature": "hot"}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.01}),
        ("top_k", {"top_k": -2}),
        ("seed", {"seed": 2**70}),
        ("seed", {"seed": "x"}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stop", {"stop": ["a", 1]}),
        ("stop", {"stop": {"a": 1}}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("n", {"n": 0}),
        ("n", {"n": 17}),
        ("n", {"n": True}),
        # Neither the stub's chat template nor the demo model's writes tools.
        ("tools", {"tools": [_tool("f")]}),
        ("messages", {"messages": [user, _calls(_call("{}")), user]}),
        ("tools", {"tools": "f"}),
        ("tools", {"tools": [_tool(f"f{index}") for index in range(129)]}),
        ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
        ("tools[0].function.name", {"tools": [_tool("two words")]}),
        ("tools[1].function.name", {"tools": [_tool("f"), _tool("f")]}),
        ("logprobs", {"logprobs": 1}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("min_p", {"min_p": 1.5}),
        ("min_p", {"min_p": True}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("ignore_eos", {"ignore_eos": 1}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("stop_token_ids", {"stop_token_ids": [2**30]}),
        ("stop_token_ids", {"stop_token_ids": [1] * 65}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("tool_choice", {"tool_choice": ["required"]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.type", {"tool_choice": {"function": {"name": "f"}}}),
        ("tool_choice.function.name", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("parallel_tool_calls", {"parallel_tool_calls": False, "tools": [_tool("f")]}),
        ("parallel_tool_calls", {"parallel_tool_calls": 1}),
        (
            "response_format",
            {"tool_choice": "required", "tools": [_tool("f")], "response_format": {"type": "json_object"}},
        ),
        ("min_tokens", {"tool_choice": "required", "tools": [_tool("f")], "min_tokens": 2}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": "json"}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema.schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        ),
        ("response_format.json_schema.schema", _schema_format({"enum": ["x" * 70_000]})),
        ("guided_json", {"guided_json": "no json"}),
        ("guided_json", {"guided_json": 5}),
        ("guided_regex", {"guided_regex": ""}),
        ("guided_choice", {"guided_choice": []}),
        ("guided_choice", {"guided_choice": ["a", 2]}),
        ("guided_choice", {"guided_choice": ["a"], "response_format": {"type": "json_object"}}),
        ("guided_grammar", {"guided_grammar": 1}),
        ("structured_outputs.frobnicate", {"structured_outputs": {"frobnicate": 1}}),
        ("structured_outputs.choice", {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        ("ignore_eos", {"guided_regex": "a", "ignore_eos": True}),
        ("min_tokens", {"guided_regex": "a", "min_tokens": 1}),
        ("logit_bias", {"logit_bias": {"1": 101}}),
        ("logit_bias", {"logit_bias": {"one": 5}}),
        ("logit_bias", {"logit_bias": {"01": 5}}),
        ("logit_bias", {"logit_bias": {"-1": 5}}),
        ("logit_bias", {"logit_bias": {str(2**30): 5}}),
        ("logit_bias", {"logit_bias": {"9" * 40: 5}}),
        ("logit_bias", {"logit_bias": {str(token): 1 for token in range(301)}}),
        ("logit_bias", {"logit_bias": [1]}),
        ("presence_penalty", {"presence_penalty": 2.5}),
        ("frequency_penalty", {"frequency_penalty": "much"}),
        ("audio", {"audio": {"voice": "x"}}),
        ("cache_salt", {"cache_salt": ""}),
        ("cache_salt", {"cache_salt": 5}),
        ("hypic.refresh", {"hypic": {"refresh": -1}}),
        ("hypic.refresh", {"hypic": {"refresh": "all"}}),
        ("hypic.refresh", {"hypic": {"refresh": True}}),
        ("hypic.ttft_budget_seconds", {"hypic": {"refresh": "auto"}}),
        ("hypic.ttft_budget_seconds", {"hypic": {"refresh": 4, "ttft_budget_seconds": 1.0}}),
        ("hypic.ttft_budget_seconds", {"hypic": {"refresh": "auto", "ttft_budget_seconds": 0}}),
        ("hypic", {"hypic": "compose"}),
        ("hypic.reuse", {"hypic": {"reuse": "always"}}),
        ("hypic.cold", {"hypic": {"cold": "warm"}}),
        ("hypic.explain", {"hypic": {"explain": "yes"}}),
        ("hypic.speed", {"hypic": {"speed": 9}}),
        ("messages", {"messages": [{"role": "user", "content": "many words " * 20 * context_length}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}),
    ]
    base = {"model": model, "messages": [user]}
    rows = [BadRequest(f"{field} {index}", base | change, field) for index, (field, change) in enumerate(fields)]
    surrogate = b'{"model": "%s", "messages": [{"role": "user", "content": "\\ud800"}]}' % model.encode()
    return [
        *rows,
        BadRequest("unknown model", base | {"model": "no-such-model"}, "model", status=404),
        BadRequest("lone surrogate", surrogate, "messages[0].content"),
        BadRequest("lone surrogate in a name", b'{"\\uDFFF": 1}', "body"),
    ]


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def _bad_documents(model: str) -> list[BadRequest]:
    user = {"role": "user", "content": "hello"}
    lists: list[tuple[str, object]] = [
        ("documents", "text"),
        ("documents", {"text": "x"}),
        ("documents[0]", [5]),
        ("documents[0]", [None]),
        ("documents[0]", [""]),
        ("documents[1].text", ["x", {"text": ""}]),
        ("documents[0].text", [{"title": "only a title"}]),
        ("documents[0].text", [{"text": 5}]),
        ("documents[0].title", [{"text": "x", "title": 5}]),
        ("documents[0].id", [{"text": "x", "id": 5}]),
        ("documents[0].id", [{"text": "x", "id": ""}]),
        ("documents[1].id", [{"text": "x", "id": "a"}, {"text": "y", "id": "a"}]),
        ("documents[0].data", [{"data": 5}]),
        ("documents[0].data.text", [{"data": {"title": "x"}}]),
        ("documents[0].data.text", [{"data": {"text": "", "author": "x"}}]),
        ("documents[0].data.tags", [{"data": {"text": "x", "tags": ["y"]}}]),
    ]
    parts: list[tuple[str, dict[str, Any]]] = [
        ("content[0].text", {}),
        ("content[0].text", {"text": ""}),
        ("content[0].document", {"document": 5}),
        ("content[0].document.text", {"document": {"title": "x"}}),
        ("content[0].source.type", {"source": {"type": "base64", "data": "eA=="}}),
        ("content[0].source.data", {"source": {"type": "text", "data": ""}}),
    ]
    conflict = [{"type": "document", "id": "a", "text": text} for text in ("one", "two")]
    no_user = {"model": model, "messages": [{"role": "system", "content": "x"}], "documents": ["text"]}
    return [
        *(
            BadRequest(f"documents {index}", {"model": model, "messages": [user], "documents": value}, field)
            for index, (field, value) in enumerate(lists)
        ),
        *(
            BadRequest(f"document part {index}", _with_content(model, [{"type": "document"} | part]), field)
            for index, (field, part) in enumerate(parts)
        ),
        BadRequest("one id, two parts", _with_content(model, conflict), "content[1].id"),
        BadRequest("documents without a user", no_user, "documents"),
    ]


def _schema_format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


def _with_content(model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}]}


def _bad_completions(model: str, context_length: int) -> list[BadRequest]:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": [1, 2, 3]}),
        ("prompt[1]", {"prompt": ["one", ""]}),
        ("prompt", {"prompt": ["one", 2]}),
        ("prompt", {"prompt": ["x"] * 33}),
        ("logprobs", {"prompt": "x", "logprobs": 6}),
        ("logprobs", {"prompt": "x", "logprobs": True}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": "many words " * 20 * context_length}),
        ("echo", {"prompt": "x", "echo": True}),
        ("suffix", {"prompt": "x", "suffix": "y"}),
        ("best_of", {"prompt": "x", "best_of": 3}),
        ("max_tokens", {"prompt": "x", "max_tokens": context_length}),
    ]
    return [
        BadRequest(f"completion {field} {index}", {"model": model} | change, field, path=COMPLETIONS)
        for index, (field, change) in enumerate(fields)
    ]
