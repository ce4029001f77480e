"""Look for the highest request rate whose SLO attainment holds.

No load is made here: a probe is whatever the caller measures at a rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headway.bench.errors import BenchError
from headway.bench.measures.anytime import anytime_interval

_MOST_UNDECIDED = 2  # rates left undecided, after which the noise is what is being measured


class Verdict(StrEnum):
    HELD = "held"
    FAILED = "failed"
    UNDECIDED = "undecided"


class Stop(StrEnum):
    """Why a search ended."""

    PRECISE = "precise"  # the highest that held and the lowest that did not are close enough
    NOISE = "noise"  # what is left between them cannot be told apart with the samples allowed
    CEILING = "ceiling"  # the highest rate allowed still held
    FLOOR = "floor"  # the lowest rate allowed did not hold
    PROBES = "probes"  # the budget of probes is spent
    TIME = "time"
    INVALID = "invalid"  # a probe could not be trusted: client-bound, interrupted


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """What one probe saw: a run at `rate`, or a further one at the same.

    Args:
        rate: requests/s.
        met, total: requests that met their objectives, failed ones having missed.
        steady: False when the server is seen to fall behind (steady.falls_behind), not merely when the run was short.
        valid: False when the numbers are not the server's: the client was the limit, or the run was interrupted.
        effective_total: how many independent requests the total is worth (dependence.effective_count of the met
            ones); None takes them all.
        reason: for steady or valid being False.
    """

    rate: float
    met: int
    total: int
    steady: bool = True
    valid: bool = True
    effective_total: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Trial:
    """All probes at one rate, together.

    Args:
        low, high: interval of the attainment that holds at every look, see `anytime_interval`.
    """

    rate: float
    probes: list[ProbeOutcome] = field(default_factory=list)
    verdict: Verdict = Verdict.UNDECIDED
    low: float = 0.0
    high: float = 1.0

    @property
    def met(self) -> int:
        return sum(probe.met for probe in self.probes)

    @property
    def total(self) -> int:
        return sum(probe.total for probe in self.probes)

    @property
    def share(self) -> float:
        return self.met / self.total if self.total else 0.0

    @property
    def unsteady(self) -> int:
        return sum(not probe.steady for probe in self.probes)

    @property
    def valid(self) -> bool:
        return all(probe.valid for probe in self.probes)

    def counted(self) -> tuple[float, float]:
        """(met, total) in independent requests."""
        pairs = [
            (probe, probe.total if probe.effective_total is None else probe.effective_total) for probe in self.probes
        ]
        met = sum(probe.met / probe.total * size for probe, size in pairs if probe.total)
        return met, sum(size for _, size in pairs)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """
    Args:
        rate: highest that held, in requests/s; None when none did.
        above: lowest that did not hold (failed, or stayed undecided); None when all did. The limit is between them.
        trials: in the order in which the rates were tried.
        stop, reason: why the search ended, for programs and for people.
        warnings: probes that contradict each other.
        fitted: (rate, attainment) by rising rate, the nearest curve that never rises (isotonic regression).
    """

    rate: float | None
    above: float | None
    trials: tuple[Trial, ...]
    stop: Stop
    reason: str
    warnings: tuple[str, ...]
    fitted: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """
    Args:
        target: share of requests that must meet their objectives.
        confidence: of the interval that must lie on one side of the target before a rate is judged.
        tolerance: the search ends when the bounds are closer than this, as a share.
        max_samples: requests at one rate, after which it is left undecided; None is eight times `least_samples`.
        max_probes: in all.
        max_seconds: no probe begins later.
        min_rate, max_rate: limits of the rates tried; None is start / 64 and start * 1024.
    """

    target: float = 0.99
    confidence: float = 0.95
    tolerance: float = 0.05
    max_samples: int | None = None
    max_probes: int = 100
    max_seconds: float = math.inf
    min_rate: float | None = None
    max_rate: float | None = None


class _Stopped(Exception):
    """The budget is spent, or a probe cannot be trusted."""

    def __init__(self, stop: Stop, reason: str) -> None:
        self.stop = stop
        self.reason = reason


async def find_max_rate(
    probe: Callable[[float], Awaitable[ProbeOutcome]],
    start_rate: float,
    options: SearchOptions | None = None,
    *,
    on_trial: Callable[[Trial], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The highest rate whose attainment is at least the target, as far as it can be told.

    From `start_rate` the rate is doubled while it holds, or halved while it does not, and then bisected on a
    logarithmic scale. A rate is probed until the interval of its attainment excludes the target; after `max_samples` it
    is undecided, which is never claimed: it counts as an upper bound. After two such rates the search ends.

    Args:
        probe: measures at a rate; called again at the same rate for more samples. Fewer than `least_samples` never
            show that a rate holds, so half of that in each call is a good size.
        on_trial: told of each rate after each of its probes.
        clock: seconds.

    Raises:
        BenchError: an option is out of range.
    """
    options = options or SearchOptions()
    _check(start_rate, options)
    search = _Search(probe, options, on_trial, clock)
    try:
        stop, reason = await search.run(start_rate)
    except _Stopped as stopped:
        stop, reason = stopped.stop, stopped.reason
    return SearchResult(
        rate=search.held,
        above=search.above,
        trials=tuple(search.trials),
        stop=stop,
        reason=reason,
        warnings=tuple(contradictions(search.trials)),
        fitted=tuple(isotonic([(trial.rate, trial.share, trial.total) for trial in search.trials if trial.total])),
    )


