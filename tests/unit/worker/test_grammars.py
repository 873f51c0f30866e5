"""Replies that are held to grammars, drawn from random logits: whatever the model would say, they keep to them."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypic.v1 import worker_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tokenizers import Tokenizer

from services.common.errors import InvalidRequestError
from services.worker.adapters import grammars
from services.worker.adapters.grammars import GrammarCompiler
from services.worker.engine.grammar import TokenGrammar
from services.worker.engine.requests import FailedEvent, GenerateRequest
from services.worker.engine.sampling import Sampler, SamplingOptions, find_likeliest
from tests.unit.worker.engine_rig import EngineRig, Heard, live

pytest.importorskip("llguidance", reason="llguidance is not installed")

TOKENIZER_JSON = (Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json").read_bytes()
TOKENIZER = Tokenizer.from_buffer(TOKENIZER_JSON)
# More than the tokenizer has: a model's embeddings are often padded.
VOCABULARY = TOKENIZER.get_vocab_size() + 50
END = TOKENIZER.encode("<|im_end|>", add_special_tokens=False).ids[0]
BLANKS = [
    token for token in range(TOKENIZER.get_vocab_size()) if not TOKENIZER.decode([token]).strip() and token != END
]
COMPILER = GrammarCompiler(TOKENIZER_JSON, VOCABULARY, [END, 10**6])


def compile_grammar(compiler: GrammarCompiler = COMPILER, **form: str) -> TokenGrammar:
    request = worker_pb2.GenerateRequest(grammar=worker_pb2.Grammar(**form))
    grammar = asyncio.run(compiler.compile(request))
    assert grammar is not None
    return grammar


async def _try_nothing(_kind: str, _text: str) -> str:
    return ""


def speak(grammar: TokenGrammar, seed: int, temperature: float = 1.0, most: int = 1000) -> str:
    """A whole reply: logits are random, and those of blanks low, so that it comes to an end."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(SamplingOptions(most, temperature, seed=seed), grammar=grammar)
    drawn: list[int] = []
    while len(drawn) < most:
        logits = torch.randn(VOCABULARY, generator=generator) * 4
        logits[BLANKS] -= 100
        token = sampler.draw(logits, find_likeliest(logits[None])[0])
        if token == END:
            return str(TOKENIZER.decode(drawn, skip_special_tokens=False))
        drawn.append(token)
    raise AssertionError(f"no end after {most} tokens: {TOKENIZER.decode(drawn)!r}")


names = st.sampled_from(["name", "größe", "a b", 'q"uote', "n"])
leaves: SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 3).map(lambda least: {"type": "string", "minLength": least, "maxLength": least + 4}),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 120}),
    st.lists(st.one_of(st.text(max_size=5), st.integers(), st.none()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": "string", "pattern": "^[a-f]{2,4}-[0-9]$"}),
    st.just({"type": "string", "format": "date"}),
)


def nest(inner: SearchStrategy[dict[str, Any]]) -> SearchStrategy[dict[str, Any]]:
    def close(properties: dict[str, Any]) -> dict[str, Any]:
        required = sorted(properties)[::2]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.dictionaries(names, inner, min_size=1, max_size=3).map(close),
        inner.map(lambda items: {"type": "array", "items": items, "maxItems": 3}),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
    )


