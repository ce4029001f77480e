"""How the values of `headway bench` are read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any

from headway.bench.errors import BenchError


def fold_lists(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """`--goodput ttft:200 tpot:50` becomes `--goodput "ttft:200 tpot:50"`: an option here takes one value.

    The values of such an option hold a colon and go on until an argument does not.
    """
    folded: list[str] = []
    is_open = False
    for argument in arguments:
        is_value = is_open and ":" in argument and not argument.startswith("-")
        if is_value and folded[-1] not in options:
            folded[-1] += f" {argument}"
        else:
            folded.append(argument)
        is_open = is_value or argument.partition("=")[0] in options
    return folded


def as_percentiles(text: str) -> tuple[float, ...]:
    """From "50,90,99.9".

    Raises:
        BenchError: a part is not a number above 0 and below 100.
    """
    found = []
    for part in text.split(","):
        try:
            p = float(part)
        except ValueError:
            p = math.nan
        if not 0 < p < 100:
            raise BenchError(f"--metric-percentiles has {part!r}; give numbers above 0 and below 100, as 50,90,99.9")
        found.append(p)
    return tuple(sorted(set(found)))


def key_values(option: str, values: Sequence[str]) -> dict[str, str]:
    """From KEY=VALUE each.

    Raises:
        BenchError: there is no = in one, or nothing before it.
    """
    pairs = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not (equals and key.strip()):
            raise BenchError(f"{option} is {value!r}; write it as KEY=VALUE")
        pairs[key.strip()] = rest.strip()
    return pairs


def as_json_object(option: str, text: str | None) -> dict[str, Any]:
    """Raises BenchError when the text is not a JSON object."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{option} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BenchError(f'{option} is a JSON {type(found).__name__}; it must be an object, as {{"top_k": 20}}')
    return found
