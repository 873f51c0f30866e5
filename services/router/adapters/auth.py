"""From a request's headers to its caller."""

import base64
from dataclasses import replace

from starlette.requests import Request

from services.router.adapters.http_errors import HttpError
from services.router.domain.tenancy import Caller, Keys, Quotas, Scope

__all__ = ["Gate", "require"]


class Gate:
    """Lets callers pass that have a key and its scope. usual: bounds of tenants for which the keys name none."""

    def __init__(self, keys: Keys, usual: Quotas | None = None) -> None:
        self._keys = keys
        self._usual = usual or Quotas()

    def admit(self, request: Request, scope: Scope) -> Caller:
        """The caller.

        Raises:
            HttpError: no known key (401), or one without the scope (403).
        """
        caller = self._keys.find(_bearer(request))
        if caller is None:
            raise HttpError(
                401,
                "invalid_request_error",
                "an API key is required: Authorization: Bearer …",
                "invalid_api_key",
                None,
                {"www-authenticate": "Bearer", "x-should-retry": "false"},
            )
        require(caller, scope)
        return replace(caller, quotas=caller.quotas.or_else(self._usual))

    def admit_browser(self, request: Request, scope: Scope) -> Caller:
        """The caller of a page: a browser asks for a name, which is not looked at, and takes the key as the password.

        Raises:
            HttpError: as `admit`.
        """
        caller = self._keys.find(_password(request) or _bearer(request))
        if caller is None:
            raise HttpError(
                401,
                "invalid_request_error",
                "an API key is required, as the password of any name",
                "invalid_api_key",
                None,
                {"www-authenticate": 'Basic realm="hypic console", charset="UTF-8"', "x-should-retry": "false"},
            )
        require(caller, scope)
        return replace(caller, quotas=caller.quotas.or_else(self._usual))

    def quotas_of(self, tenant: str) -> Quotas:
        """The bounds of any tenant."""
        return self._keys.quotas_of(tenant).or_else(self._usual)


def require(caller: Caller, scope: Scope) -> None:
    """Raise `HttpError` unless the caller has a scope."""
    if not caller.may(scope):
        raise HttpError(
            403,
            "permission_error",
            f"this API key lacks the scope {scope.value!r}",
            "insufficient_scope",
            None,
            {"x-should-retry": "false"},
        )


def _password(request: Request) -> str:
    kind, _, sent = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return ""
    try:
        return base64.b64decode(sent, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _bearer(request: Request) -> str:
    """OpenAI's clients send a bearer, Anthropic's `x-api-key`."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
