"""How long first tokens of a backend take, learnt from its answers.

The time is taken to be linear in what a request waits for: a fixed part, the tokens of prompts that are computed until
then, and the choices that run beside. None of these saves time, so no coefficient is negative: answers of a busy
machine vary by a factor of two, and where parts come together, plain least squares would give one of them a large
negative cost and the others as much too much. Squares count by the product of the measured and the expected time, so
that neither the long answers nor the short ones decide alone, and those of long ago count less and less. The solution
is found by coordinate descent (Franc, Hlavac and Navara, Sequential Coordinate-wise Algorithm for the Non-negative
Least Squares Problem, 2005), from the one before.
"""

from __future__ import annotations

from operator import mul

from headway.policy.step.step_time import StepWork

_KEPT = 0.98  # of what is known, with each answer
_SWEEPS = 2  # the next answer goes on from here
_LEAST_ANSWERS = 8
_TOKENS, _CHOICES = 256.0, 4.0  # what makes the parts similar in size


class FirstTokenTimes:
    """Predicts the time to first token of a backend.

    Attributes:
        is_trained: enough answers were seen.
    """

    def __init__(self) -> None:
        self._ms = [0.0, 0.0, 0.0]  # of the fixed part, of _TOKENS, and of _CHOICES
        self._products = [[0.0] * 3 for _ in range(3)]
        self._times = [0.0, 0.0, 0.0]
        self._answers = 0

    @property
    def is_trained(self) -> bool:
        return self._answers >= _LEAST_ANSWERS

    def observe(self, work: StepWork, ttft_ns: int) -> None:
        """Learn from an answer: what it waited for, and for how long."""
        parts, took = _parts(work), max(1e-3, ttft_ns / 1e6)
        expected = sum(map(mul, self._ms, parts)) if self.is_trained else took
        weight = 1.0 / (took * max(expected, 1e-3))
        for row, part in enumerate(parts):
            self._times[row] = _KEPT * self._times[row] + weight * part * took
            known = self._products[row]
            for column, other in enumerate(parts):
                known[column] = _KEPT * known[column] + weight * part * other
        self._answers += 1
        for _ in range(_SWEEPS):
            for at, known in enumerate(self._products):
                left = self._times[at] - sum(map(mul, known, self._ms))
                if known[at] > 0.0:
                    self._ms[at] = max(0.0, self._ms[at] + left / known[at])

    def predict_ns(self, work: StepWork) -> float:
        """The expected nanoseconds; 0 while too few were measured."""
        return 1e6 * sum(map(mul, self._ms, _parts(work))) if self.is_trained else 0.0

    def prefill_ns(self, tokens: int) -> float:
        """The nanoseconds that so many more tokens of prompts take."""
        return 1e6 * self._ms[1] * tokens / _TOKENS


def _parts(work: StepWork) -> tuple[float, float, float]:
    return 1.0, work.prefill_tokens / _TOKENS, work.decode_tokens / _CHOICES