class _Search:
    def __init__(
        self,
        probe: Callable[[float], Awaitable[ProbeOutcome]],
        options: SearchOptions,
        on_trial: Callable[[Trial], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.trials: list[Trial] = []
        self.held: float | None = None
        self.above: float | None = None
        self._probe = probe
        self._options = options
        self._on_trial = on_trial
        self._clock = clock
        self._began = clock()
        self._probes = 0
        self._max_samples = options.max_samples or 8 * least_samples(options.target, options.confidence)

    async def run(self, start_rate: float) -> tuple[Stop, str]:
        options = self._options
        floor = options.min_rate if options.min_rate is not None else start_rate / 64
        ceiling = options.max_rate if options.max_rate is not None else start_rate * 1024
        rate = start_rate
        while True:
            await self._judge(rate)
            if self.held is not None and self.above is None:
                if rate >= ceiling:
                    return Stop.CEILING, f"{rate:.4g} requests/s held, and no higher rate was to be tried"
                rate = min(2 * rate, ceiling)
                continue
            assert self.above is not None
            if self.held is None:
                if rate <= floor:
                    return Stop.FLOOR, f"{rate:.4g} requests/s did not hold, and no lower rate was to be tried"
                rate = max(rate / 2, floor)
                continue
            between = f"{self.held:.4g} requests/s held and {self.above:.4g} did not"
            if self.above / self.held <= 1.0 + options.tolerance:
                return Stop.PRECISE, f"{between}: closer than {options.tolerance:.0%}"
            if sum(trial.verdict is Verdict.UNDECIDED for trial in self.trials) >= _MOST_UNDECIDED:
                return Stop.NOISE, f"{between}: {self._max_samples} samples do not tell the rates between apart"
            rate = math.sqrt(self.held * self.above)

    async def _judge(self, rate: float) -> None:
        trial = Trial(rate)
        self.trials.append(trial)
        while trial.verdict is Verdict.UNDECIDED and trial.total < self._max_samples:
            self._check_budget()
            self._probes += 1
            outcome = await self._probe(rate)
            trial.probes.append(outcome)
            if not 0 <= outcome.met <= outcome.total:
                raise BenchError(f"a probe says that {outcome.met} of {outcome.total} requests met their objectives")
            _decide(trial, self._options)
            if self._on_trial is not None:
                self._on_trial(trial)
            if not outcome.valid:
                raise _Stopped(Stop.INVALID, f"the probe at {rate:.4g} requests/s is not valid: {outcome.reason}")
            if outcome.total == 0:
                raise _Stopped(Stop.INVALID, f"the probe at {rate:.4g} requests/s measured no request")
        if trial.verdict is Verdict.HELD:
            self.held = rate if self.held is None else max(self.held, rate)
        else:
            self.above = rate if self.above is None else min(self.above, rate)

    def _check_budget(self) -> None:
        if self._probes >= self._options.max_probes:
            raise _Stopped(Stop.PROBES, f"all {self._options.max_probes} probes were used")
        if self._clock() - self._began >= self._options.max_seconds:
            raise _Stopped(Stop.TIME, f"the {self._options.max_seconds:g} s for the search were used")


def _decide(trial: Trial, options: SearchOptions) -> None:
    """A rate at which the server falls behind fails, however good the attainment still is: it would not stay.

    One probe can be unlucky, so it takes two that are unsteady, or one that misses the target as well; and a rate
    with one needs two steady ones to hold.
    """
    met, total = trial.counted()
    trial.low, trial.high = anytime_interval(met, total, options.confidence)
    if not trial.valid:
        return
    if trial.high < options.target or trial.unsteady >= 2 or (trial.unsteady and trial.share < options.target):
        trial.verdict = Verdict.FAILED
    elif trial.low > options.target and 2 * trial.unsteady < len(trial.probes):
        trial.verdict = Verdict.HELD


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
        f"{lower.share:.2%} met their objectives at {lower.rate:.4g} requests/s, but {higher.share:.2%} at "
        f"{higher.rate:.4g}: the server or the machine changed between the probes"
        for i, lower in enumerate(ordered)
        for higher in ordered[i + 1 :]
        if lower.high < higher.low
    ]


def _check(start_rate: float, options: SearchOptions) -> None:
    if not (math.isfinite(start_rate) and start_rate > 0):
        raise BenchError(f"the search cannot start at {start_rate:g} requests/s: give a rate above 0")
    if not 0 < options.target < 1:
        raise BenchError(
            f"an attainment of {options.target:g} cannot be shown by samples: give a share between 0 and 1"
        )
    if not 0.5 <= options.confidence < 1:
        raise BenchError(f"confidence {options.confidence:g} is out of range: it must be at least 0.5 and below 1")
    if not options.tolerance > 0:
        raise BenchError(f"a tolerance of {options.tolerance:g} is never met: give a share above 0, for example 0.05")
    if options.max_probes < 1 or options.max_seconds <= 0:
        raise BenchError("the search has no budget: allow at least one probe and some time")
    least = least_samples(options.target, options.confidence)
    if options.max_samples is not None and options.max_samples < least:
        raise BenchError(
            f"{options.max_samples} samples at a rate cannot show an attainment of {options.target:.4g}: allow at "
            f"least {least}"
        )
    low, high = options.min_rate, options.max_rate
    if (low is not None and not 0 < low <= start_rate) or (high is not None and not start_rate <= high):
        raise BenchError(f"the search starts at {start_rate:g} requests/s: that must lie between its limits")


def least_samples(target: float, confidence: float = 0.95) -> int:
    """How many requests must meet their objectives, without a miss, before a rate can be said to hold."""
    low, high = 0, 1
    while anytime_interval(high, high, confidence)[0] <= target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if anytime_interval(middle, middle, confidence)[0] <= target:
            low = middle
        else:
            high = middle
    return high
