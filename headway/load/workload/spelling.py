"""What a misspelt name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence: the nearest known name, or all of them."""
    known = list(known)
    near = get_close_matches(name, known, 1)
    return f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(known)}"
