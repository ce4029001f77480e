"""TOML files of entries, in which whatever is wrong is named with its line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headway.policy.objectives.service_class import ANYTHING, InvalidEntry, check_entry

T = TypeVar("T")
MOST = 1e9  # of a number of a file where nothing else is said, such as seconds
HEADER = re.compile(r"\s*\[\[?\s*([\w-]+)")


def read_text(path: str) -> str:
    """Raises ValueError, one line, where the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None


def parse(path: str, text: str, keys: tuple[str, ...], make: Callable[[dict[str, Any]], T]) -> T:
    """What `make` makes of a file with these keys at its top.

    Raises:
        ValueError: naming the file, the line, and what is wrong there.
    """
    try:
        content = tomllib.loads(text)
        unknown = next((key for key in content if key not in keys), None)
        if unknown is not None:
            raise InvalidEntry(f"{unknown!r} is unknown; the file has {', '.join(keys)}", unknown)
        return make(content)
    except InvalidEntry as error:
        raise ValueError(f"{path}, line {line_of(text, *error.path)}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def line_of(text: str, *path: str | int) -> int:
    """The line, from 1, of what a path of keys and positions leads to in TOML, or else of the closest thing before it.

    Values that run over several lines are not told from keys.
    """
    outer, number, key = path[0] if path else "", 0, path[-1] if len(path) > 1 else None
    if len(path) > 1 and isinstance(path[1], int):
        number, key = path[1], path[2] if len(path) > 2 else None
    table, seen, found = "", -1, 1
    for line, words in enumerate(text.splitlines(), 1):
        header = HEADER.match(words)
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


def check_keys(entry: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    """Raise InvalidEntry for a key that a table does not have."""
    check_entry(entry, what, dict.fromkeys(keys, ANYTHING))


def number(entry: Mapping[str, Any], key: str, least: float, most: float = MOST) -> float:
    """The number of a key, which must be there. Raises InvalidEntry."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        said = f"{key} is {value!r}" if key in entry else f"{key} is missing"
        raise InvalidEntry(f"{said}; give a number from {least:g} to {most:g}", key)
    return value


def whole_number(entry: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """The whole number of a key, which must be there. Raises InvalidEntry."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        said = f"{key} is {value!r}" if key in entry else f"{key} is missing"
        raise InvalidEntry(f"{said}; give a whole number from {least} to {most}", key)
    return value
