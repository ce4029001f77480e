"""`headway keys`: the API keys in a file of tenants."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import fail
from headway.cli.help import Command, Group
from headway.config_files.key_file import SHOWN_DIGITS, add_key, revoke_key
from headway.config_files.tenants import SCOPES, Access, read_tenant_file

app = typer.Typer(
    cls=Group, add_completion=False, no_args_is_help=True, help="Manage the API keys of tenants: add, list, revoke."
)

_File = Annotated[Path, typer.Argument(help="The TOML file of headway serve --tenants.", metavar="FILE")]


@app.command(cls=Command)
def add(
    path: _File,
    tenant: Annotated[str, typer.Argument(help="Tenant of the key.", metavar="TENANT")],
    new_tenant: Annotated[
        bool, typer.Option("--new-tenant", help="Also add the tenant, without limits; create the file if needed.")
    ] = False,
    default: Annotated[str, typer.Option(help="Class of requests that name none.")] = "",
    best: Annotated[str, typer.Option(help="Most urgent class that requests may name.")] = "",
    model: Annotated[
        list[str] | None, typer.Option(help="Model that it may use; may be repeated. Default: all.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"What it may be used for, of {', '.join(SCOPES)}; may be repeated. Default: all."),
    ] = None,
    note: Annotated[str, typer.Option(help="A note that identifies the key later.")] = "",
) -> None:
    """Create a key, print it, and write its SHA-256 to the file. The key itself is stored nowhere."""
    if not new_tenant and not path.exists():
        fail(f"there is no file {path}; --new-tenant creates it and adds the tenant")
    access = Access(tenant, default, best, "", note, tuple(model or ()), tuple(scope or ()))
    with _one_line():
        key, _ = add_key(path, access, new_tenant)
    print(key)
    _tell("a running server accepts the key after `kill -HUP PID` (SIGHUP); the key is not shown again")


@app.command("list", cls=Command)
def list_keys(path: _File) -> None:
    """Print the keys: the first digits of the SHA-256, tenant, date, classes, models, scopes, note."""
    with _one_line():
        file = read_tenant_file(str(path))
    rows = [
        (
            *(digest.hex()[:SHOWN_DIGITS], access.tenant, access.created, access.default, access.best),
            *(",".join(access.models), ",".join(access.scopes), access.note),
        )
        for digest, access in file.keys.items()
    ]
    heading = ("KEY", "TENANT", "CREATED", "DEFAULT", "BEST", "MODELS", "SCOPES", "NOTE")
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for row in (heading, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@app.command(cls=Command)
def revoke(
    path: _File,
    key: Annotated[str, typer.Argument(help="The key, or first digits of its SHA-256 as listed.", metavar="KEY")],
) -> None:
    """Take a key out of the file."""
    with _one_line():
        digest, _ = revoke_key(path, key)
    _tell(f"revoked {digest.hex()[:SHOWN_DIGITS]}; a running server refuses it after `kill -HUP PID` (SIGHUP)")


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")


def _tell(said: str) -> None:
    print(f"headway: {said}", file=sys.stderr)
