"""How long a step takes, learnt from the steps that were run.

The time of a step is modelled as linear in what it does: a fixed part (reading the weights), tokens of
prompts, tokens of decoding sequences, and the query-key pairs and context that attention reads. The
coefficients follow the machine by recursive least squares with forgetting (Ljung, System
Identification, 1999, section 11.2).
"""

from __future__ import annotations

from dataclasses import dataclass

_FORGETTING = 0.998
_PRIOR_VARIANCE = 1e3
_MIN_STEPS = 16
_MAX_VARIANCE = 1e6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step does. A sequence that computes one token beyond its first output counts as decoding."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_pairs: int = 0  # query-key pairs of the prefill tokens
    decode_context: int = 0  # keys read by the decode tokens

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def features(self) -> tuple[float, ...]:
        """Scaled to the order of one, so that the regression is well conditioned."""
        return (
            1.0,
            self.prefill_tokens / 256.0,
            self.decode_tokens / 16.0,
            self.prefill_pairs / 65536.0,
            self.decode_context / 8192.0,
        )


class StepTimeModel:
    """Predicts nanoseconds of a step from its StepWork."""

    def __init__(self) -> None:
        size = len(StepWork().features())
        self._milliseconds = [0.0] * size
        self._covariance = [[_PRIOR_VARIANCE * (i == j) for j in range(size)] for i in range(size)]
        self.steps_seen = 0

    @property
    def is_trained(self) -> bool:
        return self.steps_seen >= _MIN_STEPS

    def observe(self, work: StepWork, duration_ns: int) -> None:
        """Learn from one measured step."""
        x = work.features()
        p = self._covariance
        size = range(len(x))
        px = [sum(p[i][j] * x[j] for j in size) for i in size]
        scale = _FORGETTING + sum(x[i] * px[i] for i in size)
        error = duration_ns / 1e6 - sum(self._milliseconds[i] * x[i] for i in size)
        for i in size:
            self._milliseconds[i] += px[i] / scale * error
            row = p[i]
            for j in size:
                row[j] = (row[j] - px[i] * px[j] / scale) / _FORGETTING
        # Without excitation in some direction forgetting lets its variance grow without bound.
        if max(p[i][i] for i in size) > _MAX_VARIANCE:
            self._covariance = [[_PRIOR_VARIANCE * (i == j) for j in size] for i in size]
        self.steps_seen += 1

    def predict_ns(self, work: StepWork) -> float:
        """Expected duration in nanoseconds; no part of a step is taken to have negative cost."""
        return 1e6 * sum(max(0.0, c) * f for c, f in zip(self._milliseconds, work.features(), strict=True))

    def share_without(self, work: StepWork, without: StepWork) -> float:
        """Fraction of a step with `work` that a step with only `without` of it would have taken, 0 to 1.

        Falls back to the share of tokens until enough steps have been seen.
        """
        whole = self.predict_ns(work) if self.is_trained else 0.0
        if whole <= 0.0:
            return without.tokens / work.tokens if work.tokens else 1.0
        return min(1.0, self.predict_ns(without) / whole)
