"""The file that says which tenants there are, what they may use, and which API keys are theirs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config_files.toml import HEADER, line_of, parse, read_text
from headway.policy.admission.tenants import DEFAULT_TENANT, NO_TENANTS, TenantTable, tenants_of
from headway.policy.objectives.service_class import A_STRING, STRINGS, ClassTable, InvalidEntry, check_entry, entries_of

_FILE_KEYS = ("total", "tenant", "key")
_KEY_KEYS = dict.fromkeys(("tenant", "sha256", "default", "best", "created", "note"), A_STRING)
_KEY_KEYS |= dict.fromkeys(("models", "scopes"), STRINGS)
# What a key may be limited to, and the routes that belong to each. Other routes are open to every key.
SCOPES = {
    "generate": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/infer"),
    "embed": ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"),
    "batches": ("/v1/files", "/v1/batches"),
}
_SHA256 = re.compile(r"[0-9a-f]{64}")


def key_digest(key: bytes) -> bytes:
    """The digest that a key is known by."""
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Access:
    """What an API key gives access to."""

    tenant: str = DEFAULT_TENANT
    default: str = ""  # class of requests that name none; empty for the table's
    best: str = ""  # the most urgent class that they may name; empty for any
    # created, note: notes for the person who keeps the keys.
    created: str = ""
    note: str = ""
    models: tuple[str, ...] = ()  # the models that they may name; empty for any
    scopes: tuple[str, ...] = ()  # what they may be for, of SCOPES; empty for all

    def allows(self, path: str) -> bool:
        """Whether requests to a route may come in. Nobody looks at the models in a batch before it runs."""
        if self.models and path.startswith("/v1/batches"):
            return False
        if not self.scopes:
            return True
        of_path = [name for name, routes in SCOPES.items() if path.startswith(routes)]
        return not of_path or of_path[0] in self.scopes


@dataclass(frozen=True, slots=True)
class TenantFile:
    """The contents of a file of tenants."""

    table: TenantTable = NO_TENANTS
    keys: dict[bytes, Access] = field(default_factory=dict)  # what each key gives access to, by its SHA-256
    path: str = ""  # where it was read; empty where there is no file
    text: str = field(default="", repr=False)

    def with_key(self, key: str, access: Access, new_tenant: bool = False) -> TenantFile:
        """The file with one more key at its end, and with its tenant where that is new. All else stays as written.

        Raises:
            ValueError: the tenant is unknown or is there already, or the file would not be right.
        """
        if new_tenant and access.tenant in self.table.weights:
            raise ValueError(f"{self.path} has tenant {access.tenant!r} already; leave out --new-tenant")
        if not new_tenant and access.tenant not in (*self.table.weights, DEFAULT_TENANT):
            known = ", ".join(each.name for each in self.table) or "none"
            raise ValueError(f"{self.path} has no tenant {access.tenant!r} (it has {known}); --new-tenant adds it")
        values: dict[str, str | list[str]] = {"tenant": access.tenant, "sha256": key_digest(key.encode()).hex()}
        values |= {"default": access.default, "best": access.best, "models": list(access.models)}
        values |= {"scopes": list(access.scopes), "created": access.created, "note": access.note}
        entry = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items() if value]
        tenant = ["[[tenant]]", f"name = {json.dumps(access.tenant, ensure_ascii=False)}", ""] if new_tenant else []
        before = [self.text.rstrip(), ""] if self.text.strip() else []
        return parse_tenant_file(self.path, "\n".join([*before, *tenant, "[[key]]", *entry, ""]))

    def without_key(self, digest: bytes) -> TenantFile:
        """The file without a key of it. All else stays as written.

        Raises:
            ValueError: the file is written in a way in which the key cannot be cut out.
        """
        lines, number = self.text.splitlines(keepends=True), list(self.keys).index(digest)
        first = line_of(self.text, "key", number) - 1
        headers = (at for at in range(first + 1, len(lines)) if HEADER.match(lines[at]))
        end = next(headers, len(lines))
        while end < len(lines) and lines[end - 1].lstrip().startswith("#"):  # a comment above what comes next
            end -= 1
        found = parse_tenant_file(self.path, "".join(lines[:first] + lines[end:]))
        if found.keys != {each: access for each, access in self.keys.items() if each != digest}:
            raise ValueError(f"{self.path}, line {first + 1}: cannot remove this key automatically; remove it by hand")
        return found

    def check_classes(self, classes: ClassTable) -> None:
        """See that the classes which keys name are in the table.

        Raises:
            ValueError: naming the file, the line, and what is wrong there.
        """
        for number, access in enumerate(self.keys.values()):
            try:
                _check_classes(access, classes)
            except InvalidEntry as error:
                line = line_of(self.text, "key", number, *error.path)
                raise ValueError(f"{self.path}, line {line}: {error}") from None


def read_tenant_file(path: str) -> TenantFile:
    """Read and check the file, as far as that can be without the classes.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    return parse_tenant_file(path, read_text(path))


def parse_tenant_file(path: str, text: str) -> TenantFile:
    """Check a text like read_tenant_file() checks a file; `path` names it in errors."""

    def make(content: Mapping[str, Any]) -> TenantFile:
        table = tenants_of(content)
        return TenantFile(table, _keys_of(content, table), path, text)

    return parse(path, text, _FILE_KEYS, make)


def _keys_of(content: Mapping[str, Any], table: TenantTable) -> dict[bytes, Access]:
    keys: dict[bytes, Access] = {}

    def add(given: Mapping[str, Any]) -> None:
        digest, access = _key_of(given, table)
        if digest in keys:
            raise InvalidEntry("two keys have this sha256; name each once", "sha256")
        keys[digest] = access

    entries_of(content, "key", add)
    return keys


def _key_of(given: Mapping[str, Any], table: TenantTable) -> tuple[bytes, Access]:
    check_entry(given, "a key", _KEY_KEYS)
    digest = given.get("sha256", "").lower()
    if not _SHA256.fullmatch(digest):  # it may be the key itself, which no log should have
        raise InvalidEntry("a key has no sha256 of 64 hexadecimal digits; never write the key itself", "sha256")
    tenant, names = given.get("tenant", DEFAULT_TENANT), [each.name for each in table]
    if tenant not in (*names, DEFAULT_TENANT):
        raise InvalidEntry(
            f"tenant is {tenant!r}, which is not a tenant; there are {', '.join(names) or 'none'}", "tenant"
        )
    unknown = [name for name in given.get("scopes", ()) if name not in SCOPES]
    if unknown:
        raise InvalidEntry(f"scopes has {unknown[0]!r:.80}; choose of {', '.join(SCOPES)}", "scopes")
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    values: dict[str, Any] = {name: value for name, value in given.items() if name != "sha256"}
    return bytes.fromhex(digest), Access(**(values | lists))


def _check_classes(access: Access, classes: ClassTable) -> None:
    known = [each.name for each in classes]
    for name, value in (("default", access.default), ("best", access.best)):
        if value and value not in known:
            raise InvalidEntry(f"{name} is {value!r}, which is not a class; there are {', '.join(known)}", name)
    if access.default and access.best and classes.rank(access.default) < classes.rank(access.best):
        raise InvalidEntry(f"default is {access.default!r}, more urgent than best, {access.best!r}", "default")
