"""Reading a request's body within its limit."""

import json
from typing import NoReturn

from starlette.requests import Request

from services.router.adapters.http_errors import HttpError
from services.router.domain.request import PromptError

__all__ = ["read_json"]


async def read_json(request: Request, max_bytes: int) -> object:
    """The body as JSON.

    Raises:
        HttpError: it is larger than the limit (413).
        PromptError: it is no JSON.
    """
    body = await _read(request, max_bytes)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"the body is not valid JSON: {error}", param="body", code="invalid_json") from error
    if b"\\ud" in body or b"\\uD" in body:
        _refuse_lone_surrogates(value)
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        _refuse_size(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            _refuse_size(max_bytes)
    return bytes(body)


def _refuse_size(max_bytes: int) -> NoReturn:
    raise HttpError(
        413,
        "invalid_request_error",
        f"the body is larger than {max_bytes} bytes",
        "request_too_large",
        "body",
        {"x-should-retry": "false", "connection": "close"},
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_lone_surrogates(value: object) -> None:
    """JSON can spell half a character; no text encoding can carry it further."""
    waiting = [("", value)]
    while waiting:
        path, each = waiting.pop()
        if isinstance(each, dict):
            waiting += [(f"{path}.{name}".lstrip("."), item) for name, item in each.items()]
            waiting += [(path or "body", name) for name in each]
        elif isinstance(each, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(each)]
        elif isinstance(each, str) and not _is_encodable(each):
            raise PromptError(f"{_printable(path)} holds half of a surrogate pair", param=_printable(path))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
