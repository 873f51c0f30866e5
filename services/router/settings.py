"""The router's settings: variables `HYPIC_ROUTER_…`."""

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings

__all__ = ["RouterSettings"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RouterSettings(ServiceSettings):
    """Durations in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="HYPIC_ROUTER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="port of the API and of /metrics; 0 takes a free one")
    worker_address: str = Field(default="127.0.0.1:7102", description="host:port of the worker")
    cache_address: str = Field(default="127.0.0.1:7101", description="host:port of the cache service")
    api_key: SecretStr = Field(default=SecretStr(""), description="when set, requests without it are refused")
    tenant: str = Field(default="default", min_length=1, description="whose states requests of this router use")
    completions_separator: str = Field(
        default="", description="cuts prompts of /v1/completions into segments; empty is off"
    )
    default_max_tokens: int = Field(default=1024, ge=1, description="length of a reply when the request names none")

    max_body_bytes: int = Field(default=32 << 20, ge=1, description="larger request bodies are refused with 413")
    tokenizer_memo_bytes: int = Field(default=64 << 20, ge=1, description="memory for token ids of texts seen before")

    request_timeout_seconds: Seconds = Field(default=600.0, description="deadline of a request on every hop")
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
    pending_wait_seconds: Seconds = Field(
        default=10.0, description="longest wait for a segment that another request captures"
    )
    shutdown_grace_seconds: Seconds = Field(default=60.0, description="how long SIGTERM waits for running streams")
    max_background_captures: int = Field(
        default=4, ge=0, description="captures behind replies at once, with cold: live"
    )
