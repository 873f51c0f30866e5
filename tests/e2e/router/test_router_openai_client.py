import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import CONTEXT_LENGTH, MODEL_NAME

DOCUMENT = "The river city has a long history of trade, bridges and floods. " * 4
MESSAGES: Any = [
    {"role": "system", "content": "Answer from the documents, in one short sentence."},
    {"role": "user", "content": "What is the answer?"},
]


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


@pytest.fixture
def client(stack: RouterStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL_NAME
    assert model.model_dump()["max_model_len"] == CONTEXT_LENGTH


def test_chat(client: openai.OpenAI, stack: RouterStack) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
    assert reply.choices[0].message.content == stack.worker.reply
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_completion_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_stream_with_usage_and_explanation(client: openai.OpenAI, stack: RouterStack) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"documents": [DOCUMENT], "hypic": {"explain": True}, "cache_salt": "stream"},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == stack.worker.reply
    assert "�" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1
    explanation: Any = chunks[-1].model_extra
    parts = explanation["hypic"]["parts"]
    assert sum(part["tokens"] for part in parts) == chunks[-1].usage.prompt_tokens


def test_stream_without_usage_puts_the_explanation_last(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, stream=True, extra_body={"hypic": {"explain": True}}
        )
    )
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert "hypic" in (chunks[-1].model_extra or {})


def test_stop_strings_never_leak(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True, stop=["42, n"]))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "The answer is "
    assert chunks[-1].choices[0].finish_reason == "stop"
    reply = client.completions.create(model=MODEL_NAME, prompt="x", stop="swer", max_tokens=50)
    assert reply.choices[0].text == "The an"


def test_completions(client: openai.OpenAI, stack: RouterStack) -> None:
    reply = client.completions.create(model=MODEL_NAME, prompt="Say it.", max_tokens=100)
    assert reply.choices[0].text == stack.worker.reply
    chunks = list(client.completions.create(model=MODEL_NAME, prompt=["Say it."], max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stack.worker.reply


def test_errors_reach_the_client_as_its_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, n=17)
    assert refused.value.param == "n"


async def test_async_client_and_many_at_once(stack: RouterStack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert set(await asyncio.gather(*(ask() for _ in range(8)))) == {stack.worker.reply}


def test_request_ids(stack: RouterStack) -> None:
    def send(request_id: str) -> httpx2.Response:
        return stack.http.get("/health/live", headers={"x-request-id": request_id})

    assert send("abc-123").headers["x-request-id"] == "abc-123"
    assert send("x" * 129).headers["x-request-id"] != "x" * 129
    assert len(send("has space").headers["x-request-id"]) == 32


def test_metrics_agree_with_usage(stack: RouterStack, client: openai.OpenAI) -> None:
    def total(name: str) -> float:
        lines = stack.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    names = ("hypic_prompt_tokens_total", "hypic_generation_tokens_total", "hypic_time_to_first_token_seconds_count")
    before = [total(name) for name in names]
    usage = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES).usage
    assert usage is not None
    after = [total(name) for name in names]
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert grown == [usage.prompt_tokens, usage.completion_tokens, 1]
    wait_until(lambda: total("hypic_num_requests_running") == 0)
