"""What a field of a dataclass says of its flag on the command line:

max_num_seqs: Annotated[int, Flag("Maximum number of sequences in a step.", min=1)] = 256
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOKENS = {"": 1, "k": 1000, "K": 2**10, "m": 10**6, "M": 2**20}


class Needs(StrEnum):
    """What it takes to give a flag another value, from little to much."""

    RELOAD = "reload"  # SIGHUP reads the file again
    RESTART = "restart"
    LOAD = "another load"  # of the clients; no server can change it
    HARDWARE = "other hardware"
    MODEL = "another model"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. Its type and default are those of the field.

    Args:
        name: as "--timeout" or "--save/--no-save"; None is the field's name, with a --no- form for a truth value.
        short: a second name, as "-q".
        panel: heading that it is listed under in the help.
        choices: what a text may be.
        parse: makes the value of a text, or of all texts where it is `repeated`; raises ValueError, one line.
        default: the text that the field's default is made of, if the flag has `parse`.
        repeated: it may be given more than once.
        positional: it is no flag but an argument.
        common: one of the dozen that --help shows; --help-all shows the rest, too.
        needs: what another value takes once the server runs.
    """

    help: str
    name: str | None = None
    short: str | None = None
    panel: str | None = None
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[Any], Any] | None = None
    default: str | None = None
    repeated: bool = False
    positional: bool = False
    common: bool = False
    metavar: str | None = None
    envvar: tuple[str, ...] = ()
    needs: Needs = Needs.RESTART


@functools.cache
def flags_of(kind: type) -> tuple[tuple[Field[Any], Any, Flag | None], ...]:
    """Fields of a dataclass with their types and flags; and those that are dataclasses with flags themselves."""
    hints, found = get_type_hints(kind, include_extras=True), list[tuple[Field[Any], Any, Flag | None]]()
    for field in fields(kind):
        hint = hints[field.name]
        hint, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        flag = next((each for each in metadata if isinstance(each, Flag)), None)
        if flag is not None or (isinstance(hint, type) and is_dataclass(hint) and flags_of(hint)):
            found.append((field, hint, flag))
    return tuple(found)


def option(field: Field[Any], flag: Flag) -> str:
    """The flag as it is written on the command line, such as "--max-num-seqs"."""
    return flag.name.split("/")[0] if flag.name else "--" + field.name.replace("_", "-")


def size(text: str) -> int:
    """Bytes, from 4096, 512M, 1.5GiB and the like; units are powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M, G or T")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def tokens(text: str) -> int:
    """A number of tokens from 1: 4096, 4k (4,000) or 4K (4,096), as vLLM reads it. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15})([kKmM]?)", text.strip())
    if match is None or (number := int(match[1]) * _TOKENS[match[2]]) < 1:
        raise ValueError(f"{text!r} is not a number of tokens; write a whole number from 1, such as 4096, 4k or 4K")
    return number


def limit(text: str) -> float:
    """A whole number from 1, or infinity for `none`. Raises ValueError."""
    if text.strip().lower() == "none":
        return math.inf
    if not text.strip().isascii() or not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a limit; write a whole number from 1, or none for no limit")
    return int(text)


def said(texts: list[str]) -> list[str]:
    """Return the texts. Raises ValueError for an empty one, which a variable that is not set would make."""
    if not all(text.strip() for text in texts):
        raise ValueError("a value is empty")
    return texts


def listed(texts: list[str]) -> list[str]:
    """Texts, each one value or a JSON list of them. Raises ValueError."""
    values: list[str] = []
    for text in texts:
        if text.lstrip().startswith("["):
            try:
                found = json.loads(text)
            except ValueError:
                found = None
            if not (isinstance(found, list) and all(isinstance(value, str) for value in found)):
                raise ValueError(f'{text!r} is not a JSON list of strings, such as ["https://chat.example"]')
            values += found
        else:
            values.append(text)
    return said(values)


def value_of(name: str, hint: Any, flag: Flag, text: str) -> Any:
    """Parse a text as the value of a flag that is not repeated, as on the command line.

    Args:
        name: the flag's name, for messages.

    Raises:
        ValueError: it is no such value, or beyond its limits.
    """
    if flag.parse is not None:
        return flag.parse(text)
    if flag.choices and text not in flag.choices:
        raise ValueError(f"{name} is {text!r}; choose one of {', '.join(flag.choices)}")
    kind: Any = next((each for each in (get_args(hint) or (hint,)) if each is not type(None)), str)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} is {text!r}; it must be true or false")
        return text.lower() == "true"
    try:
        value: Any = kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be {'a whole number' if kind is int else 'a number'}") from None
    bounds = {"at least": flag.min, "at most": flag.max}
    for words, bound in bounds.items():
        if bound is not None and not (value >= bound if words == "at least" else value <= bound):
            raise ValueError(f"{name} is {text}; it must be {words} {bound:g}")
    return value


def arguments_of(name: str, value: object) -> list[str]:
    """A flag as a command line has it: a truth value is --name or --no-name."""
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    return [name, str(value)]
