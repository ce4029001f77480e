"""How values on the command line are read, and what is said of bad ones."""

from __future__ import annotations

import math
import re
import sys
from typing import NoReturn

import typer

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """Bytes, from 4096, 512M, 1.5GiB and the like; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or a number with K, M, G or T")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def limit(text: str) -> float:
    """A whole number from 1, or infinity for `none`."""
    if text.strip().lower() == "none":
        return math.inf
    if not text.strip().isascii() or not text.strip().isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is not a limit; write a whole number from 1, or none for no limit")
    return int(text)


def fail(message: str) -> NoReturn:
    """End the command with one line on standard error and exit code 2."""
    print(f"headway: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)
