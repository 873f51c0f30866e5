"""What an operator sets for the connector, in `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["ConnectorOptions", "OptionError"]


class OptionError(ValueError):
    """An option is missing or malformed; the message names it."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """workers: addresses that may be asked for states, `*` matching any run of characters.

    model_revision: of the checkpoint, as the workers describe it, worked out from the files where it is empty; seconds: in which
    a state must come; limit_bytes: of one.
    """

    workers: tuple[str, ...]
    model_revision: str = ""
    seconds: float = 30.0
    limit_bytes: int = 4 << 30

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "ConnectorOptions":
        """Check the operator's values.

        Raises:
            OptionError: one is missing, unknown or out of range.
        """
        if unknown := sorted(set(config) - {field.name for field in fields(cls)}):
            raise OptionError(f"kv_connector_extra_config has no option {unknown[0]!r}")
        workers = config.get("workers")
        if not isinstance(workers, list) or not workers or not all(isinstance(each, str) for each in workers):
            raise OptionError('kv_connector_extra_config.workers must list the workers, such as ["10.0.0.*:7102"]')
        options = cls(**{**config, "workers": tuple(workers)})
        if not isinstance(options.model_revision, str):
            raise OptionError("kv_connector_extra_config.model_revision must be a string")
        for name, value in (("seconds", options.seconds), ("limit_bytes", options.limit_bytes)):
            if not isinstance(value, int | float) or not value > 0:
                raise OptionError(f"kv_connector_extra_config.{name} must be a positive number")
        return options
