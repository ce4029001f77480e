"""`headway keys`: the API keys in a file of tenants."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.commands import fail
from headway.cli.help import Command, Group
from headway.config_files.tenants import Access, TenantFile, key_digest, parse_tenant_file, read_tenant_file
from headway.files import write_files

PREFIX = "sk-hw-"
SHOWN_DIGITS = 12  # digits of a key's SHA-256, by which it is listed
_LEAST_DIGITS = 6

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
    note: Annotated[str, typer.Option(help="A note that identifies the key later.")] = "",
) -> None:
    """Create a key, print it, and write its SHA-256 to the file. The key itself is stored nowhere."""
    if not new_tenant and not path.exists():
        fail(f"there is no file {path}; --new-tenant creates it and adds the tenant")
    key = PREFIX + secrets.token_urlsafe(32)
    created = datetime.datetime.now(datetime.UTC).date().isoformat()
    with _editing(path, may_be_new=new_tenant) as file:
        changed = file.with_key(key, Access(tenant, default, best, created, note), new_tenant)
        write_files({path.resolve(): changed.text.encode()})
    print(key)
    _tell("a running server accepts the key after `kill -HUP PID` (SIGHUP); the key is not shown again")


@app.command("list", cls=Command)
def list_keys(path: _File) -> None:
    """Print the keys: the first digits of the SHA-256, tenant, date, classes, note."""
    with _one_line():
        file = read_tenant_file(str(path))
    rows = [
        (digest.hex()[:SHOWN_DIGITS], access.tenant, access.created, access.default, access.best, access.note)
        for digest, access in file.keys.items()
    ]
    heading = ("KEY", "TENANT", "CREATED", "DEFAULT", "BEST", "NOTE")
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for row in (heading, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


@app.command(cls=Command)
def revoke(
    path: _File,
    key: Annotated[str, typer.Argument(help="The key, or first digits of its SHA-256 as listed.", metavar="KEY")],
) -> None:
    """Take a key out of the file."""
    with _editing(path) as file:
        digest = _find(file, key)
        write_files({path.resolve(): file.without_key(digest).text.encode()})
    _tell(f"revoked {digest.hex()[:SHOWN_DIGITS]}; a running server refuses it after `kill -HUP PID` (SIGHUP)")


def _find(file: TenantFile, key: str) -> bytes:
    whole = key_digest(key.encode())
    if whole in file.keys:
        return whole
    found = [digest for digest in file.keys if digest.hex().startswith(key.lower())]
    if len(key) < _LEAST_DIGITS or len(found) != 1:  # it may be a whole key, which no terminal should show again
        raise ValueError(
            f"{len(found)} keys of {file.path} begin with this; give the key, or at least {_LEAST_DIGITS} digits of "
            "one as shown by headway keys list"
        )
    return found[0]


@contextlib.contextmanager
def _editing(path: Path, may_be_new: bool = False) -> Iterator[TenantFile]:
    """Yield the file, and keep others from editing it meanwhile. An error in it, or in the edit, is one line."""
    with _one_line(), open(path.resolve().with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = may_be_new and not path.exists()
        yield parse_tenant_file(str(path), "") if is_new else read_tenant_file(str(path))


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
