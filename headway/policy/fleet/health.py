"""Whether a backend gets requests: failures open its breaker, and what comes back begins slowly.

A breaker is closed, open, or half open. It opens after some failures in a row, or where most of the latest answers have
failed, and stays so for a time that doubles with each further ejection (as Envoy's outlier detection has it). Then one
request at a time may try. Times are the caller's nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.policy.step.request import NEVER

# Answers that a share of failures is judged by, and the share that ejects.
_JUDGED, _MOST_FAILED = 20.0, 0.5
# The share of its weight that a backend begins with.
LEAST_SHARE = 0.1
# One ejection is forgotten in so many times the longest ejection.
_FORGETTING = 2.0


@dataclass(frozen=True, slots=True)
class HealthRule:
    """When a backend gets no requests."""

    # every_s, timeout_s: seconds between two questions whether it is well, and for the answer.
    every_s: float = 5.0
    timeout_s: float = 2.0
    failures: int = 3  # how many in a row eject it, of answers as of questions
    # eject_s, most_eject_s: seconds of the first ejection, and of the longest.
    eject_s: float = 5.0
    most_eject_s: float = 300.0
    slow_start_s: float = 30.0  # seconds in which a backend that has come back gets its whole share again


class Breaker:
    """The state of one backend.

    Attributes:
        ejections: how often it was ejected, as far as that is not forgotten.
        is_down: questions whether it is well went unanswered.
    """

    def __init__(self, rule: HealthRule) -> None:
        self.rule = rule
        self.ejections = 0
        self.is_down = False
        self._failed_in_row = self._silent_in_row = 0
        self._answers = self._failed = 0.0  # of late; both fade
        self._open_until = 0  # 0 where it is closed
        self._tries_since = 0  # a request tries whether it is well again, since then
        self._back_since = -NEVER
        self._ejected_at = 0

    def allows(self, now: int) -> bool:
        """Whether a request may be sent there."""
        if self.is_down or now < self._open_until:
            return False
        lost_ns = self.rule.most_eject_s * 1e9  # a try of which nothing was heard is not waited for
        return not (self._open_until and self._tries_since and now - self._tries_since < lost_ns)

    def share(self, now: int) -> float:
        """The share of its weight that it is to have, above 0 to 1."""
        passed = (now - self._back_since) / (self.rule.slow_start_s * 1e9)
        return min(1.0, LEAST_SHARE + (1.0 - LEAST_SHARE) * max(0.0, passed))

    def wait_ns(self, now: int) -> int:
        """Nanoseconds until it may be tried again; 0 where it may now, or nobody knows."""
        return max(0, self._open_until - now)

    def state(self, now: int) -> str:
        """One word: closed, open, half_open, or down."""
        if self.is_down:
            return "down"
        return "closed" if not self._open_until else "open" if now < self._open_until else "half_open"

    def sent(self, now: int) -> None:
        """Note a request that is sent there."""
        if self._open_until:
            self._tries_since = now

    def gave_up(self) -> None:
        """Note that a request has ended of which nothing can be said, such as one whose client went away."""
        self._tries_since = 0

    def succeeded(self, now: int) -> None:
        """Note an answer without a failure."""
        self._failed_in_row = 0
        self._count(0.0)
        if self._open_until and now >= self._open_until:
            self._close(now)

    def failed(self, now: int) -> None:
        """Note a failure."""
        self._failed_in_row += 1
        self._count(1.0)
        is_outlier = self._answers >= _JUDGED / 2 and self._failed > _MOST_FAILED * self._answers
        if self._tries_since or (not self._open_until and (self._failed_in_row >= self.rule.failures or is_outlier)):
            self._eject(now)

    def asked(self, is_well: bool, now: int) -> None:
        """Note what came of the question whether it is well."""
        self._silent_in_row = 0 if is_well else self._silent_in_row + 1
        if is_well and self.is_down:
            self.is_down = False
            self._close(now)
        elif self._silent_in_row >= self.rule.failures:
            self.is_down = True

    def begin(self, now: int) -> None:
        """Let a backend that is new get its share slowly."""
        self._close(now)

    def _count(self, failed: float) -> None:
        fading = 1.0 - 1.0 / _JUDGED
        self._answers = self._answers * fading + 1.0
        self._failed = self._failed * fading + failed

    def _eject(self, now: int) -> None:
        longest_ns = self.rule.most_eject_s * 1e9
        forgotten = int((now - self._ejected_at) / (_FORGETTING * longest_ns)) if self.ejections else 0
        self.ejections = max(0, self.ejections - forgotten) + 1
        length_ns = min(longest_ns, self.rule.eject_s * 1e9 * 2.0 ** min(60, self.ejections - 1))
        self._open_until, self._ejected_at, self._tries_since = now + round(length_ns), now, 0
        self._failed_in_row, self._answers, self._failed = 0, 0.0, 0.0

    def _close(self, now: int) -> None:
        self._open_until = self._tries_since = self._failed_in_row = 0
        self._answers = self._failed = 0.0
        self._back_since = now


class RetryBudget:
    """Lets a share of requests be sent again, so that retries of a fleet in trouble are no load of their own.

    Args:
        per_retry: how many requests earn a retry.
        most: how many retries may be saved up.
    """

    def __init__(self, per_retry: int = 5, most: int = 20) -> None:
        self._per_retry, self._most = per_retry, most * per_retry
        self._earned = self._most

    @property
    def left(self) -> int:
        """How many retries there are."""
        return self._earned // self._per_retry

    def earn(self) -> None:
        """Note a request."""
        self._earned = min(self._most, self._earned + 1)

    def spend(self) -> bool:
        """Take a retry, if there is one left."""
        if not self.left:
            return False
        self._earned -= self._per_retry
        return True
