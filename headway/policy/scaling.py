"""How many servers of a fleet there should be."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """As many replicas as hold `choices` each, within limits.

    Args:
        least, most: replicas.
        choices: of requests, that wait or run, which one replica is to have.
        down_after_s: a replica goes when it was not needed for so long; more are started at once.

    Raises:
        ValueError: a number is out of its range.
    """

    least: int
    most: int
    choices: int
    down_after_s: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"replicas are to be {self.least} to {self.most}; give 1 at least, and no fewer at most")
        if self.choices < 1:
            raise ValueError(f"a replica is to have {self.choices} choices; give at least 1")
        if not self.down_after_s >= 0:
            raise ValueError(f"a replica is to go after {self.down_after_s:g} s; give 0 or more")


class Scaler:
    """Follows a rule: the most replicas that were needed within `down_after_s` are wanted."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._needed: deque[tuple[int, int]] = deque()  # when, and how many; falling

    def wanted(self, choices: int, now: int) -> int:
        """Replicas for so many choices in all; asked in order of time, nanoseconds."""
        rule, needed = self.rule, self._needed
        count = min(max(math.ceil(choices / rule.choices), rule.least), rule.most)
        while needed and needed[-1][1] <= count:
            needed.pop()
        needed.append((now, count))
        while needed[0][0] < now - rule.down_after_s * 1e9:
            needed.popleft()
        return needed[0][1]
