"""Which changes are worth trying, and what the simulator says of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.changes import Change, applied, change_of
from headway.policy.step.options import SchedulingOptions

FACTORS = (0.25, 0.5, 2.0, 4.0)  # of --max-num-seqs
MOST_SEQS = 1024
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of a step
STALLS_MS = (10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)
POLICIES = ("slo", "fcfs")
# What a simulation may be off by beside its own spread, as a share of the gain's logarithm and in the logarithm.
RELATIVE_ERROR, ABSOLUTE_ERROR = 0.3, 0.02
NORMAL_80 = 1.2816  # standard deviations on either side of an 80 % bar


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of a candidate."""

    change: Change
    times: float  # how many times nearer to their objectives the slowest requests come
    # low, high: its 80 % bar.
    low: float
    high: float

    @classmethod
    def of(cls, change: Change, gains: Sequence[float]) -> Prediction:
        """The prediction of simulated gains of a few seeds, each the difference of two losses.

        Where all are exactly 0, the scheduler decides the same with the change: there is nothing to be wrong about.
        """
        if not any(gains):
            return cls(change, 1.0, 1.0, 1.0)
        mean = sum(gains) / len(gains)
        spread = math.sqrt(sum((each - mean) ** 2 for each in gains) / max(1, len(gains) - 1) / len(gains))
        arm = NORMAL_80 * math.hypot(spread, RELATIVE_ERROR * mean, ABSOLUTE_ERROR)
        return cls(change, math.exp(mean), math.exp(mean - arm), math.exp(mean + arm))

    @classmethod
    def unknown(cls, change: Change) -> Prediction:
        """Nothing can be simulated, so all may be."""
        return cls(change, 1.0, 0.0, math.inf)

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.high)

    def __str__(self) -> str:
        return f"{self.times:.2f} ({self.low:.2f} to {self.high:.2f})" if self.is_known else "not simulated"


def candidates(now: SchedulingOptions, device: str) -> Iterator[Change]:
    """All changes of one flag of the scheduler that can be made of these settings; of each flag, the smallest first."""
    values: dict[str, list[Any]] = {
        "max_num_seqs": [max(1, min(MOST_SEQS, int(now.max_num_seqs * factor))) for factor in FACTORS],
        "max_num_batched_tokens": list(BUDGETS),
        "max_prefill_stall_ms": list(STALLS_MS),
        "scheduling_policy": list(POLICIES),
        "enable_prefix_caching": [True],
        "enable_chunked_prefill": [True],
    }
    for field, several in values.items():
        is_now = _effective(now, field, device)
        for value in sorted(dict.fromkeys(several), key=lambda each: _far(each, is_now)):
            if value == is_now:
                continue
            change = change_of(SchedulingOptions, field, value)
            then = applied(now, [change])
            if then.batched_tokens(device) >= then.max_num_seqs:
                yield change


def _far(value: Any, now: Any) -> tuple[float, bool]:
    """How many times a number is larger or smaller; of two as far, the larger comes first."""
    if isinstance(value, str | bool):
        return 0.0, False
    return abs(math.log(value / now)), value < now


def _effective(now: SchedulingOptions, field: str, device: str) -> Any:
    return now.batched_tokens(device) if field == "max_num_batched_tokens" else getattr(now, field)
