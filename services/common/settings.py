"""The base of each service's settings: environment variables with the prefix `HYPIC_`, checked at the start.

Every service owns one prefix below it (`HYPIC_ROUTER_`, `HYPIC_CACHE_`, `HYPIC_WORKER_`). A variable under a service's
prefix that no field reads is a typing mistake, and stops the start.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.tls import Identity, TlsFiles, check_files

__all__ = ["PeerSettings", "ServiceSettings", "SettingsError"]


class SettingsError(Exception):
    """The environment does not describe a startable service; the message names each variable."""


class ServiceSettings(BaseSettings):
    """Fields that every service has; subclasses set `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level that is logged"
    )
    log_format: Literal["json", "console"] = Field(default="json", description="one JSON object a line, or plain lines")

    otlp_endpoint: str = Field(
        default="",
        pattern=r"^(https?://.+)?$",
        description="collector of traces, `http://host:4317` (OTLP over gRPC); empty is off. Needs the extra `tracing`."
        " `OTEL_TRACES_SAMPLER` chooses which requests are traced",
    )

    tls_cert_file: Path | None = Field(
        default=None,
        description="PEM certificate with its chain, for mutual TLS with the other services; set all three files or none",
    )
    tls_key_file: Path | None = Field(default=None, description="PEM key of that certificate")
    tls_ca_file: Path | None = Field(
        default=None, description="PEM certificate of the authority that has signed every service's certificate"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _read_empty_path(cls, value: object, info: ValidationInfo) -> object:
        """An empty variable is a path that is not given, and never the working directory."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if value == "" and kind is Path:
            raise ValueError("is empty; give a path")
        return None if value == "" and kind == Path | None else value

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        given = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if any(given) and not all(given):
            raise ValueError("set all of tls_cert_file, tls_key_file and tls_ca_file, or none")
        if self.tls is not None:
            check_files(self.tls)
        return self

    @property
    def tls(self) -> TlsFiles | None:
        """Files of mutual TLS; None where services speak in plain text."""
        if self.tls_cert_file and self.tls_key_file and self.tls_ca_file:
            return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        return None

    @classmethod
    def from_environment(cls, **overrides: object) -> Self:
        """Read the settings.

        Raises:
            SettingsError: a variable is malformed, missing or unknown.
        """
        cls._refuse_unknown(os.environ)
        try:
            return cls(**overrides)  # type: ignore[arg-type] # pydantic checks each value
        except ValidationError as error:
            raise SettingsError("; ".join(cls._explain(error))) from error

    @classmethod
    def load_or_exit(cls, **overrides: object) -> Self:
        """Like `from_environment`, but a fault ends the process with status 2 and one line on standard error."""
        try:
            return cls.from_environment(**overrides)
        except SettingsError as error:
            _exit(str(error))

    @classmethod
    def _refuse_unknown(cls, environment: Mapping[str, str]) -> None:
        prefix = cls.model_config.get("env_prefix", "").upper()
        known = {f"{prefix}{name}".upper() for name in cls.model_fields}
        unknown = sorted(name for name in environment if name.upper().startswith(prefix) and name.upper() not in known)
        if unknown:
            raise SettingsError(f"unknown variable {', '.join(unknown)}; known are {', '.join(sorted(known))}")

    @classmethod
    def _explain(cls, error: ValidationError) -> list[str]:
        """A fault of several fields together has no place, and names them itself."""
        prefix = cls.model_config.get("env_prefix", "").upper()
        return [
            (f"{prefix}{'_'.join(str(step) for step in fault['loc']).upper()}: " if fault["loc"] else "") + fault["msg"]
            for fault in error.errors()
        ]


class PeerSettings(ServiceSettings):
    """Of a service that calls others."""

    tls_cache_name: str = Field(
        default="hypic-cache", min_length=1, description="DNS name that the cache service's certificate must carry"
    )
    tls_worker_name: str = Field(
        default="hypic-worker", min_length=1, description="DNS name that every worker's certificate must carry"
    )

    @property
    def identity(self) -> Identity | None:
        """For channels to others; None where services speak in plain text."""
        return None if self.tls is None else Identity(self.tls, self.tls_cache_name, self.tls_worker_name)


def _exit(message: str) -> NoReturn:
    sys.stderr.write(f"hypic: settings: {message}\n")
    raise SystemExit(2)
