"""How the values of flags are read that are more than a number or a word.

What raises a BenchError does not name the flag: who reads the command line does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from headway.load.errors import BenchError
from headway.policy.objectives.objectives import checked_objectives, parse_objectives

FAILURES, IN_FLIGHT = "failures", "in-flight"  # of requests: what may end a run early
THROUGHPUT = "throughput"
REPEATED = ("ttft", "tpot", "itl", "e2el", THROUGHPUT)  # figures that runs may be repeated for


def percentiles(text: str) -> tuple[float, ...]:
    """Parse percentiles like "50,90,99.9". Raises BenchError where a part is not a number above 0 and below 100."""
    found = []
    for part in text.split(","):
        try:
            p = float(part)
        except ValueError:
            p = math.nan
        if not 0 < p < 100:
            raise BenchError(f"{part!r} is not a percentile; give numbers above 0 and below 100, such as 50,90,99.9")
        found.append(p)
    return tuple(sorted(set(found)))


def token_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens like "16,256,1024". Raises BenchError where a part is not a whole number."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BenchError(f"{text!r} is not a list of lengths; give token counts, such as 16,256,1024") from None


def key_values(values: Sequence[str]) -> dict[str, str]:
    """Parse texts of the form KEY=VALUE. Raises BenchError where there is no = in one, or nothing before it."""
    pairs = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not (equals and key.strip()):
            raise BenchError(f"{value!r} is not KEY=VALUE")
        pairs[key.strip()] = rest.strip()
    return pairs


def parse_variants(values: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse texts of the form NAME=A,B. Raises BenchError where one is not, or repeats a name or a value."""
    found: dict[str, tuple[str, ...]] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        variants = tuple(part.strip() for part in rest.split(","))
        if not equals or not name.isidentifier() or name == "port" or name in found:
            raise BenchError(f"{value!r} is not NAME=A,B with a new name of letters, digits and _")
        if len(set(variants)) < len(variants):
            raise BenchError(f"{value!r} has a value twice")
        found[name] = variants
    return found


def json_object(text: str) -> dict[str, Any]:
    """Raises BenchError when the text is not a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BenchError(f'it is a JSON {type(found).__name__}; it must be an object, such as {{"top_k": 20}}')
    return found


def parse_goodput(values: Sequence[str]) -> dict[str, float]:
    """Objectives in ms, from `ttft:200`, `tpot:50` and the like; one value may hold several.

    Raises BenchError as `parse_objectives` does.
    """
    try:
        return parse_objectives(" ".join(values).replace(",", " ").split(), "--goodput")
    except ValueError as error:
        raise BenchError(str(error)) from None


def check_objectives(objectives: Mapping[str, float], where: str) -> dict[str, float]:
    """The same objectives. Raises BenchError, which names `where` they stand, as `parse_objectives` does."""
    try:
        return checked_objectives(objectives, where)
    except ValueError as error:
        raise BenchError(str(error)) from None


def parse_limits(text: str) -> dict[str, int]:
    """Parse limits like "failures:20,in-flight:500". Raises BenchError where a part is none."""
    found = {}
    for part in text.replace(" ", ",").split(","):
        key, _, value = part.partition(":")
        if key not in (FAILURES, IN_FLIGHT) or not value.isdecimal() or int(value) < 1:
            raise BenchError(f"{part!r} is no limit; give {FAILURES}:N or {IN_FLIGHT}:N, of 1 or more")
        found[key] = int(value)
    return found


def parse_widths(text: str) -> dict[str, float]:
    """Parse half widths of intervals in percent, such as "ttft:5,throughput:2", as shares.

    Raises:
        BenchError: a part is none.
    """
    found = {}
    for part in text.replace(" ", ",").split(","):
        key, _, value = part.partition(":")
        try:
            percent = float(value.removesuffix("%"))
        except ValueError:
            percent = math.nan
        if key not in REPEATED or not 0 < percent <= 100:
            raise BenchError(f"{part!r} is no interval; give KEY:PERCENT, above 0, with a key of {', '.join(REPEATED)}")
        found[key] = percent / 100
    return found
