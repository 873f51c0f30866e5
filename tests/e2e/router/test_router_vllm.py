"""`decode: vllm`: the same surface, whoever decodes; what is missing costs time and no reply."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, OpenAI

from services.router.domain.decoding import salt_of as router_salt
from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until
from tests.stub_vllm import StubVllm
from tests.stub_worker import MODEL_NAME, SPECIAL_TOKENS, train_tokenizer

_TEXT = "The river is in the city: 🦉."
_IDS = tuple(train_tokenizer().encode(_TEXT, add_special_tokens=False).ids)
_END = SPECIAL_TOKENS.index("<|im_end|>")
_DOCUMENT = "the document about the river and the city of the answer, long enough to be a segment of its own"


@pytest.fixture
def engine() -> Iterator[StubVllm]:
    with StubVllm((*_IDS, _END)) as running:
        yield running


@pytest.fixture
def stack(engine: StubVllm) -> Iterator[RouterStack]:
    settings = RouterSettings(decode="vllm", vllm_urls=f"{engine.url}/", vllm_model="theirs")
    with RouterStack(settings) as running:
        yield running


def _client(stack: RouterStack) -> OpenAI:
    return OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def _send(client: OpenAI, **more: Any) -> Any:  # noqa: ANN401
    body = {"documents": [{"text": _DOCUMENT, "id": "d"}], "hypic": {"explain": True}} | more.pop("extra_body", {})
    return client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "where?"}], extra_body=body, **more
    )


def _ask(stack: RouterStack, **more: Any) -> Any:  # noqa: ANN401
    with _client(stack) as client:
        return _send(client, **more)


def _hypic(reply: Any) -> dict[str, Any]:  # noqa: ANN401
    found: dict[str, Any] = reply.model_extra["hypic"]
    return found


def _is_quiet(stack: RouterStack) -> bool:
    return stack.worker.num_running == 0 and not stack.worker.waiting


def test_the_engine_writes_from_the_held_state(stack: RouterStack, engine: StubVllm) -> None:
    first, second = _ask(stack), _ask(stack)
    assert first.choices[0].message.content == second.choices[0].message.content == _TEXT
    assert first.choices[0].finish_reason == "stop"
    assert second.usage.completion_tokens == len(_IDS) + 1
    explained = _hypic(second)
    assert explained["decode"] == {"engine": engine.url, "began_from": "state", "reason": None}
    assert [part["served"] for part in explained["parts"]] == ["live", "hit", "live", "live"]
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert sum(part["tokens"] for part in explained["parts"]) == second.usage.prompt_tokens
    wait_until(lambda: _is_quiet(stack))
    metrics = stack.http.get("/metrics").text
    assert 'hypic_handovers_total{began_from="state"} 2.0' in metrics


def test_the_engine_has_the_whole_prompt_and_a_salt_of_its_own(stack: RouterStack, engine: StubVllm) -> None:
    _ask(stack, max_tokens=9, temperature=0.5, seed=2**64 - 3)
    _ask(stack)
    held, body = stack.worker.requests[0], engine.requests[0]
    ids = [token for part in held.parts for token in part.token_ids]
    assert held.HasField("hold")
    assert body["prompt"][:-1] == ids
    offer = body["kv_transfer_params"]["hypic"]
    assert offer["num_tokens"] == len(ids)
    assert offer["address"] == f"127.0.0.1:{stack.worker_port}"
    assert body["cache_salt"] == router_salt(bytes.fromhex(offer["handle"]))
    salts = {each["cache_salt"] for each in engine.requests}
    assert len(salts) == 2
    assert (body["path"], body["model"], body["stop_token_ids"]) == ("/v1/completions", "theirs", [_END])
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (9, 0.5, -3)
    assert engine.headers[0]["x-request-id"]


def test_router_and_connector_agree_on_salts() -> None:
    from hypic_vllm.claims import read_offer
    from hypic_vllm.claims import salt_of as connector_salt

    from services.router.adapters.vllm_messages import completion_body
    from services.router.domain.decoding import DecodeOrder, StateOffer
    from services.router.domain.request import Sampling

    handle = bytes(range(32))
    assert connector_salt(handle) == router_salt(handle)
    order = DecodeOrder("r", (1, 2, 3), Sampling(max_tokens=4), (), StateOffer(handle, "127.0.0.1:1", 2))
    read = read_offer(completion_body("m", order)["kv_transfer_params"])
    assert read is not None
    assert (read.handle, read.address, read.num_tokens) == (handle, "127.0.0.1:1", 2)


def test_streams_stops_and_logprobs_are_the_routers_own(stack: RouterStack, engine: StubVllm) -> None:
    with _client(stack) as client:
        chunks = list(_send(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == _TEXT
    stopped = _ask(stack, stop=[" city"])
    assert stopped.choices[0].message.content == "The river is in the"
    told = _ask(stack, logprobs=True, top_logprobs=2)
    tokens = told.choices[0].logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == _TEXT
    assert {token.logprob for token in tokens} == {-0.25}
    assert engine.requests[-1]["logprobs"] == 2
    wait_until(lambda: _is_quiet(stack))


def test_without_a_state_the_engine_computes_the_prompt(stack: RouterStack, engine: StubVllm) -> None:
    stack.worker.refuses_holds = True
    _ask(stack)
    reply = _ask(stack)
    assert reply.choices[0].message.content == _TEXT
    body = engine.requests[-1]
    assert "kv_transfer_params" not in body
    assert "cache_salt" not in body
    explained = _hypic(reply)
    assert explained["decode"]["began_from"] == "prompt"
    assert explained["decode"]["reason"] == "not_held"
    assert [part["served"] for part in explained["parts"]] == ["live"] * 4
    assert explained["parts"][1]["reason"] == "state_not_loaded"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert 'hypic_fallbacks_total{reason="state_not_loaded"}' in stack.http.get("/metrics").text


def test_a_state_that_the_engine_did_not_take_is_not_called_reused(stack: RouterStack, engine: StubVllm) -> None:
    engine.takes_states = False
    reply = _ask(stack)
    assert reply.choices[0].message.content == _TEXT
    assert _hypic(reply)["decode"]["reason"] == "not_taken"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    wait_until(lambda: _is_quiet(stack))


def test_without_an_engine_the_worker_decodes(stack: RouterStack, engine: StubVllm) -> None:
    engine.status = 503
    reply = _ask(stack)
    assert reply.choices[0].message.content == stack.worker.reply
    assert _hypic(reply)["decode"] == {"engine": "stub", "began_from": "worker", "reason": "no_engine"}
    wait_until(lambda: _is_quiet(stack))


def test_another_engine_takes_over_ahead_of_the_first_token(engine: StubVllm) -> None:
    with StubVllm((*_IDS, _END), status=503) as lost:
        settings = RouterSettings(decode="vllm", vllm_urls=f"{lost.url},{engine.url}")
        with RouterStack(settings) as stack:
            reply = _ask(stack)
            assert reply.choices[0].message.content == _TEXT
            assert _hypic(reply)["decode"] == {"engine": engine.url, "began_from": "prompt", "reason": "engine_lost"}
            assert engine.requests[0]["model"] == MODEL_NAME
            assert "kv_transfer_params" not in engine.requests[0]


def test_an_engine_lost_behind_the_first_token_ends_the_stream_with_an_error(
    stack: RouterStack, engine: StubVllm
) -> None:
    engine.dies_after = 2
    with pytest.raises(InternalServerError):
        _ask(stack)
    wait_until(lambda: _is_quiet(stack))


def test_what_the_engine_refuses_is_the_clients_error(stack: RouterStack, engine: StubVllm) -> None:
    engine.status = 400
    with pytest.raises(BadRequestError) as refused:
        _ask(stack, extra_body={"structured_outputs": {"regex": "a+"}})
    assert "the stub refuses" in str(refused.value)
    assert engine.requests[0]["structured_outputs"] == {"regex": "a+"}


def test_a_client_that_leaves_ends_both(stack: RouterStack, engine: StubVllm) -> None:
    engine.waits = True
    with _client(stack) as client:
        stream = _send(client, stream=True)
        next(iter(stream))
        stream.close()
    assert engine.was_left.wait(20)
    wait_until(lambda: _is_quiet(stack))


@pytest.mark.parametrize(
    "settings",
    [{"decode": "vllm"}, {"vllm_urls": "http://127.0.0.1:1"}, {"decode": "vllm", "vllm_urls": "127.0.0.1:8000"}],
)
def test_half_a_configuration_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="vllm"):
        RouterSettings(**settings)
