"""What clients of this field send becomes one request."""

from typing import Any

import pytest

from services.router.adapters.parse import RequestParser
from services.router.domain.request import (
    ChatPrompt,
    Cold,
    Document,
    Grammar,
    GrammarKind,
    Namespace,
    PromptError,
    Refresh,
    Reuse,
    Role,
    Sampling,
    Text,
    TextPrompt,
)
from services.router.domain.tenancy import Caller, Scope

PARSER = RequestParser("")
CALLER = Caller("tenant", frozenset({Scope.GENERATE}))
WHOLE = Document("the text", "Title", "a")
BASE = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("the text", Document("the text")),
        ({"text": "the text"}, Document("the text")),
        ({"title": "Title", "text": "the text"}, Document("the text", "Title")),
        ({"id": "a", "title": "Title", "text": "the text"}, WHOLE),
        ({"id": "a", "data": {"title": "Title", "text": "the text"}}, WHOLE),
        ({"id": "a", "data": {"title": "Title", "snippet": "the text"}}, WHOLE),
        ({"id": "a", "data": "the text"}, Document("the text", document_id="a")),
        (
            {"id": "a", "data": {"author": "Ann", "title": "Title", "year": 1903, "snippet": "the text", "new": True}},
            Document("author: Ann\nyear: 1903\nnew: true\nthe text", "Title", "a"),
        ),
        ({"data": {"name": "Plepi", "founded": "1903"}}, Document("name: Plepi\nfounded: 1903")),
        ({"text": "the text", "title": None, "id": None, "score": 0.5}, Document("the text")),
        ({"text": " \n"}, Document(" \n")),
    ],
)
def test_documents(sent: object, read: Document) -> None:
    prompt = PARSER.parse_chat(BASE | {"documents": [sent]}, CALLER).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.documents == (read,)


@pytest.mark.parametrize(
    "part",
    [
        {"id": "a", "title": "Title", "text": "the text"},
        {"document": {"id": "a", "title": "Title", "text": "the text"}},
        {"document": {"id": "a", "data": {"title": "Title", "text": "the text"}}},
        {"document": "the text", "title": "Title", "id": "a"},
        {"id": "a", "title": "Title", "source": {"type": "text", "media_type": "text/plain", "data": "the text"}},
    ],
)
def test_document_parts_stand_where_they_were_put(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "one"}, {"type": "document"} | part, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]
    prompt = PARSER.parse_chat({"model": "m", "messages": messages}, CALLER).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].role is Role.SYSTEM
    assert prompt.messages[1].content == (Text("one"), WHOLE, Text("two"))


def test_marked_text_and_one_id_for_equal_documents() -> None:
    marked = [{"type": "text", "text": "memory", "hypic": {"segment": True}}]
    documents = [{"id": "a", "text": "x"}, {"id": "a", "text": "x"}]
    body = {"model": "m", "messages": [{"role": "user", "content": marked}], "documents": documents}
    prompt = PARSER.parse_chat(body, CALLER).request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == (Text("memory", is_segment=True),)
    assert len(prompt.documents) == 2


def test_options_and_their_defaults() -> None:
    plain = PARSER.parse_chat(BASE, CALLER).request
    assert plain.sampling == Sampling(1.0, 1.0, 0, None, None)
    assert (plain.options.reuse, plain.options.cold, plain.options.explain) == (Reuse.COMPOSE, None, False)
    assert plain.namespace == Namespace("tenant", "")
    full = BASE | {
        "temperature": 0, "top_p": 0.5, "top_k": -1, "seed": -1, "max_tokens": 5, "max_completion_tokens": 7,
        "stop": ["a", "b"], "cache_salt": "s", "n": 1, "logprobs": False, "tools": [], "presence_penalty": 0.0,
        "hypic": {"reuse": "exact", "cold": "live", "explain": True}, "stream": True, "response_format": {"type": "text"},
    }  # fmt: skip
    parsed = PARSER.parse_chat(full, CALLER)
    assert parsed.request.sampling == Sampling(0.0, 0.5, 0, 2**64 - 1, 7)
    assert parsed.request.stop == ("a", "b")
    assert (parsed.request.num_choices, parsed.request.num_replies) == (1, 1)
    assert parsed.request.namespace.salt == "s"
    assert (parsed.request.options.reuse, parsed.request.options.cold) == (Reuse.EXACT, Cold.LIVE)
    assert parsed.is_stream
    assert parsed.ignored_fields == ()


