"""Latency objectives in milliseconds: their names, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OBJECTIVES = ("ttft", "tpot", "e2el")
MOST_MS = 10**9


def parse_objectives(texts: Iterable[str], where: str) -> dict[str, float]:
    """The milliseconds of each objective, read from texts such as `ttft:200` and `tpot:50`.

    Args:
        where: what to name in an error, as the flag.

    Raises:
        ValueError: a text is not KEY:MS, its key is unknown or named twice, or its number is not above 0.
    """
    found: dict[str, float] = {}
    for text in texts:
        key, colon, number = text.partition(":")
        if not colon:
            raise ValueError(f"{where}: {text!r} is not KEY:MS; write for example ttft:200, with a key of {_known()}")
        if key in found:
            raise ValueError(f"{where}: {key!r} is named twice; give each of {_known()} at most once")
        try:
            found[key] = float(number)
        except ValueError:
            raise ValueError(
                f"{where}: {text!r}: {number!r} is not a number; write milliseconds, for example {key}:200"
            ) from None
    return checked_objectives(found, where)


def checked_objectives(objectives: Mapping[str, float], where: str) -> dict[str, float]:
    """The limits as floats. Raises ValueError at an unknown key, or a limit not above 0 and at most MOST_MS."""
    for key, limit in objectives.items():
        if key not in OBJECTIVES:
            raise ValueError(f"{where}: unknown objective {key!r}; use {_known()}")
        if not (isinstance(limit, int | float) and 0 < limit <= MOST_MS):
            raise ValueError(f"{where}: {key}:{limit} is not a limit; give milliseconds above 0, at most {MOST_MS:,}")
    return {key: float(limit) for key, limit in objectives.items()}


def _known() -> str:
    return ", ".join(OBJECTIVES)
