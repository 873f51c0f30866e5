"""Log probabilities, several choices and several prompts as the client sees them, over a worker whose tokens are known."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import MODEL_NAME

MESSAGES: Any = [{"role": "user", "content": "What is the answer?"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


@pytest.fixture
def client(stack: RouterStack) -> Iterator[openai.OpenAI]:
    stack.worker.requests.clear()
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_worker_gets_every_parameter(client: openai.OpenAI, stack: RouterStack) -> None:
    extra = {"min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [9], "top_k": 7}
    client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": 3},
        seed=4, max_tokens=5, extra_body=extra,
    )  # fmt: skip
    (request,) = stack.worker.requests
    sampling = request.sampling
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens, sampling.top_k) == (0.25, 1.5, 2, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (0.5, -0.5, 4)
    assert [(bias.token_id, bias.bias) for bias in sampling.logit_bias] == [(5, 3.0)]
    assert list(sampling.stop_token_ids) == [2, 9]
    assert not sampling.HasField("logprobs")
    client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert not stack.worker.requests[-1].sampling.stop_token_ids


def test_no_stop_string_ends_the_least_length(client: openai.OpenAI, stack: RouterStack) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "stop": "The answer"}
    assert client.chat.completions.create(**asked).choices[0].message.content == ""
    later = client.chat.completions.create(**asked, extra_body={"min_tokens": 6})
    assert later.choices[0].message.content == stack.worker.reply


def test_chat_log_probabilities_whole_and_streamed(client: openai.OpenAI, stack: RouterStack) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(each.bytes or []) for each in content).decode() == stack.worker.reply
    assert all(each.logprob == -0.5 and [one.logprob for one in each.top_logprobs] == [-0.5, -1.5] for each in content)
    assert [each.top_logprobs[0].token for each in content] == [each.token for each in content]
    assert content[0].top_logprobs[1].token == "<|endoftext|>"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [
        each for chunk in chunks for one in chunk.choices if one.logprobs for each in one.logprobs.content or []
    ]
    assert streamed == content


def test_tokens_of_a_stop_string_are_not_told(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "logprobs": True, "stop": " is 4"}
    (choice,) = client.chat.completions.create(**asked).choices
    content = (choice.logprobs and choice.logprobs.content) or []
    assert choice.message.content == "The answer"
    assert "".join(each.token for each in content) == "The answer"
    assert all(each.top_logprobs == [] for each in content)


def test_completion_log_probabilities(client: openai.OpenAI, stack: RouterStack) -> None:
    asked: Any = {"model": MODEL_NAME, "prompt": "x", "logprobs": 2, "max_tokens": 100}
    (choice,) = client.completions.create(**asked).choices
    told = choice.logprobs
    assert told is not None
    tokens, offsets, top = told.tokens or [], told.text_offset or [], told.top_logprobs or []
    assert len(tokens) == len(offsets) == len(top) == len(told.token_logprobs or [])
    for token, offset, alternatives in zip(tokens, offsets, top, strict=True):
        if token.startswith("bytes:"):
            assert not choice.text[offset].isascii()
        else:
            assert choice.text[offset : offset + len(token)] == token
        assert set(alternatives) == {token, "<|endoftext|>"}
    assert any(token.startswith("bytes:\\x") for token in tokens)
    chunks = list(client.completions.create(**asked, stream=True))
    streamed = [each for chunk in chunks for one in chunk.choices if one.logprobs for each in one.logprobs.tokens or []]
    assert streamed == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_told_apart_and_the_prompt_counts_once(
    client: openai.OpenAI, stack: RouterStack, stream: bool
) -> None:
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "n": 3, "seed": 2**64 - 1, "max_tokens": 5}
    single = client.chat.completions.create(**{**asked, "n": 1})
    assert single.usage is not None
    stack.worker.requests.clear()
    texts: dict[int, str] = {}
    if stream:
        chunks: Any = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *parts, last = list(chunks)
        for chunk in parts:
            (choice,) = chunk.choices
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        ends = {chunk.choices[0].index for chunk in parts if chunk.choices[0].finish_reason == "length"}
        usage = last.usage
    else:
        whole = client.chat.completions.create(**asked)
        texts = {choice.index: choice.message.content or "" for choice in whole.choices}
        ends = {choice.index for choice in whole.choices if choice.finish_reason == "length"}
        usage = whole.usage
    assert texts == dict.fromkeys(range(3), single.choices[0].message.content)
    assert ends == {0, 1, 2}
    assert (usage.prompt_tokens, usage.completion_tokens) == (single.usage.prompt_tokens, 15)
    assert [request.sampling.seed for request in stack.worker.requests] == [2**64 - 1, 0, 1]


def test_later_choices_find_what_the_first_has_left(client: openai.OpenAI, stack: RouterStack) -> None:
    documents = ["The river city has a long history of trade, bridges and floods. " * 4]
    client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=3, extra_body={"documents": documents, "cache_salt": "choices"}
    )
    computed = [sum(part.HasField("capture") for part in request.parts) for request in stack.worker.requests]
    assert computed == [1, 0, 0]
    wait_until(lambda: not stack.cache.leases)


def test_several_prompts_each_with_several_choices(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL_NAME, "max_tokens": 4}
    alone = [client.completions.create(**asked, prompt=prompt) for prompt in ("one", "two of them")]
    both = client.completions.create(**asked, prompt=["one", "two of them"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone if each.usage)
    assert both.usage.completion_tokens == 16


def test_a_caller_that_goes_ends_every_choice(stack: RouterStack) -> None:
    stack.worker.token_delay_seconds = 0.05
    before = stack.worker.num_cancelled
    try:
        body = {"model": MODEL_NAME, "messages": MESSAGES, "n": 4, "stream": True}
        with stack.http.stream("POST", "/v1/chat/completions", json=body):
            wait_until(lambda: stack.worker.num_running == 4)
        wait_until(lambda: stack.worker.num_running == 0 and not stack.cache.leases)
        assert stack.worker.num_cancelled == before + 4
    finally:
        stack.worker.token_delay_seconds = 0.0


def test_what_fails_one_choice_fails_the_request(stack: RouterStack) -> None:
    stack.worker.dies_after_tokens = 2
    try:
        body = {"model": MODEL_NAME, "messages": MESSAGES, "n": 3}
        response = stack.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
    finally:
        stack.worker.dies_after_tokens = -1
    wait_until(lambda: stack.worker.num_running == 0 and not stack.cache.leases)
    assert stack.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_grammar_that_the_worker_refuses_names_its_field(client: openai.OpenAI, stack: RouterStack) -> None:
    stack.worker.refuses_grammars = True
    try:
        asked = {
            "guided_regex": {"guided_regex": "a"},
            "structured_outputs.choice": {"structured_outputs": {"choice": ["a"]}},
        }
        for field, extra in asked.items():
            with pytest.raises(openai.BadRequestError, match="the stub honours none") as refused:
                client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body=extra)
            assert (refused.value.param, refused.value.code) == (field, "invalid_grammar")
    finally:
        stack.worker.refuses_grammars = False
    client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body={"guided_regex": "a"})
    assert stack.worker.requests[-1].grammar.regex == "a"
