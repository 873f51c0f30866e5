"""What a stack on one machine keeps between two runs: the cache service's secret, and its directory's journal."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from services.common.files import open_private, sync_directory, write_synchronised

__all__ = ["default_state_directory", "state_variables"]

_SECRET, _JOURNAL = "secret", "directory.journal"
_SECRET_VARIABLE = "HYPIC_CACHE_SECRET"
_JOURNAL_VARIABLE = "HYPIC_CACHE_JOURNAL_FILE"


def default_state_directory(port: int) -> Path:
    """In the user's folder for such things; two stacks on one machine differ in their ports.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "hypic" / str(port)


def state_variables(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Settings of the cache service that let it go on where an earlier one ended; those of the environment come first.

    Raises:
        OSError: the directory cannot be used.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {_SECRET_VARIABLE: environment.get(_SECRET_VARIABLE) or _kept_secret(directory)}
    if environment.get("HYPIC_CACHE_DIRECTORY", "memory") == "memory" and _JOURNAL_VARIABLE not in environment:
        found[_JOURNAL_VARIABLE] = str(directory / _JOURNAL)
    return found


def _kept_secret(directory: Path) -> str:
    path = directory / _SECRET
    if not path.exists():
        fresh = path.with_name(f"{_SECRET}.new")
        file = open_private(fresh)
        try:
            write_synchronised(file, [secrets.token_hex(32).encode()])
        finally:
            os.close(file)
        fresh.rename(path)
        sync_directory(directory)
    return path.read_text().strip()
