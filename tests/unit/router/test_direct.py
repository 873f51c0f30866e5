"""Endpoints past the framework's layers: what they take, and how what they raise leaves."""

import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from services.common.errors import OverloadedError
from services.router.adapters.direct import DirectRoutes
from services.router.adapters.streaming import ClientGoneError

PATH = "/v1/chat/completions"


async def framework(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("the framework's")(scope, receive, send)


class Answering:
    """An application whose one direct endpoint raises an error, where there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[Message] = []

    async def endpoint(self, _request: Request) -> Response:
        if self.error:
            raise self.error
        return PlainTextResponse("direct")

    async def ask(self, method: str = "POST", path: str = PATH, **headers: str) -> tuple[int, str]:
        app = DirectRoutes(framework, {PATH: self.endpoint}, 1024)
        sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": sent, "query_string": b""}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await app(scope, receive, send)
        return self.status, self.sent[-1]["body"].decode()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def test_posts_to_its_paths_are_answered_here_and_all_else_is_not() -> None:
    assert await Answering().ask() == (200, "direct")
    assert await Answering().ask("GET") == (200, "the framework's")
    assert await Answering().ask(path=f"{PATH}/") == (200, "the framework's")


async def test_a_requests_id_comes_back() -> None:
    app = Answering()
    await app.ask(x_request_id="mine")
    assert (b"x-request-id", b"mine") in app.sent[0]["headers"]


async def test_a_head_that_is_too_large_is_refused() -> None:
    status, body = await Answering().ask(x_more="a" * 2000)
    assert (status, json.loads(body)["error"]["code"]) == (431, "request_head_too_large")


@pytest.mark.parametrize(("error", "status"), [(OverloadedError("full"), 429), (ClientGoneError(), 499)])
async def test_errors_of_ours_are_answered(error: Exception, status: int) -> None:
    assert (await Answering(error).ask())[0] == status


async def test_a_fault_is_answered_and_logged_by_the_server() -> None:
    app = Answering(KeyError("secret"))
    with pytest.raises(KeyError):
        await app.ask()
    assert app.status == 500
    assert "secret" not in app.sent[-1]["body"].decode()
