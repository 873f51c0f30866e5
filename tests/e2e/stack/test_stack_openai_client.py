from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.stack.asking import document
from tests.e2e.stack.served import ServedStack

MESSAGES: Any = [
    {"role": "system", "content": "Answer from the documents."},
    {"role": "user", "content": "When does the museum open?"},
]
EXTRA = {"documents": [document("client a"), document("client b")], "hypic": {"explain": True}}


@pytest.fixture
def client(stack: ServedStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI, stack: ServedStack) -> None:
    (model,) = client.models.list().data
    assert model.id == stack.model
    assert model.model_dump()["max_model_len"] >= 2048


def test_whole_and_streamed_replies_agree(client: openai.OpenAI, stack: ServedStack) -> None:
    asked: Any = {"model": stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12, "extra_body": EXTRA}
    whole = client.chat.completions.create(**asked)
    chunks: Any = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    parts = chunks[-1].model_extra["hypic"]["parts"]
    assert sum(part["tokens"] for part in parts) == usage.prompt_tokens
    assert sum(part["reused_tokens"] for part in parts) == usage.prompt_tokens_details.cached_tokens > 0
    assert len({chunk.id for chunk in chunks}) == 1


async def test_async_client_streams(stack: ServedStack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
        whole = await client.chat.completions.create(**asked, extra_body=EXTRA)
        stream = await client.chat.completions.create(**asked, stream=True, extra_body=EXTRA)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == whole.choices[0].message.content


def test_completions(client: openai.OpenAI, stack: ServedStack) -> None:
    asked: Any = {"model": stack.model, "prompt": "The museum opens", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert 1 <= whole.usage.completion_tokens <= 8


def test_a_seed_repeats_a_sampled_reply(client: openai.OpenAI, stack: ServedStack) -> None:
    def sample(seed: int) -> str:
        asked: Any = {"prompt": "The", "temperature": 2.0, "max_tokens": 16, "seed": seed}
        return str(client.completions.create(model=stack.model, **asked).choices[0].text)

    assert sample(5) == sample(5)
    assert len({sample(seed) for seed in range(5)}) > 1


def test_a_stop_string_ends_the_reply(client: openai.OpenAI, stack: ServedStack) -> None:
    asked: Any = {"model": stack.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    stop = text[len(text) // 2 :][:3]
    choice = client.chat.completions.create(**asked, stop=[stop]).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI, stack: ServedStack) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(model=stack.model, messages=MESSAGES, max_tokens=10**6)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as malformed:
        client.chat.completions.create(model=stack.model, messages=MESSAGES, extra_body={"documents": [{"text": 3}]})
    assert malformed.value.param == "documents[0].text"
