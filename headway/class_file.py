"""The file that says which classes of requests there are, and what each API key may use of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.policy.service_class import BUILT_IN, ClassTable, InvalidClasses, table_of

_KEYS = ("default", "service_tiers", "class", "key")
_HEADER = re.compile(r"\s*\[\[?\s*([\w-]+)")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeyClasses:
    """What requests with an API key may be.

    Args:
        default: class of those that name none; empty for the table's.
        best: the most urgent class that they may name; empty for any.
    """

    default: str = ""
    best: str = ""


@dataclass(frozen=True, slots=True)
class ClassFile:
    """What the file says.

    Args:
        keys: by the SHA-256 of each key.
        path: where it was read; empty where there is no file.
    """

    table: ClassTable = BUILT_IN
    keys: dict[bytes, KeyClasses] = field(default_factory=dict)
    path: str = ""


def read_class_file(path: str) -> ClassFile:
    """Read and check the file.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None
    try:
        content = tomllib.loads(text)
        unknown = next((key for key in content if key not in _KEYS), None)
        if unknown is not None:
            raise InvalidClasses(f"{unknown!r} is unknown; the file has {', '.join(_KEYS)}", unknown)
        table = table_of(content)
        return ClassFile(table, _keys_of(content, table), path)
    except InvalidClasses as error:
        raise ValueError(f"{path}, line {line_of(text, *error.path)}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _keys_of(content: Mapping[str, Any], table: ClassTable) -> dict[bytes, KeyClasses]:
    listed = content.get("key", [])
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise InvalidClasses("key must be a list; write [[key]] once for each", "key")
    keys: dict[bytes, KeyClasses] = {}
    for number, given in enumerate(listed):
        try:
            digest, classes = _key_of(given, table)
            if digest in keys:
                raise InvalidClasses("two keys have this sha256; name each once", "sha256")
        except InvalidClasses as error:
            raise InvalidClasses(str(error), "key", number, *error.path) from None
        keys[digest] = classes
    return keys


def _key_of(given: Mapping[str, Any], table: ClassTable) -> tuple[bytes, KeyClasses]:
    for name, value in given.items():
        if name not in ("sha256", "default", "best"):
            raise InvalidClasses(f"{name!r} is unknown; a key has sha256, default, best", name)
        if not isinstance(value, str):
            raise InvalidClasses(f"{name} is {value!r}; it must be a string", name)
        if name != "sha256" and value not in (each.name for each in table):
            known = ", ".join(each.name for each in table)
            raise InvalidClasses(f"{name} is {value!r}, which is no class; there are {known}", name)
    digest = given.get("sha256", "").lower()
    if not _SHA256.fullmatch(digest):  # it may be the key itself, which no log should have
        raise InvalidClasses("a key has no sha256 of 64 hexadecimal digits; never write the key itself", "sha256")
    classes = KeyClasses(given.get("default", ""), given.get("best", ""))
    if classes.default and classes.best and table.rank(classes.default) < table.rank(classes.best):
        raise InvalidClasses(f"default is {classes.default!r}, more urgent than best, {classes.best!r}", "default")
    return bytes.fromhex(digest), classes


def line_of(text: str, *path: str | int) -> int:
    """The line, from 1, of what a path of keys and positions leads to in TOML, or else of the closest thing before it.

    Values that run over several lines are not told from keys.
    """
    outer, number, key = path[0] if path else "", 0, path[-1] if len(path) > 1 else None
    if len(path) > 1 and isinstance(path[1], int):
        number, key = path[1], path[2] if len(path) > 2 else None
    table, seen, found = "", -1, 1
    for line, words in enumerate(text.splitlines(), 1):
        header = _HEADER.match(words)
        if header:
            table = header[1]
            seen += table == outer
            if table == outer and seen == number:
                found = line
                if key is None:
                    return line
        elif (table == outer and seen == number and _gives(words, key)) or (not table and _gives(words, outer)):
            return line
    return found


def _gives(line: str, key: str | int | None) -> bool:
    return re.match(rf"\s*[\"']?{re.escape(str(key))}[\"']?\s*[.=]", line) is not None