@settings(max_examples=60, deadline=None)
@given(
    schema=st.recursive(leaves, nest, max_leaves=4),
    seed=st.integers(0, 2**30),
    temperature=st.sampled_from([0.0, 1.0, 5.0]),
)
def test_replies_keep_to_any_schema(schema: dict[str, Any], seed: int, temperature: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # A process for each schema would take most of the time, and says nothing about the replies.
        patch.setattr(grammars, "_try", _try_nothing)
        said = speak(compile_grammar(json_schema=json.dumps(schema)), seed, temperature)
    jsonschema_rs.validator_for(schema).validate(json.loads(said))


@pytest.mark.parametrize("seed", range(3))
def test_expressions_choices_and_grammars(seed: int) -> None:
    assert re.fullmatch("(ab|c){2,3}[0-9]?", speak(compile_grammar(regex="(ab|c){2,3}[0-9]?"), seed))
    words = ["yes", "no, never", 'a "quoted" one\n']
    assert speak(compile_grammar(choices=json.dumps(words)), seed) in words
    lark = compile_grammar(grammar='start: "(" inner ")"\ninner: "x" | "[" /[a-c]{1,2}/ "]"')
    assert re.fullmatch(r"\((x|\[[a-c]{1,2}\])\)", speak(lark, seed))
    gbnf = compile_grammar(grammar='root ::= "left" | "right" [0-9]')
    assert re.fullmatch("left|right[0-9]", speak(gbnf, seed))


def test_one_grammar_is_followed_by_several_replies_apart() -> None:
    first, second = (compile_grammar(regex="abc|xyz") for _ in range(2))
    with_a = TOKENIZER.encode("a", add_special_tokens=False).ids[0]
    untouched = second.allowed().clone()
    assert torch.equal(first.allowed(), untouched)
    first.accept(with_a)
    assert not torch.equal(first.allowed(), untouched)
    assert torch.equal(second.allowed(), untouched)


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        ({"json_schema": '{"type": "objekt"}'}, "objekt"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"not": {"type": "string"}}'}, "not"),
        ({"json_schema": '{"$ref": "http://nowhere.invalid/x"}'}, "nowhere.invalid"),
        ({"json_schema": '{"type": "array", "minItems": 3, "maxItems": 2}'}, "minItems"),
        ({"json_schema": "no json"}, "grammar: "),
        ({"regex": "[a-z"}, "unclosed"),
        ({"regex": "(?=x)y"}, "look-ahead"),
        ({"grammar": 'start: "a" | foo'}, "foo"),
        ({"choices": "[1]"}, "grammar: "),
        ({"regex": "a" * (1 + (1 << 17))}, "at most"),
        ({}, "no form"),
    ],
)
def test_what_cannot_be_honoured_is_refused(form: dict[str, str], fault: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^grammar: ") as refused:
        compile_grammar(COMPILER, **form)
    assert fault in str(refused.value)


def test_no_library_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="extra `grammars`"):
        compile_grammar(GrammarCompiler(TOKENIZER_JSON, VOCABULARY, [END]), regex="a")


def test_a_model_without_stop_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no stop token"):
        compile_grammar(GrammarCompiler(TOKENIZER_JSON, VOCABULARY, []), regex="a")


@pytest.mark.parametrize(
    "form",
    [
        # Each takes minutes or gigabytes.
        {"json_schema": '{"type": "integer", "multipleOf": 100000007}'},
        {
            "json_schema": json.dumps(
                {"allOf": [{"type": "string", "pattern": f"a{{{count}}}.*b.{{{count}}}c"} for count in range(1, 40)]}
            )
        },
    ],
)
def test_what_takes_too_much_is_refused(form: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_TRIAL_CPU_SECONDS", 1)
    with pytest.raises(InvalidRequestError, match="too long or too much memory"):
        compile_grammar(COMPILER, **form)


def test_what_grows_too_complex_is_refused_ahead() -> None:
    properties = {f"k{index}": {"type": "string"} for index in range(700)}
    with pytest.raises(InvalidRequestError, match="items"):
        compile_grammar(json_schema=json.dumps({"type": "object", "properties": properties}))


class _Fixed(TokenGrammar):
    """Allows one token after the other, then fails."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = tokens

    def allowed(self) -> torch.Tensor:
        if not self._left:
            raise ValueError("the grammar cannot be followed: it is over")
        mask = torch.zeros(211, dtype=torch.bool)
        mask[self._left[0]] = True
        return mask

    def accept(self, token: int) -> None:
        assert token == self._left.pop(0)


def test_a_grammar_that_fails_fails_its_own_request(rig: EngineRig) -> None:
    alone, beside, held = Heard(), Heard(), Heard()
    options = SamplingOptions(6)
    rig.engine.submit(GenerateRequest("alone", (live(9, 1),), options, alone.events.append))
    rig.run()
    rig.engine.submit(GenerateRequest("beside", (live(9, 1),), options, beside.events.append))
    grammar = _Fixed([7, 9])
    rig.engine.submit(GenerateRequest("held", (live(9, 1),), options, held.events.append, grammar=grammar))
    rig.run()
    assert held.tokens == [7, 9]
    assert isinstance(held.events[-1], FailedEvent)
    assert beside.tokens == alone.tokens
    rig.assert_nothing_held()
