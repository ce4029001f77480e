"""How many servers of a fleet there should be."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The rule for the number of replicas: as many as are needed for each to have `choices`, within limits.

    Args:
        least, most: limits of the number of replicas.
        choices: how many choices of requests, waiting or running, one replica is to have.
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
            raise ValueError(
                f"--replicas is {self.least} and --max-replicas {self.most}; give 1 or more, and the second no lower"
            )
        if self.choices < 1:
            raise ValueError(f"--scale-at is {self.choices}; it must be at least 1")
        if not self.down_after_s >= 0:
            raise ValueError(f"--scale-down-seconds is {self.down_after_s:g}; it must be 0 or more")


class Scaler:
    """Follows a rule: the most replicas that were needed within `down_after_s` are wanted."""

    def __init__(self, rule: ScalingRule) -> None:
        self.rule = rule
        self._needed: deque[tuple[int, int]] = deque()  # when, and how many; falling

    def wanted(self, choices: int, now: int) -> int:
        """How many replicas are wanted for so many choices in all; to be asked in order of `now`, in nanoseconds."""
        rule, needed = self.rule, self._needed
        count = min(max(math.ceil(choices / rule.choices), rule.least), rule.most)
        while needed and needed[-1][1] <= count:
            needed.pop()
        needed.append((now, count))
        while needed[0][0] < now - rule.down_after_s * 1e9:
            needed.popleft()
        return needed[0][1]
