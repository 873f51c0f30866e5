"""Settings of the cache service: environment variables that start with `HYPIC_CACHE_`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict

from services.cache.domain.values import Limits
from services.common.settings import ServiceSettings

__all__ = ["CacheSettings"]

_MIN_SECRET_LENGTH = 16


class CacheSettings(ServiceSettings):
    """The Redis instance of `redis_url` must not evict (`maxmemory-policy noeviction`)."""

    model_config = SettingsConfigDict(env_prefix="HYPIC_CACHE_", frozen=True, extra="forbid")

    listen_address: str = Field(
        default="127.0.0.1:7101", pattern=r"^.+:\d+$", description="host:port of the gRPC server."
    )
    health_address: str = Field(
        default="",
        pattern=r"^(.+:\d+)?$",
        description="host:port of a second server that answers health probes alone, in plain text; empty: only the gRPC"
        " server answers them",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Where /metrics listens.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics; 0 serves none.")
    directory: Literal["memory", "redis"] = Field(default="memory", description="Where the directory lives.")
    redis_url: str = Field(default="redis://127.0.0.1:6379/0", description="Redis of the directory.")
    redis_username: str = Field(default="", description="ACL user in Redis; empty is the default user.")
    redis_password: SecretStr = Field(default=SecretStr(""), description="Password in Redis.")
    redis_ca_file: Path | None = Field(
        default=None, description="Certificates that sign that of a `rediss://` server; the system's own without it."
    )
    redis_prefix: str = Field(default="hypic", pattern=r"^[^{}]+$", description="Start of every key in Redis.")
    secret: SecretStr | None = Field(
        default=None,
        description="Secret behind keys and receipts; every restart must have the same. Without one, a memory directory "
        "makes a random one.",
    )
    journal_file: Path | None = Field(
        default=None,
        description="File in which a memory directory keeps registered documents, pins and invalidations through "
        "restarts. Without it, nothing that was stored before a restart is used again.",
    )
    budget_bytes: int = Field(default=2 << 30, gt=0, description="Bytes that all published copies together may hold.")
    namespace_budget_bytes: int = Field(
        default=0, ge=0, description="Bytes that copies of one tenant may hold, unless its key file says more; 0: all."
    )
    share_seconds: float = Field(
        default=3600.0,
        gt=0,
        description="For so long after its last plan a tenant keeps an equal share of the budget from the others.",
    )
    entry_ttl_seconds: float = Field(
        default=0.0, ge=0, description="Age at which an entry leaves, however often it is used; 0 is never."
    )
    min_uses: int = Field(
        default=1, ge=1, description="Segments are captured when they are planned for the so many-th time."
    )
    pinned_share: float = Field(default=0.5, ge=0, le=1, description="Part of the budget that pins may keep.")
    lease_seconds: float = Field(default=30.0, gt=0, le=3600, description="Life of a lease when a plan names none.")
    ticket_seconds: float = Field(default=60.0, gt=0, description="Least life of a ticket.")
    worker_ttl_seconds: float = Field(
        default=15.0, gt=0, description="After this long without heartbeat a worker is lost."
    )
    grace_seconds: float = Field(default=5.0, ge=0, description="How long running calls may go on after SIGTERM.")

    @model_validator(mode="after")
    def _check_secret(self) -> Self:
        if self.secret is None:
            if self.directory == "redis":
                raise ValueError("secret is required with directory=redis: every replica and restart must share it")
            if self.journal_file is not None:
                raise ValueError("secret is required with journal_file: what it holds is named under the secret")
        elif len(self.secret.get_secret_value()) < _MIN_SECRET_LENGTH:
            raise ValueError(f"secret must have at least {_MIN_SECRET_LENGTH} characters")
        if self.directory == "redis" and self.journal_file is not None:
            raise ValueError("journal_file is for directory=memory; Redis keeps its own, leave it out")
        return self

    def limits(self) -> Limits:
        """The directory's policy."""
        return Limits(
            budget_bytes=self.budget_bytes,
            namespace_budget_bytes=self.namespace_budget_bytes,
            ticket_seconds=self.ticket_seconds,
            worker_ttl_seconds=self.worker_ttl_seconds,
            share_seconds=self.share_seconds,
            entry_ttl_seconds=self.entry_ttl_seconds,
            min_uses=self.min_uses,
            pinned_share=self.pinned_share,
        )
