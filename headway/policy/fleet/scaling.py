"""How many servers of a fleet there should be."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.policy.fleet.backend import Ask, Backend

# First tokens of so many seconds are judged together, of at least so many requests. A fleet is short of replicas too
# where the quickest one should need more than so much of the objective for the next request.
JUDGED_S, JUDGED_LEAST, MOST_OF_OBJECTIVE = 30.0, 5, 0.8


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The rule for the number of replicas: as many as are needed for each to have `choices`, within limits.

    Raises:
        ValueError: a number is out of its range.
    """

    # least, most: limits of the number of replicas.
    least: int
    most: int
    choices: int  # how many choices of requests, waiting or running, one replica is to have
    down_after_s: float = 300.0  # a replica goes when it was not needed for so long; more are started at once

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

    def wanted(self, choices: int, now: int, least: int = 0) -> int:
        """How many replicas are wanted for so many choices in all; to be asked in order of `now`, in nanoseconds.

        Args:
            least: how many are needed for another reason.
        """
        rule, needed = self.rule, self._needed
        count = min(max(math.ceil(choices / rule.choices), rule.least, least), rule.most)
        while needed and needed[-1][1] <= count:
            needed.pop()
        needed.append((now, count))
        while needed[0][0] < now - rule.down_after_s * 1e9:
            needed.popleft()
        return needed[0][1]


class Promises:
    """How first tokens of a fleet keep their objectives, and whether the next one should.

    Args:
        attainment: the share, 0 to 1, that is to be in time.
    """

    def __init__(self, attainment: float) -> None:
        self._attainment = attainment
        self._judged: deque[tuple[int, bool]] = deque()
        self._latest: tuple[Ask, float] | None = None  # a request with an objective, in milliseconds

    def first_token(self, ask: Ask, objective_ms: float, took_ms: float, now: int) -> None:
        """Note a request that had its first token; without an objective it does not count."""
        if objective_ms < math.inf:
            self._judged.append((now, took_ms <= objective_ms))
            self._latest = ask, objective_ms

    def are_missed(self, backends: Sequence[Backend], now: int) -> bool:
        """Whether too many first tokens were late of late, or that of a request like the latest would be."""
        judged = self._judged
        while judged and judged[0][0] < now - JUDGED_S * 1e9:
            judged.popleft()
        kept = sum(in_time for _, in_time in judged)
        if len(judged) >= JUDGED_LEAST and kept < self._attainment * len(judged):
            return True
        if self._latest is None or not judged or not backends:
            return False
        ask, objective_ms = self._latest
        predicted = min(each.predicted_ttft_ns(ask) for each in backends)
        return predicted > MOST_OF_OBJECTIVE * objective_ms * 1e6
