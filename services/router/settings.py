"""The router's settings: variables `HYPIC_ROUTER_…`."""

from typing import Annotated

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.common.settings import ServiceSettings

__all__ = ["RouterSettings"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1)]


class RouterSettings(ServiceSettings):
    """Durations in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="HYPIC_ROUTER_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    worker_address: str = "127.0.0.1:7102"
    cache_address: str = "127.0.0.1:7101"
    # Requests without it are refused when it is set.
    api_key: SecretStr = SecretStr("")
    tenant: Annotated[str, Field(min_length=1)] = "default"
    # Cuts prompts of `/v1/completions` into segments; empty is off.
    completions_separator: str = ""
    default_max_tokens: Annotated[int, Field(ge=1)] = 1024

    max_body_bytes: Bytes = 32 << 20
    tokenizer_memo_bytes: Bytes = 64 << 20

    request_timeout_seconds: Seconds = 600.0
    # How long a request waits for a worker that went away before its first token.
    worker_wait_seconds: Seconds = 5.0
    cache_timeout_seconds: Seconds = 1.0
    lease_seconds: Seconds = 30.0
    capture_timeout_seconds: Seconds = 60.0
    pending_wait_seconds: Seconds = 10.0
    shutdown_grace_seconds: Seconds = 60.0
    max_background_captures: Annotated[int, Field(ge=0)] = 4
