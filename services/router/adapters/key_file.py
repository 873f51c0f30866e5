"""API keys in a TOML file that is read again when it changes.

[tenants.acme]
max_requests_in_flight = 8
max_state_bytes = 1_000_000_000
requests_per_minute = 600
tokens_per_minute = 2_000_000
min_priority = -5

[[keys]]
name = "acme-backend"
tenant = "acme"
scopes = ["generate", "documents"]
sha256 = "…"
"""

import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.telemetry import get_logger
from services.router.domain.errors import RouterError
from services.router.domain.rates import Rates
from services.router.domain.tenancy import ANY_PRIORITY, PUBLIC_TENANT, ApiKey, Caller, KeyRing, Quotas, Scope

__all__ = ["FileKeys", "KeyFileError", "NoKeys", "SingleKey", "load_keys"]

_CHECK_SECONDS = 1.0
# Of a deployment with one tenant.
_OWN = Quotas(min_priority=ANY_PRIORITY)

Name = Annotated[str, Field(min_length=1, max_length=256)]
Bound = Annotated[int, Field(ge=0, le=2**63 - 1)]


class KeyFileError(RouterError):
    """The file of API keys cannot be read; the message says where."""


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Tenant(_Closed):
    max_requests_in_flight: Bound = 0
    max_state_bytes: Bound = 0
    requests_per_minute: Bound = 0
    tokens_per_minute: Bound = 0
    min_priority: Annotated[int, Field(ge=ANY_PRIORITY, le=2**31 - 1)] = 0

    def quotas(self) -> Quotas:
        rates = Rates(self.requests_per_minute, self.tokens_per_minute)
        return Quotas(self.max_requests_in_flight, self.max_state_bytes, rates, self.min_priority)


class _Key(_Closed):
    name: Name
    tenant: Name
    scopes: Annotated[list[Scope], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _File(_Closed):
    tenants: dict[Name, _Tenant] = {}
    keys: list[_Key] = []


def load_keys(path: Path) -> KeyRing:
    """All keys of a file.

    Raises:
        KeyFileError: it cannot be read, is no TOML, or a field is wrong.
    """
    try:
        content = _File.model_validate(tomllib.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KeyFileError(f"{path}: {error}") from error
    except ValidationError as error:
        # Without the values: a key that was pasted in place of its hash must not reach a log.
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise KeyFileError(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
    for index, key in enumerate(content.keys):
        if key.tenant == PUBLIC_TENANT:
            raise KeyFileError(f"{path}: keys.{index}.tenant: no key belongs to {PUBLIC_TENANT!r}; give one `admin`")
    return KeyRing(
        tuple(ApiKey(key.name, key.tenant, bytes.fromhex(key.sha256), frozenset(key.scopes)) for key in content.keys),
        {name: each.quotas() for name, each in content.tenants.items()},
    )


class FileKeys:
    """The keys of a file, as it is now: a changed file counts within a second, a broken one leaves the keys as they are.

    Implements `Keys`. Not for several threads.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `KeyFileError`."""
        self._path = path
        self._clock = clock
        self._seen = _fingerprint(path)
        self._ring = load_keys(path)
        self._checked_at = clock()

    def find(self, given: str) -> Caller | None:
        """See `Keys`."""
        self._follow()
        return self._ring.find(given)

    def quotas_of(self, tenant: str) -> Quotas:
        """See `Keys`."""
        self._follow()
        return self._ring.quotas_of(tenant)

    def _follow(self) -> None:
        if self._clock() - self._checked_at >= _CHECK_SECONDS:
            self._checked_at = self._clock()
            self._reload()

    def _reload(self) -> None:
        seen = _fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._ring = load_keys(self._path)
        except KeyFileError as error:
            get_logger().error("api_keys_not_reloaded", reason=str(error))
            return
        get_logger().info("api_keys_reloaded", num_keys=len(self._ring.keys))


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class SingleKey:
    """One key that allows everything; implements `Keys`."""

    def __init__(self, digest: bytes, tenant: str) -> None:
        self._ring = KeyRing((ApiKey("api_key", tenant, digest, frozenset(Scope)),), {tenant: _OWN})

    def find(self, given: str) -> Caller | None:
        """See `Keys`."""
        return self._ring.find(given)

    def quotas_of(self, tenant: str) -> Quotas:
        """See `Keys`: there are none."""
        return Quotas()


class NoKeys:
    """Authentication is off: whoever reaches the router is the administrator of its one tenant. Implements `Keys`."""

    def __init__(self, tenant: str) -> None:
        self._caller = Caller(tenant, frozenset(Scope), _OWN)

    def find(self, given: str) -> Caller | None:
        """See `Keys`."""
        return self._caller

    def quotas_of(self, tenant: str) -> Quotas:
        """See `Keys`: there are none."""
        return Quotas()
