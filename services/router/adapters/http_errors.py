"""The one mapping of errors to OpenAI's envelope."""

import math
from collections.abc import Mapping

from services.common.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from services.router.domain.errors import RouterError
from services.router.domain.lifecycle import DirectoryLostError, DocumentNotFoundError
from services.router.domain.pins import PinRefusedError
from services.router.domain.rates import TooBusyError
from services.router.domain.request import PromptError

__all__ = ["HttpError", "http_error"]


class HttpError(RouterError):
    """An error as the client sees it; `kind` is OpenAI's `type`."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body, and the payload of an error event inside a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


# The client retries these; whatever else it sends would fail again.
_RETRY = {"retry-after": "1"}
_DO_NOT_RETRY = {"x-should-retry": "false"}


def http_error(error: Exception) -> HttpError:
    """What the client is told about this error; addresses and faults behind the router stay in the logs."""
    message = str(error)
    if isinstance(error, HttpError):
        return error
    if isinstance(error, PromptError):
        status = 404 if error.code == "model_not_found" else 400
        return HttpError(status, "invalid_request_error", message, error.code, error.param, _DO_NOT_RETRY)
    if isinstance(error, DocumentNotFoundError):
        return HttpError(404, "invalid_request_error", message, "document_not_found", "id", _DO_NOT_RETRY)
    if isinstance(error, PinRefusedError):
        return HttpError(409, "invalid_request_error", message, "pin_limit", None, _DO_NOT_RETRY)
    if isinstance(error, DirectoryLostError):
        return HttpError(503, "server_error", message, "cache_unavailable", None, _RETRY)
    if isinstance(error, InvalidRequestError):
        return HttpError(400, "invalid_request_error", message, "invalid_request", None, _DO_NOT_RETRY)
    if isinstance(error, TooBusyError):
        wait = {"retry-after": str(math.ceil(error.retry_after_seconds))}
        return HttpError(429, "rate_limit_error", message, error.code, None, wait)
    if isinstance(error, OverloadedError):
        return HttpError(429, "rate_limit_error", message, "overloaded", None, _RETRY)
    if isinstance(error, UnavailableError):
        return HttpError(503, "server_error", "the model cannot be reached now", "unavailable", None, _RETRY)
    if isinstance(error, DeadlineError):
        message = "the request took longer than the time allowed"
        return HttpError(504, "server_error", message, "deadline_exceeded", None, _DO_NOT_RETRY)
    return HttpError(500, "server_error", "an internal error occurred", "internal_error", None, _DO_NOT_RETRY)
