"""Who may do what: callers, their scopes and their tenants' quotas."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from services.router.domain.rates import NO_RATES, Rates
from services.router.domain.request import Namespace

__all__ = [
    "ANY_PRIORITY",
    "OTHER_TENANTS",
    "PUBLIC_TENANT",
    "ApiKey",
    "Caller",
    "KeyRing",
    "Keys",
    "Quotas",
    "Scope",
    "hash_key",
]

# Of callers who share their workers with nobody.
ANY_PRIORITY = -(2**31)
# Its states serve every tenant; only callers with the scope `admin` fill it.
PUBLIC_TENANT = "public"
# What metrics name in place of every tenant that has no group.
OTHER_TENANTS = "other"


class Scope(StrEnum):
    """What a key allows. `admin` allows everything, for every tenant and the public namespace."""

    GENERATE = "generate"
    DOCUMENTS = "documents"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Quotas:
    """Bounds of a tenant; 0 is none. Requests in flight and in a minute are counted by each router for itself.

    min_priority: the lowest that its requests may have, since lower is sooner; it is no bound of how many.
    """

    max_requests_in_flight: int = 0
    max_state_bytes: int = 0
    rates: Rates = NO_RATES
    min_priority: int = 0

    def or_else(self, usual: "Quotas") -> "Quotas":
        """These, with the usual ones where there is none."""
        rates = Rates(
            self.rates.requests_per_minute or usual.rates.requests_per_minute,
            self.rates.tokens_per_minute or usual.rates.tokens_per_minute,
        )
        return Quotas(
            self.max_requests_in_flight or usual.max_requests_in_flight,
            self.max_state_bytes or usual.max_state_bytes,
            rates,
            self.min_priority,
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request; `key_name` is for logs."""

    tenant: str
    scopes: frozenset[Scope]
    quotas: Quotas = Quotas()
    key_name: str = ""

    def may(self, scope: Scope) -> bool:
        """Whether this is allowed."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def namespace(self) -> Namespace:
        """The tenant's own namespace, without a salt."""
        return Namespace(self.tenant, budget_bytes=self.quotas.max_state_bytes)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key at rest: its SHA-256 alone. Keys hold 256 random bits, so that no slow hash is needed."""

    name: str
    tenant: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys, and quotas by tenant."""

    keys: tuple[ApiKey, ...]
    quotas: Mapping[str, Quotas]

    def find(self, given: str) -> Caller | None:
        """Whose key this is. Takes equally long for every key of a ring, known or not."""
        digest = hash_key(given)
        found: ApiKey | None = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            return None
        return Caller(found.tenant, found.scopes, self.quotas_of(found.tenant), found.name)

    def quotas_of(self, tenant: str) -> Quotas:
        """The bounds of a tenant; none where the ring names none."""
        return self.quotas.get(tenant, Quotas())


class Keys(Protocol):
    """Where callers are looked up."""

    def find(self, given: str) -> Caller | None:
        """Whose key this is; `given` is empty when the request brings none."""
        ...

    def quotas_of(self, tenant: str) -> Quotas:
        """The bounds of a tenant."""
        ...


def hash_key(key: str) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).digest()
