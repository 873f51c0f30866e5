"""Sampling parameters where tokens matter: the served model against transformers, and each parameter's effect."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.stack.served import ServedStack

MESSAGES: Any = [{"role": "user", "content": "When does the museum open?"}]
PROMPT = "The museum in the old harbour opens"


@pytest.fixture
def client(stack: ServedStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@torch.inference_mode()
def test_log_probabilities_are_transformers(
    client: openai.OpenAI, stack: ServedStack, checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """The log-softmax of the raw logits, in fp32 on both sides."""
    from transformers import AutoModelForCausalLM

    asked: Any = {"model": stack.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 5, "logprobs": 5}
    told = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert told is not None
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    for own, top in zip(told.token_logprobs or [], told.top_logprobs or [], strict=True):
        logprobs = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = logprobs.topk(5)
        assert own == pytest.approx(float(best.values[0]), abs=2e-3)
        assert sorted(top.values(), reverse=True) == pytest.approx(best.values.tolist(), abs=2e-3)
        ids.append(int(best.indices[0]))
    assert len(told.tokens or []) == 5
    drawn = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    assert "".join(told.tokens or []) == tokenizer.decode(ids[len(drawn) :], skip_special_tokens=False)


def test_choices_are_seeded_apart_and_again_the_same(client: openai.OpenAI, stack: ServedStack) -> None:
    asked: Any = {"model": stack.model, "prompt": ["The", "A boat"], "temperature": 2.0, "max_tokens": 12}
    asked |= {"extra_body": {"ignore_eos": True}}
    several = client.completions.create(**asked, n=3, seed=40).choices
    texts = [choice.text for choice in several]
    assert len(set(texts)) == 6
    alone = [client.completions.create(**asked, seed=40 + index).choices for index in range(3)]
    assert texts == [choices[prompt].text for prompt in range(2) for choices in alone]


def test_stop_tokens_end_or_are_ignored_or_held_off(
    client: openai.OpenAI, stack: ServedStack, tokenizer: Tokenizer
) -> None:
    def ask(**extra: object) -> Any:  # noqa: ANN401 # the client's own kinds
        reply = client.completions.create(
            model=stack.model, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=0, extra_body=extra
        )
        assert reply.usage is not None
        return reply.choices[0], reply.usage.completion_tokens

    end = tokenizer.token_to_id("<|im_end|>")
    bias = {str(end): 100.0}
    ended, _ = ask(logit_bias=bias)
    assert (ended.text, ended.finish_reason) == ("", "stop")
    ignored, count = ask(logit_bias=bias, ignore_eos=True)
    assert (ignored.finish_reason, count) == ("length", 8)
    assert ignored.logprobs.tokens == ["<|im_end|>"] * 8
    held, count = ask(logit_bias=bias, min_tokens=3)
    assert (held.finish_reason, len(held.logprobs.tokens)) == ("stop", 3)
    plain, _ = ask(ignore_eos=True)
    other = tokenizer.encode(plain.logprobs.tokens[2], add_special_tokens=False).ids
    assert len(other) == 1
    cut, _ = ask(ignore_eos=True, stop_token_ids=other)
    assert cut.finish_reason == "stop"
    assert cut.logprobs.tokens == plain.logprobs.tokens[: plain.logprobs.tokens.index(plain.logprobs.tokens[2])]


def test_penalties_and_biases_change_the_reply(client: openai.OpenAI, stack: ServedStack, tokenizer: Tokenizer) -> None:
    """A strong bias repeats one token, and each penalty drives it away."""
    asked: Any = {"model": stack.model, "prompt": "A boat", "temperature": 0, "max_tokens": 8, "logprobs": 0}
    (word,) = tokenizer.encode(" the", add_special_tokens=False).ids

    def count(**extra: object) -> int:
        reply = client.completions.create(**asked, extra_body={"ignore_eos": True, **extra})
        assert reply.choices[0].logprobs is not None
        return (reply.choices[0].logprobs.tokens or []).count(" the")

    assert count(logit_bias={str(word): 100}) == 8
    assert count(logit_bias={str(word): -100}) == 0
    assert count(logit_bias={str(word): 100}, repetition_penalty=100) == 1


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "museum": {"type": "string", "maxLength": 8},
        "opens": {"type": "integer", "minimum": 0, "maximum": 23},
        "days": {"type": "array", "items": {"enum": ["Mon", "Tue"]}, "maxItems": 2},
    },
    "required": ["museum", "opens", "days"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("temperature", "strict"), [(0.0, True), (1.5, False)])
def test_replies_keep_to_a_json_schema(
    client: openai.OpenAI, stack: ServedStack, temperature: float, strict: bool
) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "opening", "schema": SCHEMA, "strict": strict}}
    reply = client.chat.completions.create(
        model=stack.model, messages=MESSAGES, response_format=form, temperature=temperature, seed=3, n=2, max_tokens=400
    )
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        jsonschema_rs.validator_for(SCHEMA).validate(json.loads(choice.message.content or ""))


def test_other_grammars_and_a_neighbour_that_has_none(client: openai.OpenAI, stack: ServedStack) -> None:
    def ask(extra: dict[str, object]) -> str:
        reply = client.chat.completions.create(
            model=stack.model, messages=MESSAGES, temperature=0, max_tokens=40, extra_body=extra
        )
        return reply.choices[0].message.content or ""

    plain = ask({})
    fields: list[dict[str, object]] = [
        {"guided_regex": "[0-9]{2}:[0-9]{2}"},
        {"structured_outputs": {"choice": ["in the morning", "at noon"]}},
        {"guided_grammar": 'root ::= "at " [0-9] " pm"'},
        {},
    ]
    with ThreadPoolExecutor() as pool:
        matched, chosen, spoken, beside = pool.map(ask, fields)
    assert re.fullmatch("[0-9]{2}:[0-9]{2}", matched)
    assert chosen in ("in the morning", "at noon")
    assert re.fullmatch("at [0-9] pm", spoken)
    assert beside == plain


def test_a_schema_that_cannot_be_honoured_names_its_field(client: openai.OpenAI, stack: ServedStack) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(model=stack.model, messages=MESSAGES, response_format=form)
    assert (refused.value.param, refused.value.code) == ("response_format.json_schema.schema", "invalid_grammar")