def test_refresh_and_its_budget() -> None:
    asked = [{"refresh": 4}, {"refresh": "auto", "ttft_budget_seconds": 0.5}, {}]
    options = [PARSER.parse_chat(BASE | {"hypic": each}, CALLER).request.options for each in asked]
    assert [each.refresh for each in options] == [Refresh(4), Refresh(None), None]
    assert [each.ttft_budget_seconds for each in options] == [None, 0.5, None]


def test_the_separator_of_completions() -> None:
    body = {"model": "m", "prompt": "one<sep>two<sep>three"}
    off = PARSER.parse_completion(body, CALLER).request
    assert off.prompt == TextPrompt(("one<sep>two<sep>three",))
    assert off.sampling.max_tokens == 16
    cut = RequestParser("<sep>").parse_completion(body, CALLER).request
    assert cut.prompt == TextPrompt(("one", "two", "three"))


def test_sampling_parameters() -> None:
    asked = BASE | {
        "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -2.0, "repetition_penalty": 1.2, "min_tokens": 3,
        "logit_bias": {"7": 100, "0": -1.5}, "ignore_eos": True, "stop_token_ids": [4, 9], "n": 3,
    }  # fmt: skip
    request = PARSER.parse_chat(asked, CALLER).request
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 1.0, -2.0)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 3)
    assert sampling.logit_bias == ((7, 100.0), (0, -1.5))
    assert sampling.all_stop_token_ids((1, 4)) == (4, 9)
    assert request.num_choices == 3
    assert Sampling(stop_token_ids=(4, 9)).all_stop_token_ids((1, 4)) == (1, 4, 9)


def test_how_many_alternatives_are_told() -> None:
    def of_chat(**asked: object) -> int | None:
        return PARSER.parse_chat(BASE | asked, CALLER).request.sampling.logprobs

    assert (of_chat(), of_chat(logprobs=False), of_chat(logprobs=True)) == (None, None, 0)
    assert of_chat(logprobs=True, top_logprobs=20) == 20
    completion = {"model": "m", "prompt": "x", "logprobs": 5}
    assert PARSER.parse_completion(completion, CALLER).request.sampling.logprobs == 5


def test_several_prompts() -> None:
    body = {"model": "m", "prompt": ["one", "two<sep>three"], "n": 2}
    request = RequestParser("<sep>").parse_completion(body, CALLER).request
    assert (request.prompt, request.further_prompts) == (TextPrompt(("one",)), (TextPrompt(("two", "three")),))
    assert request.num_replies == 4


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"const": 1}', "response_format.json_schema.schema"),
        ),
        ({"guided_json": {"const": 1}}, Grammar(GrammarKind.JSON_SCHEMA, '{"const": 1}', "guided_json")),
        (
            {"structured_outputs": {"json": '{"const":1}'}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"const": 1}', "structured_outputs.json"),
        ),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Grammar(GrammarKind.CHOICES, '["a", "b"]', "guided_choice")),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Grammar(GrammarKind.GRAMMAR, 'start: "a"', "structured_outputs.grammar"),
        ),
    ],
)
def test_what_holds_a_reply(asked: dict[str, Any], grammar: Grammar | None) -> None:
    assert PARSER.parse_chat(BASE | asked, CALLER).request.sampling.grammar == grammar


SAMPLING_FIELDS = (
    "n min_p presence_penalty frequency_penalty repetition_penalty logit_bias min_tokens ignore_eos stop_token_ids logprobs"
    " top_logprobs response_format structured_outputs guided_json guided_regex guided_choice guided_grammar prompt"
).split()
ODD_VALUES: list[Any] = [
    True, False, 0, -1, 1, 17, 2**31, 2**64, -(2**64), 0.5, 1e-300, 1e308, "", "x", "\x00", "\ud800", "null", "[]", "{", [],
    [None], [[]], [1, 2], ["x"], [{}], {}, {"": ""}, {"1": 1e300}, {"1": None}, {"type": "json_schema", "json_schema": []},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": "\ud800"}}, {"json": "\ud800"}, {"regex": "\ud800"}, {"choice": "x"},
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_odd_values_are_read_or_refused_in_words(name: str) -> None:
    named, num_read = set[str](), 0
    for value in ODD_VALUES:
        for parse, body in ((PARSER.parse_chat, BASE), (PARSER.parse_completion, {"model": "m", "prompt": "x"})):
            try:
                num_read += parse(body | {name: value}, CALLER).request.num_replies
            except PromptError as error:
                named.add(error.param.split(".")[0].split("[")[0])
    assert named == {name}
    assert num_read
