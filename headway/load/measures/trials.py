"""What was seen at the rates of a search, and what it says of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from headway.load.measures.anytime import anytime_interval
from headway.load.measures.dependence import autocorrelation_time

FEWEST_IN_BLOCK = 10  # requests that may miss together without anybody having seen it
_TIMES_MEMORY = 3.0  # a block is so many times as long as the misses' memory that was seen: few misses are uncertain
_SLOWEST = 50  # as few of the slowest requests still show how they cluster


class Verdict(StrEnum):
    HELD = "held"  # certain
    LIKELY = "looks good"  # a first look; never claimed
    FAILED = "failed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """What one probe saw: a run at `rate`, or a further one at the same.

    Args:
        rate: requests/s.
        slowness: of each judged request, in the order in which they were due: the largest of its measured values over
            their limits. At most 1 has met its objectives; inf has failed. Shape (requests,).
        steady: False when the server is seen to fall behind (steady.falls_behind), not merely when the run was short.
        valid: False when nothing was measured, or the run was interrupted.
        offered: False when the client was the limit, so that the server did not see this load: it counts as failed.
        client: why misses may be this client's and not the server's; empty where they are not. What was met was met, as
            a client only ever adds to latencies.
        reason: the reason for steady or valid being False.
    """

    rate: float
    slowness: np.ndarray = field(repr=False)
    steady: bool = True
    valid: bool = True
    offered: bool = True
    client: str = ""
    reason: str = ""


@dataclass(slots=True)
class Trial:
    """All probes at one rate, together."""

    rate: float
    probes: list[ProbeOutcome] = field(default_factory=list)
    verdict: Verdict = Verdict.UNDECIDED
    # low, high: interval of the attainment that holds at every look, see `anytime_interval`.
    low: float = 0.0
    high: float = 1.0
    block: int = FEWEST_IN_BLOCK  # requests that are taken to miss together; they count as one sample
    seconds: float = 0.0  # seconds that its probes took, by the clock of the search; of a simulation, how long it ran
    reason: str = ""  # the reason for being undecided, where there is more to say than that

    @property
    def met(self) -> int:
        return sum(int(np.sum(probe.slowness <= 1.0)) for probe in self.probes)

    @property
    def total(self) -> int:
        return sum(len(probe.slowness) for probe in self.probes)

    @property
    def share(self) -> float:
        return self.met / self.total if self.total else 0.0

    @property
    def unsteady(self) -> int:
        return sum(not probe.steady for probe in self.probes)

    @property
    def is_steady(self) -> bool:
        """A probe that fell behind needs two that did not."""
        return 2 * self.unsteady < len(self.probes)

    @property
    def client(self) -> str:
        """Why its misses may be the client's: where it did not hold, the server may still hold that rate."""
        return next((probe.client for probe in self.probes if probe.client), "")

    def judge(self, stall_s: float, confidence: float) -> None:
        """Bound the attainment by all that was seen at this rate, cut into blocks that do not depend on each other.

        Misses come in clusters, and a block must be longer than one. How long they are is seen from all probes
        together: one in which nothing was missed tells of the clusters as much as one that had them.
        """
        slowness = np.concatenate([probe.slowness for probe in self.probes] or [np.empty(0)])
        self.block = max(FEWEST_IN_BLOCK, math.ceil(self.rate * stall_s), math.ceil(memory(slowness)))
        self.low, self.high = anytime_interval(blocks_of(slowness > 1.0, self.block), confidence)


def memory(slowness: np.ndarray) -> float:
    """How many requests may miss together, >= 1: by the autocorrelation time of the misses, or of the slowest requests.

    Few misses say little of clusters. The slowest of those that did not miss say more, where what makes requests slow
    is what makes them miss; and too much rather than too little, as what is slower comes in shorter clusters.
    """
    if not len(slowness):
        return 1.0
    slowest = float(np.sort(slowness)[-max(1, min(_SLOWEST, len(slowness) // 2))])
    of_misses = autocorrelation_time((slowness > 1.0).astype(float))
    of_slowest = autocorrelation_time((slowness >= min(1.0, slowest)).astype(float))
    return max(_TIMES_MEMORY * of_misses if of_misses > 1.0 else 1.0, of_slowest)


def blocks_of(missed: np.ndarray, length: int) -> np.ndarray:
    """The share that is missed of each block of at least `length` requests, one after the other; (blocks,)."""
    count = max(1, len(missed) // length)
    edges = np.linspace(0, len(missed), count + 1).astype(int)
    sums = np.concatenate(([0], np.cumsum(missed)))
    return np.diff(sums[edges]) / np.maximum(1, np.diff(edges))


def isotonic(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The curve that never rises and is nearest to (rate, share, weight), by pooling neighbours that contradict."""
    pools: list[tuple[float, float, list[float]]] = []  # (share, weight, rates)
    for rate, share, weight in sorted(points):
        pools.append((share, weight, [rate]))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            share, weight, rates = pools.pop()
            share_before, weight_before, rates_before = pools.pop()
            both = weight + weight_before
            pools.append(((share * weight + share_before * weight_before) / both, both, rates_before + rates))
    return [(rate, share) for share, _, rates in pools for rate in rates]


def contradictions(trials: Sequence[Trial]) -> list[str]:
    """Where a higher rate did surely better than a lower one: then something else than the rate changed."""
    ordered = sorted((trial for trial in trials if trial.total), key=lambda trial: trial.rate)
    return [
        f"{100 * lower.share:.2f} % met their objectives at {lower.rate:.4g} requests/s, but "
        f"{100 * higher.share:.2f} % at {higher.rate:.4g}: the server or the machine changed between the probes"
        for i, lower in enumerate(ordered)
        for higher in ordered[i + 1 :]
        if lower.high < higher.low
    ]
