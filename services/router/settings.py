"""The router's settings: variables `HYPIC_ROUTER_…`."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.settings import PeerSettings
from services.common.tls import TlsFiles, check_files
from services.router.domain.guard import MAX_BUDGET
from services.router.domain.tenancy import OTHER_TENANTS, PUBLIC_TENANT

__all__ = ["RouterSettings"]

_MAX_TENANT_GROUPS = 16
_GROUP = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ENGINE_URL = re.compile(r"https?://[^/?#\s]+:\d+")
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RouterSettings(PeerSettings):
    """Durations in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="HYPIC_ROUTER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="port of the API and of /metrics; 0 takes a free one")
    operations_address: str = Field(
        default="",
        pattern=r"^(.+:\d+)?$",
        description="host:port of a second listener, plain HTTP, for probes and Prometheus: /health/live, /health/ready and"
        " /metrics, which the API's port then has no more; empty: all are on the API's port",
    )
    http_tls_cert_file: Path | None = Field(
        default=None, description="PEM certificate with its chain of the API; without it the API is plain HTTP"
    )
    http_tls_key_file: Path | None = Field(default=None, description="PEM key of that certificate")
    http_tls_client_ca_file: Path | None = Field(
        default=None,
        description="PEM certificate of the authority that clients' certificates must come from, as a gateway's; default:"
        " clients need none. Probes then need operations_address",
    )
    workers: str = Field(
        default="",
        description="host:port of the workers, with commas between; a name stands for every address that it has (a headless"
        " service). Default: the workers that are registered with the cache service",
    )
    cache_address: str = Field(default="127.0.0.1:7101", description="host:port of the cache service")
    decode: Literal["worker", "vllm"] = Field(
        default="worker",
        description="who decodes: the worker that combines, or vLLM, which takes the decode state from it (docs/vllm.md)",
    )
    vllm_urls: str = Field(
        default="", description="vLLM servers with the connector, `http://host:port`, with commas between"
    )
    vllm_model: str = Field(default="", description="the name that they know the model by; default: the workers' own")
    vllm_api_key: SecretStr = Field(default=SecretStr(""), description="their key, where they want one")
    api_keys_file: Path | None = Field(
        default=None,
        description="TOML file of API keys, tenants and quotas, read again when it changes (`hypic keys`). Without it "
        "and `api_key`, requests need no key, which is allowed on loopback only",
    )
    api_key: SecretStr = Field(default=SecretStr(""), description="one key that allows everything, in place of a file")
    tenant: str = Field(default="default", min_length=1, description="whose states are used where no key file is set")
    tenant_groups: dict[str, str] = Field(
        default={},
        description='a JSON object, `{"acme": "gold"}`: the name that metrics give a tenant, at most 15 different ones; all'
        " other tenants are `other`",
    )
    completions_separator: str = Field(
        default="", description="cuts prompts of /v1/completions into segments; empty is off"
    )
    default_max_tokens: int = Field(default=1024, ge=1, description="length of a reply when the request names none")

    keep_turns: bool = Field(
        default=True,
        description="the state behind a reply is kept where the conversation's next turn can begin with it",
    )

    max_body_bytes: int = Field(default=32 << 20, ge=1, description="larger request bodies are refused with 413")
    max_header_bytes: int = Field(default=64 << 10, ge=1024, description="larger request heads are refused with 431")
    max_parts: int = Field(
        default=4096,
        ge=1,
        description="messages, documents and content parts of a request together; more are refused with 400",
    )
    tenant_max_requests_in_flight: int = Field(
        default=0, ge=0, description="of tenants for which the key file says nothing, at each router; 0 is no bound"
    )
    tenant_requests_per_minute: int = Field(default=0, ge=0, description="likewise; a minute's worth may come at once")
    tenant_tokens_per_minute: int = Field(
        default=0, ge=0, description="likewise, tokens of prompts and replies; a reply's are counted at its end"
    )
    max_queue_seconds: Seconds = Field(
        default=60.0, description="requests are refused with 429 while every worker has work for longer than this"
    )
    max_requests_per_worker: int = Field(
        default=256,
        ge=1,
        description="requests are refused with 429 while every worker that combines has so many, running or waiting",
    )
    tokenizer_memo_bytes: int = Field(
        default=128 << 20, ge=1, description="memory for texts seen before, with their token ids"
    )

    guard_share: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="share of the composed requests that are composed and recomputed in full again, behind their replies and only"
        " where no traffic is in the way; 0 turns the guard off",
    )
    guard_budget_nats: float = Field(
        default=0.25,
        gt=0.0,
        le=MAX_BUDGET,
        description="mean divergence of a composed first token from a full recompute beyond which a tag is answered without"
        " composing; see docs/quality.md",
    )
    guard_budgets: dict[str, Annotated[float, Field(gt=0.0, le=MAX_BUDGET)]] = Field(
        default={},
        description='a JSON object, `{"legal": 0.1}`: tags that requests name in `hypic.tag`, or tenant groups, with their own'
        " budgets; at most 15 names with those of tenant_groups",
    )
    guard_running: int = Field(default=1, ge=1, le=64, description="comparisons of the guard at once")
    guard_busy_requests: int = Field(
        default=4,
        ge=0,
        description="workers with more requests under way than this, or with any that waits, are left alone",
    )

    console_requests: int = Field(
        default=100,
        ge=0,
        le=10_000,
        description="how many of the last requests /console shows; it keeps no text of them",
    )
    request_timeout_seconds: Seconds = Field(default=600.0, description="deadline of a request on every hop")
    worker_refresh_seconds: Seconds = Field(default=2.0, description="between two looks for workers that came")
    worker_silence_seconds: Seconds = Field(
        default=10.0,
        description="a worker that answers nothing for so long is left where another one combines: requests without a first"
        " token go there, streams under way end with an error",
    )
    worker_wait_seconds: Seconds = Field(
        default=5.0, description="how long a request waits for a worker that went away before its first token"
    )
    cache_timeout_seconds: Seconds = Field(default=1.0, description="a cache service slower than this counts as absent")
    lease_seconds: Seconds = Field(
        default=30.0, le=3600.0, description="life of a lease without renewal; the cache service allows an hour"
    )
    capture_timeout_seconds: Seconds = Field(
        default=60.0,
        description="longest wait for captures ahead of a reply; cold segments are computed in place after it. A worker that"
        " captures as it combines has the request's time",
    )
    hedge_factor: float = Field(
        default=2.0,
        ge=1,
        description="a capture that takes so many times its estimate is late: a free worker does it too",
    )
    hedge_slack_seconds: float = Field(default=1.0, ge=0, description="and so much more")
    pending_wait_seconds: Seconds = Field(
        default=10.0, description="longest wait for a segment that another request captures"
    )
    shutdown_grace_seconds: Seconds = Field(default=60.0, description="how long SIGTERM waits for running streams")
    max_background_captures: int = Field(
        default=4, ge=0, description="captures behind replies at once, with cold: live"
    )
    cold: Literal["parallel", "live", "auto"] = Field(
        default="parallel",
        description="what becomes of segments without a stored state where a request does not say: captured ahead of the reply"
        " (cold and warm answers are the same), computed in place (exact) and captured behind it, or whichever costs less now",
    )

    refresh: str = Field(
        default="0",
        pattern=r"^([0-9]{1,6}|auto)$",
        description="blocks of reused segments that are recomputed in place where a request does not say: a number, or auto, as"
        " many as fit into ttft_budget_seconds. Not served by workers with HYPIC_WORKER_TENSOR_PARALLEL above 1",
    )
    ttft_budget_seconds: Seconds | None = Field(
        default=None,
        description="seconds from the engine's admission to the first token, for refresh: auto, where a request does not say",
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: str) -> str:
        _split_addresses(value)
        return value

    @field_validator("tenant_groups")
    @classmethod
    def _check_tenant_groups(cls, value: dict[str, str]) -> dict[str, str]:
        groups = set(value.values()) - {OTHER_TENANTS}
        if len(groups) > _MAX_TENANT_GROUPS - 1:
            raise ValueError(f"{len(groups)} different groups; metrics can bear {_MAX_TENANT_GROUPS - 1}, so join some")
        if bad := sorted(group for group in groups if not _GROUP.fullmatch(group)):
            raise ValueError(f"the group {bad[0]!r} must be letters, digits, '_', '-' and '.', at most 64 of them")
        return value

    @model_validator(mode="after")
    def _check_guard_tags(self) -> Self:
        if bad := sorted(tag for tag in self.guard_budgets if not _GROUP.fullmatch(tag)):
            raise ValueError(f"guard_budgets: the tag {bad[0]!r} must be letters, digits, '_', '-' and '.', at most 64")
        tags = {*self.guard_budgets, *self.tenant_groups.values()} - {OTHER_TENANTS}
        if len(tags) > _MAX_TENANT_GROUPS - 1:
            raise ValueError(
                f"guard_budgets and tenant_groups name {len(tags)} tags together; metrics can bear"
                f" {_MAX_TENANT_GROUPS - 1}, so join some"
            )
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.api_keys_file and self.has_single_key:
            raise ValueError("api_key and api_keys_file exclude each other: put the key's hash into the file")
        if self.tenant == PUBLIC_TENANT:
            raise ValueError(f"tenant must not be {PUBLIC_TENANT!r}, whose states serve every tenant")
        if not (self.api_keys_file or self.has_single_key or _is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} is reached by other machines: set api_keys_file (see `hypic keys`) or api_key"
            )
        return self

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        if (self.decode == "vllm") != bool(self.engine_urls):
            raise ValueError("decode vllm needs vllm_urls, and vllm_urls need decode vllm: set both or neither")
        if bad := [url for url in self.engine_urls if not _ENGINE_URL.fullmatch(url)]:
            raise ValueError(f"vllm_urls: {bad[0]!r} must be http://host:port or https://host:port")
        return self

    @model_validator(mode="after")
    def _check_refresh(self) -> Self:
        if self.refresh == "auto" and self.ttft_budget_seconds is None:
            raise ValueError("refresh auto needs ttft_budget_seconds, the seconds from admission to the first token")
        return self

    @model_validator(mode="after")
    def _check_http_tls(self) -> Self:
        given = (self.http_tls_cert_file, self.http_tls_key_file)
        if any(given) != all(given) or (self.http_tls_client_ca_file and not all(given)):
            raise ValueError(
                "set http_tls_cert_file and http_tls_key_file together; http_tls_client_ca_file needs both of them"
            )
        if self.http_tls_cert_file and self.http_tls_key_file:
            authority = self.http_tls_client_ca_file or self.http_tls_cert_file
            check_files(TlsFiles(self.http_tls_cert_file, self.http_tls_key_file, authority))
        return self

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The servers of `vllm_urls`."""
        return tuple(filter(None, (each.strip().rstrip("/") for each in self.vllm_urls.split(","))))

    @property
    def worker_places(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports of `workers`."""
        return _split_addresses(self.workers)

    @property
    def has_single_key(self) -> bool:
        """Whether one key allows everything."""
        return bool(self.api_key.get_secret_value())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split_addresses(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of `host:port,[::1]:port,…`; raises ValueError with the entry that has no port."""
    found: list[tuple[str, int]] = []
    for entry in filter(None, (each.strip() for each in text.split(","))):
        host, separator, port = entry.rpartition(":")
        if not separator or not host or not port.isdigit():
            raise ValueError(f"{entry!r} must be host:port")
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    return tuple(found)
