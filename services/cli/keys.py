"""`hypic keys`: API keys for the router's key file."""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from services.router.domain.tenancy import Scope, hash_key

__all__ = ["app"]

app = typer.Typer(help="Make API keys; `HYPIC_ROUTER_API_KEYS_FILE` names the file that the router reads.")


@app.callback()
def keys() -> None:
    """Make API keys."""


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose states requests with this key use.")],
    name: Annotated[str, typer.Option(help="What the file calls the key; never a secret.")] = "",
    scope: Annotated[list[Scope] | None, typer.Option(help="What it allows; may be given several times.")] = None,
    file: Annotated[Path | None, typer.Option(help="Add the key's hash to this file.")] = None,
) -> None:
    """Make a key: printed once, on standard output. Only its hash is kept."""
    from services.router.adapters.key_file import KeyFileError

    key = f"hypic-{secrets.token_urlsafe(32)}"
    section = _section(key, tenant, name or tenant, scope or [Scope.GENERATE])
    try:
        if file:
            _append(file, section)
    except (KeyFileError, OSError) as error:
        typer.echo(f"hypic keys: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(f"added to {file}" if file else f"for the file of API keys:\n{section}", err=True)
    typer.echo(key)


def _section(key: str, tenant: str, name: str, scopes: list[Scope]) -> str:
    fields = {"name": name, "tenant": tenant, "scopes": [each.value for each in scopes], "sha256": hash_key(key).hex()}
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in fields.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def _append(file: Path, section: str) -> None:
    """Replace the file by one that has the section too, at once: a router that reads it never sees half of it."""
    from services.router.adapters.key_file import load_keys

    before = file.read_text() if file.exists() else ""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as written:
            written.write(before + ("\n" if before else "") + section)
        load_keys(Path(temporary))
        if file.exists():
            Path(temporary).chmod(file.stat().st_mode & 0o777)
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)
