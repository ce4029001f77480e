"""Edits the API keys in a file of tenants, while others may read it or edit it too."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headway.config_files.tenants import Access, TenantFile, key_digest, parse_tenant_file, read_tenant_file
from headway.files import write_files

PREFIX = "sk-hw-"
SHOWN_DIGITS = 12  # digits of a key's SHA-256, by which it is listed
LEAST_DIGITS = 6


def add_key(path: Path, access: Access, new_tenant: bool = False) -> tuple[str, TenantFile]:
    """Make a key and write its digest to the file, which is made where the tenant is new and there is none.

    Returns:
        The key, which is stored nowhere, and the file as it is now.

    Raises:
        ValueError: the tenant is unknown or is there already, or the file would not be right.
        OSError: the file cannot be written.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    created = datetime.datetime.now(datetime.UTC).date().isoformat()
    with _editing(path, may_be_new=new_tenant) as file:
        changed = file.with_key(key, replace(access, created=created), new_tenant)
        write_files({path.resolve(): changed.text.encode()})
    return key, changed


def revoke_key(path: Path, key: str, keeps_one: bool = False) -> tuple[bytes, TenantFile]:
    """Take a key out of the file.

    Args:
        key: the key, or the first digits of its digest.
        keeps_one: refuse to take out the last one.

    Returns:
        The digest, and the file as it is now.

    Raises:
        ValueError: it is none of the file's keys, or not one alone, or cannot be cut out.
        OSError: the file cannot be written.
    """
    with _editing(path) as file:
        digest = find_key(file, key)
        if keeps_one and len(file.keys) == 1:
            raise ValueError(f"{path} has no other key, so everybody would have access; add one first")
        changed = file.without_key(digest)
        write_files({path.resolve(): changed.text.encode()})
    return digest, changed


def find_key(file: TenantFile, key: str) -> bytes:
    """The digest of a key, by itself or by the first digits of its digest. Raises ValueError."""
    whole = key_digest(key.encode())
    if whole in file.keys:
        return whole
    found = [digest for digest in file.keys if digest.hex().startswith(key.lower())]
    if len(key) < LEAST_DIGITS or len(found) != 1:  # it may be a whole key, which no terminal should show again
        raise ValueError(
            f"{len(found)} keys of {file.path} begin with this; give the key, or at least {LEAST_DIGITS} digits of "
            "one as shown by headway keys list"
        )
    return found[0]


@contextlib.contextmanager
def _editing(path: Path, may_be_new: bool = False) -> Iterator[TenantFile]:
    """Yield the file, and keep others from editing it meanwhile."""
    with open(path.resolve().with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_new = may_be_new and not path.exists()
        yield parse_tenant_file(str(path), "") if is_new else read_tenant_file(str(path))
