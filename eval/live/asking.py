"""Asks a live endpoint every question twice, some at a time, and keeps what is answered when it is interrupted."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2

from eval.live.errors import LiveEvaluationError
from eval.live.paired import Pair
from eval.live.questions import LiveQuestion, is_accepted

__all__ = ["Asked", "Endpoint", "Failure", "ask_all"]

# Of a server that sheds load; each waits as long as the server says.
_ATTEMPTS = 5
_LONGEST_WAIT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask. timeout_seconds: of one reply; contained: a reply that holds an answer is right."""

    url: str
    api_key: str = ""
    model: str = ""
    concurrency: int = 4
    max_tokens: int = 64
    timeout_seconds: float = 120.0
    contained: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A question without a pair of replies, and why."""

    id: str
    reason: str


@dataclass(slots=True)
class Asked:
    """Pairs and failures in the questions' order; interrupted: by SIGINT, before all were asked."""

    model: str
    revision: str = ""
    pairs: list[Pair] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


class _ReplyError(Exception):
    """One reply failed; the message is for the user."""


async def ask_all(endpoint: Endpoint, questions: Sequence[LiveQuestion], progress: Callable[[int], None]) -> Asked:
    """Every question with `off` and with `compose`. progress: is told how many are done.

    Raises:
        LiveEvaluationError: nobody answers there, or not for this key or model.
    """
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    limits = httpx2.Limits(max_connections=endpoint.concurrency)
    async with httpx2.AsyncClient(
        base_url=endpoint.url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=endpoint.timeout_seconds,
        limits=limits,
    ) as http:
        asked = await _find_model(http, endpoint)
        found: dict[str, Pair | Failure] = {}
        room = asyncio.Semaphore(endpoint.concurrency)

        async def ask(question: LiveQuestion) -> None:
            async with room:
                found[question.id] = await _ask_pair(http, endpoint, asked.model, question)
            progress(len(found))

        tasks = [asyncio.create_task(ask(own)) for own in questions]
        asked.interrupted = await _run_until_signal(tasks)
    for question in questions:
        match found.get(question.id):
            case Pair() as pair:
                asked.pairs.append(pair)
            case Failure() as failure:
                asked.failures.append(failure)
    return asked


async def _run_until_signal(tasks: Sequence[asyncio.Task[None]]) -> bool:
    """Whether SIGINT ended the work early."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Only the main thread may listen to signals.
    with suppress(ValueError, RuntimeError, NotImplementedError):
        loop.add_signal_handler(signal.SIGINT, stop.set)
    working = asyncio.gather(*tasks)
    stopped = asyncio.create_task(stop.wait())
    try:
        either: set[asyncio.Future[Any]] = {working, stopped}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return False
        working.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await working
        return True
    finally:
        stopped.cancel()
        with suppress(ValueError, RuntimeError, NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)


async def _find_model(http: httpx2.AsyncClient, endpoint: Endpoint) -> Asked:
    try:
        response = await http.get("/v1/models")
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise LiveEvaluationError(f"--against {endpoint.url}: no answer ({error}); is the server there?") from error
    if response.status_code in (401, 403):
        raise LiveEvaluationError(f"--against {endpoint.url}: {_message(response)}; give --api-key or HYPIC_API_KEY")
    try:
        models = {own["id"]: own for own in response.json()["data"]} if response.status_code == 200 else {}
    except (ValueError, KeyError, TypeError) as error:
        raise LiveEvaluationError(f"--against {endpoint.url}: its /v1/models is not a list of models") from error
    if not models:
        raise LiveEvaluationError(f"--against {endpoint.url}: it serves no model ({_message(response)})")
    name = endpoint.model or next(iter(models))
    if name not in models:
        raise LiveEvaluationError(f"--model {name}: it is not served; there is {', '.join(models)}")
    return Asked(name, str(models[name].get("revision", "")))


async def _ask_pair(http: httpx2.AsyncClient, endpoint: Endpoint, model: str, question: LiveQuestion) -> Pair | Failure:
    try:
        off = await _ask(http, _body(endpoint, model, question, "off"))
        compose = await _ask(http, _body(endpoint, model, question, "compose"))
        texts = [str(own["choices"][0]["message"]["content"] or "") for own in (off, compose)]
        parts = compose["hypic"]["parts"]
        composed = sum(own["tokens"] - own["live_tokens"] for own in parts if own["kind"] == "segment")
        prompt_tokens = int(compose["usage"]["prompt_tokens"])
    except _ReplyError as error:
        return Failure(question.id, str(error))
    except (LookupError, TypeError, ValueError) as error:
        return Failure(question.id, f"the reply has not the expected form ({error!r}); is it a HYPIC router?")
    rights = [is_accepted(own, question.answers, contained=endpoint.contained) for own in texts]
    judged = rights if question.answers else [None, None]
    return Pair(question.id, question.question, texts[0], texts[1], judged[0], judged[1], composed, prompt_tokens)


def _body(endpoint: Endpoint, model: str, question: LiveQuestion, reuse: str) -> dict[str, Any]:
    """Documents without ids: an id names one text, and the file's questions may use it otherwise."""
    system = [{"role": "system", "content": question.system}] if question.system else []
    return {
        "model": model,
        "messages": [*system, {"role": "user", "content": question.question}],
        "documents": list(question.documents),
        "temperature": 0,
        "max_tokens": endpoint.max_tokens,
        "hypic": {"reuse": reuse, "explain": True},
    }


async def _ask(http: httpx2.AsyncClient, body: Mapping[str, Any]) -> Any:  # noqa: ANN401 # JSON
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            response = await http.post("/v1/chat/completions", json=body)
        except httpx2.HTTPError as error:
            raise _ReplyError(f"no reply ({type(error).__name__}: {error})") from error
        if response.status_code == 200:
            return response.json()
        if response.status_code not in (429, 503) or attempt == _ATTEMPTS:
            break
        await asyncio.sleep(_wait_seconds(response))
    raise _ReplyError(f"{response.status_code}: {_message(response)}")


def _wait_seconds(response: httpx2.Response) -> float:
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), _LONGEST_WAIT_SECONDS)
    except (KeyError, ValueError):
        return 1.0


def _message(response: httpx2.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {response.status_code}"
