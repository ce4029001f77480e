"""How many tokens a request will generate: no more than it allows, and about what its class has generated of late."""

from __future__ import annotations

import math

from headway.policy.step.request import Sequence

_FOLLOWED = 0.05


class OutputLengths:
    def __init__(self) -> None:
        self._means: dict[str, float] = {}  # by class

    def ended(self, sequence: Sequence) -> None:
        """A sequence came to its own end."""
        name, length = sequence.service.name, sequence.output_len
        mean = self._means.setdefault(name, float(length))
        self._means[name] = mean + _FOLLOWED * (length - mean)

    def expected(self, sequence: Sequence) -> int:
        allowed = sequence.max_len - sequence.prompt_len
        return min(allowed, round(self._means.get(sequence.service.name, allowed)))


class OutputBound:
    """A length that hardly any output exceeds: the mean of late outputs plus four mean deviations.

    The filter is that of TCP's retransmission timeout (Jacobson 1988), which has the same task.
    """

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    def ended(self, length: int) -> None:
        """An output came to its own end."""
        if not self._mean:
            self._mean, self._deviation = float(length), length / 2
            return
        error = length - self._mean
        self._mean += error / 8
        self._deviation += (abs(error) - self._deviation) / 4

    def expected(self, allowed: int) -> int:
        """The tokens to expect at most of an output that may have `allowed`; all of these until an output was seen."""
        return min(allowed, math.ceil(self._mean + 4 * self._deviation)) if self._mean else allowed
