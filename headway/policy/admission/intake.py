"""How much of what has come a step loop takes up between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

# Messages are read for this long between two steps: a crowd that arrives at once adds no more than this to a step.
INTAKE_NS = 2_000_000
T = TypeVar("T")


def taken_up(messages: Iterable[T], clock: Callable[[], int]) -> Iterator[T]:
    """Yield messages for INTAKE_NS at most. The rest wait for the next call, because a step comes first."""
    until = 0
    for message in messages:
        until = until or clock() + INTAKE_NS
        yield message
        if clock() >= until:
            return
