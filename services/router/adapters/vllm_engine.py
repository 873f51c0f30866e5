"""A vLLM server behind its completions endpoint; implements `DecodingEngine`."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx2

from services.common.errors import (
    DeadlineError,
    HypicError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from services.router.adapters.vllm_messages import Chunk, completion_body, read_chunk
from services.router.domain.decoding import DecodeOrder
from services.router.domain.ports import Finished, Tokens

__all__ = ["VllmEngine"]

_CONNECT_SECONDS = 2.0
_DATA = "data: "
_DONE = "[DONE]"


class VllmEngine:
    """model: tells the name that the server knows the model by; api_key: empty where it wants none."""

    def __init__(self, url: str, model: Callable[[], str], api_key: str) -> None:
        self.name = url
        self._model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        # What the environment names as a proxy is not meant for engines.
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=False)

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def decode(self, order: DecodeOrder, timeout_seconds: float) -> AsyncGenerator[Tokens | Finished]:
        """See `DecodingEngine`."""
        stops = frozenset(order.stop_token_ids)
        body = completion_body(self._model(), order)
        timeout = httpx2.Timeout(timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds))
        headers = {"x-request-id": order.request_id}
        began: float | None = None
        generated = 0
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, timeout=timeout, headers=headers
            ) as sent:
                if sent.status_code != httpx2.codes.OK:
                    raise _refusal(sent.status_code, await sent.aread(), order)
                async for chunk in _chunks(sent, stops):
                    began = time.monotonic() if began is None else began
                    generated += chunk.num_tokens
                    if chunk.tokens.token_ids:
                        yield chunk.tokens
                    if chunk.reason is not None:
                        yield Finished(chunk.reason, time.monotonic() - began, generated)
                        return
        except httpx2.TimeoutException as error:
            raise _late(error, self.name) from error
        except httpx2.TransportError as error:
            raise UnavailableError(f"vLLM at {self.name} cannot be reached: {error!r}") from error
        raise UnavailableError(f"vLLM at {self.name} ended a reply without an end")


async def _chunks(sent: httpx2.Response, stops: frozenset[int]) -> AsyncIterator[Chunk]:
    async for line in sent.aiter_lines():
        if not line.startswith(_DATA) or line == _DATA + _DONE:
            continue
        try:
            fields = json.loads(line.removeprefix(_DATA))
        except ValueError as error:
            raise InternalError(f"vLLM sent a line that is no JSON: {error}") from error
        if (chunk := read_chunk(fields, stops)) is not None:
            yield chunk


def _late(error: httpx2.TimeoutException, name: str) -> HypicError:
    if isinstance(error, httpx2.ConnectTimeout):
        return UnavailableError(f"vLLM at {name} cannot be reached in time")
    return DeadlineError(f"vLLM at {name} did not answer in time")


def _refusal(status: int, content: bytes, order: DecodeOrder) -> HypicError:
    message = _message(content)
    if status in (httpx2.codes.BAD_REQUEST, httpx2.codes.UNPROCESSABLE_CONTENT):
        # As a worker begins such a refusal; everything else was checked ahead.
        return InvalidRequestError(f"grammar: {message}" if order.sampling.grammar else message)
    if status == httpx2.codes.TOO_MANY_REQUESTS:
        return OverloadedError(f"vLLM has no room: {message}")
    if status in (httpx2.codes.NOT_FOUND, httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        return InternalError(
            f"vLLM refuses ({status}): {message}; see HYPIC_ROUTER_VLLM_MODEL and HYPIC_ROUTER_VLLM_API_KEY"
        )
    return UnavailableError(f"vLLM answered {status}: {message}")


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
