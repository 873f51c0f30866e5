"""Callers with API keys: what a stack serves to one of them, and the file that its router reads their keys from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from services.router.domain.tenancy import hash_key

__all__ = ["Client", "client_of", "key_sections", "secret_of"]


@dataclass(slots=True)
class Client:
    """A caller with a key; what `ask` needs of a stack."""

    model: str
    base_url: str
    http: httpx2.Client

    def call(self, method: str, path: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 # arguments of httpx2
        """A call that has to succeed."""
        response = self.http.request(method, path, **more)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def secret_of(name: str) -> str:
    """The key of this name."""
    return f"secret of {name}"


def client_of(name: str, model: str, base_url: str) -> Client:
    """A client that sends the key of this name."""
    headers = {"authorization": f"Bearer {secret_of(name)}"}
    return Client(model, base_url, httpx2.Client(base_url=base_url, timeout=60, headers=headers))


def key_sections(keys: Mapping[str, tuple[str, str]]) -> str:
    """Sections of a key file; `keys`: tenant and quoted scopes by name."""
    return "".join(
        f'[[keys]]\nname = "{name}"\ntenant = "{tenant}"\nscopes = [{scopes}]\n'
        f'sha256 = "{hash_key(secret_of(name)).hex()}"\n'
        for name, (tenant, scopes) in keys.items()
    )
