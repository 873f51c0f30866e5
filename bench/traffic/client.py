"""What the load asks of a stack beside generating: its model, its words, its metrics, and to forget."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.traffic.connection import Target
from bench.traffic.wording import learn_words

__all__ = ["Caller", "Endpoint", "TrafficError", "find_model", "forget", "learn_server_words"]

_CALL_SECONDS = 30.0
# As routers without a key file call everybody.
_TENANT_WITHOUT_KEYS = "default"


class TrafficError(Exception):
    """The load cannot be sent, or not any more; one line that names the option or address, and the remedy."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant of the stack, as its key file names it, and a key with the scopes `generate` and `documents`."""

    tenant: str
    key: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """callers: by tenant of a workload, none where the stack asks for no key; metrics: pages of all services."""

    target: Target
    callers: Mapping[str, Caller]
    metrics: Sequence[str] = ()

    def headers(self, tenant: str) -> dict[str, str]:
        """What says whose request it is."""
        return {"authorization": f"Bearer {self.callers[tenant].key}"} if self.callers else {}

    @property
    def any_headers(self) -> dict[str, str]:
        """Of the first tenant."""
        return self.headers(next(iter(self.callers))) if self.callers else {}


def find_model(endpoint: Endpoint) -> tuple[str, int]:
    """The served model's name and its context length.

    Raises:
        TrafficError: nobody answers there, or not for this key.
    """
    found = _call(endpoint, "GET", "/v1/models", None, endpoint.any_headers)
    try:
        first = found["data"][0]
        return str(first["id"]), int(first.get("max_model_len") or 0)
    except (LookupError, TypeError) as error:
        raise TrafficError(f"--url {endpoint.target.url}: it serves no model") from error


def learn_server_words(endpoint: Endpoint, model: str) -> tuple[str, ...]:
    """Words that the server's tokenizer has as one token each.

    Raises:
        TrafficError: the server does not count tokens.
        WordingError: there are too few.
    """

    def count(text: str) -> int:
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        found = _call(endpoint, "POST", "/v1/messages/count_tokens", body, endpoint.any_headers)
        return int(found["input_tokens"])

    return learn_words(count)


def forget(endpoint: Endpoint, tenants: Sequence[str]) -> int:
    """Drops everything that is stored for these tenants, in every tier; returns the bytes that fell.

    Raises:
        TrafficError: a key lacks the scope `documents`.
    """
    fallen = 0
    for tenant in tenants if endpoint.callers else tenants[:1]:
        name = endpoint.callers[tenant].tenant if endpoint.callers else _TENANT_WITHOUT_KEYS
        found = _call(endpoint, "POST", "/v1/invalidate", {"tenant": name}, endpoint.headers(tenant))
        fallen += int(found.get("bytes", 0))
    return fallen


def _call(endpoint: Endpoint, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Any:  # noqa: ANN401
    url = endpoint.target.url.rstrip("/") + path
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json", **headers}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=_CALL_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise TrafficError(f"{method} {url}: {error.code}: {said}") from error
    except (OSError, ValueError) as error:
        raise TrafficError(f"{method} {url}: no answer ({error}); is the stack there?") from error
