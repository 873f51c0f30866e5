"""What a client wants its reply held to, from the parameters of OpenAI and vLLM that say so."""

import json
from collections.abc import Iterator
from typing import Any

from services.router.adapters.fields import read
from services.router.adapters.schema import JsonSchemaFormat, ResponseFormat, SharedBody, StructuredOutputs
from services.router.domain.request import Grammar, GrammarKind, PromptError

__all__ = ["read_grammar"]

_MAX_SOURCE_CHARACTERS = 1 << 16
_ANY_OBJECT = '{"type":"object"}'
_GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}


def read_grammar(body: SharedBody, forced: Grammar | None) -> Grammar | None:
    """The one grammar that is asked for, if any, `forced` by a choice of tools among them. Whether it can be honoured is the
    worker's to say.

    Raises:
        PromptError: it is malformed or too large, there are several, or the reply could not end with it.
    """
    own = [] if forced is None else [forced]
    found = [
        *own,
        *_of_response_format(body.response_format),
        *_of_guided(body),
        *_of_structured(body.structured_outputs),
    ]
    if not found:
        return None
    grammar, *others = found
    if others:
        raise PromptError(f"{others[0].param}: the reply is held to {grammar.param} already", param=others[0].param)
    if len(grammar.source) > _MAX_SOURCE_CHARACTERS:
        limit = f"must have at most {_MAX_SOURCE_CHARACTERS} characters; make it smaller"
        raise PromptError(f"{grammar.param}: {limit}", param=grammar.param)
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            message = f"{name}: a reply that is held to {grammar.param} ends when that is complete; leave {name} out"
            raise PromptError(message, param=name)
    return grammar


def _of_response_format(value: object) -> Iterator[Grammar]:
    if value is None:
        return
    asked = read(ResponseFormat, value, "response_format")
    if asked.type == "json_object":
        yield Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, "response_format")
    elif asked.type == "json_schema":
        path = "response_format.json_schema"
        schema = read(JsonSchemaFormat, asked.json_schema, path).schema_
        yield Grammar(GrammarKind.JSON_SCHEMA, _dump(schema, f"{path}.schema"), f"{path}.schema")


def _of_guided(body: SharedBody) -> Iterator[Grammar]:
    for name, param in _GUIDED.items():
        value = getattr(body, param)
        if value is not None:
            yield from _of_outputs({name: value}, "", {name: param})


def _of_structured(value: object) -> Iterator[Grammar]:
    if value is not None:
        yield from _of_outputs(value, "structured_outputs", {})


def _of_outputs(value: object, path: str, params: dict[str, str]) -> Iterator[Grammar]:
    """params: what fields are called by the client where not by their path."""
    try:
        asked = read(StructuredOutputs, value, path)
    except PromptError as error:
        (param,) = params.values() or [error.param]
        raise PromptError(str(error), param=param, code=error.code) from error

    def name(field: str) -> str:
        return params.get(field, f"{path}.{field}")

    if asked.json_ is not None:
        yield Grammar(GrammarKind.JSON_SCHEMA, _schema_source(asked.json_, name("json")), name("json"))
    if asked.json_object:
        yield Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT, name("json_object"))
    if asked.regex is not None:
        yield Grammar(GrammarKind.REGEX, asked.regex, name("regex"))
    if asked.choice is not None:
        yield Grammar(GrammarKind.CHOICES, json.dumps(asked.choice), name("choice"))
    if asked.grammar is not None:
        yield Grammar(GrammarKind.GRAMMAR, asked.grammar, name("grammar"))


def _schema_source(value: dict[str, Any] | str, param: str) -> str:
    """A schema as its text, which a client may send itself."""
    if isinstance(value, dict):
        return _dump(value, param)
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{param}: is no JSON: {error}", param=param) from error
    return _dump(schema, param)


def _dump(schema: object, param: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{param}: cannot be written as JSON: {error}", param=param) from error
