"""`hypic keys`: API keys for the router's key file."""

import json
import os
import secrets
import tempfile
import tomllib
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


@app.command()
def limit(
    tenant: Annotated[str, typer.Option(help="Whose limits.")],
    file: Annotated[Path, typer.Option(help="The file of API keys.")],
    in_flight: Annotated[int, typer.Option(min=0, help="Requests under way at once, at each router; 0: none.")] = 0,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="At each router; 0: no limit.")] = 0,
    tokens_per_minute: Annotated[int, typer.Option(min=0, help="Of prompts and replies, at each router; 0: none.")] = 0,
    min_priority: Annotated[int, typer.Option(help="The lowest, soonest, `priority` of its requests.")] = 0,
    state_bytes: Annotated[int, typer.Option(min=0, help="Bytes of all stored states; 0: no limit.")] = 0,
) -> None:
    """Set a tenant's limits, in place of those that the file has for it."""
    from services.router.adapters.key_file import KeyFileError

    limits = {
        "max_requests_in_flight": in_flight,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_state_bytes": state_bytes,
        "min_priority": min_priority,
    }
    lines = [f"{field} = {value}" for field, value in limits.items() if value]
    section = "\n".join([f"[tenants.{json.dumps(tenant, ensure_ascii=False)}]", *lines, ""])
    try:
        before = file.read_text() if file.exists() else ""
        _replace(file, _without_tenant(before, tenant), section)
    except (KeyFileError, OSError) as error:
        typer.echo(f"hypic keys: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(section, err=True)


def _without_tenant(text: str, tenant: str) -> str:
    """The file without this tenant's section."""
    kept: list[str] = []
    is_own = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            is_own = _names_tenant(line, tenant)
        if not is_own:
            kept.append(line)
    return "".join(kept)


def _names_tenant(header: str, tenant: str) -> bool:
    try:
        return tenant in tomllib.loads(header).get("tenants", {})
    except tomllib.TOMLDecodeError:
        return False


def _section(key: str, tenant: str, name: str, scopes: list[Scope]) -> str:
    fields = {"name": name, "tenant": tenant, "scopes": [each.value for each in scopes], "sha256": hash_key(key).hex()}
    lines = [f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in fields.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def _append(file: Path, section: str) -> None:
    _replace(file, file.read_text() if file.exists() else "", section)


def _replace(file: Path, before: str, section: str) -> None:
    """Replace the file by this text and the section, at once: a router that reads it never sees half of it."""
    from services.router.adapters.key_file import load_keys

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
