"""Look for the highest request rate whose SLO attainment holds.

No load is made here: a probe is whatever the caller measures at a rate. docs/statistics.md says what is promised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from headway.load.errors import BenchError
from headway.load.measures.anytime import least_blocks
from headway.load.measures.trials import FEWEST_IN_BLOCK, ProbeOutcome, Trial, Verdict, contradictions, isotonic

_LOOKS = (
    3.0  # a first look takes the requests of which three would miss at the target; an unclear one, three times that
)
_LONGEST_STEP = 1.25  # down to a lower rate, where one could not be proven
_LONGEST_PROOF = 6.0  # times the fewest requests that could show that a rate holds


class Stop(StrEnum):
    """Why a search ended."""

    PRECISE = "precise"  # the highest that held and the lowest that did not are close enough
    NOISE = "noise"  # the rates in between may hold, and it takes more samples than allowed to show it
    CEILING = "ceiling"  # the highest rate allowed still held
    FLOOR = "floor"  # the lowest rate allowed did not hold
    PROBES = "probes"  # the budget of probes is spent
    TIME = "time"
    INVALID = "invalid"  # a probe measured nothing, or was interrupted


@dataclass(frozen=True, slots=True)
class SearchResult:
    """"""

    rate: float | None  # highest that held, in requests/s; None when none did
    above: float | None  # lowest that did not hold, or was not shown to; None when all did. The limit is between them.
    likely: float | None  # highest that looked good when the search ended before that was certain; None otherwise
    trials: tuple[Trial, ...]  # in the order in which the rates were tried
    # stop, reason: why the search ended, for programs and for people.
    stop: Stop
    reason: str
    warnings: tuple[str, ...]  # probes that contradict each other
    # (rate, attainment) by rising rate, the nearest curve that never rises (isotonic regression).
    fitted: tuple[tuple[float, float], ...]
    # The confidence that `rate` holds, where misses that come together are within one block of its trial.
    confidence: float

    @property
    def claim(self) -> Trial | None:
        """The trial of `rate`."""
        return next((trial for trial in self.trials if trial.rate == self.rate), None)


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """"""

    target: float = 0.99  # share of requests that must meet their objectives
    # The confidence of the interval that must lie on one side of the target before a rate is judged.
    confidence: float = 0.95
    tolerance: float = 0.05  # the search ends when the bounds are closer than this, as a share
    stall_s: float = 1.0  # misses within so many seconds may be one event: the claim must survive stalls of this length
    # Requests at one rate, after which it is left undecided; None is six times the fewest that could show that it
    # holds.
    max_samples: int | None = None
    max_probes: int = 200  # in all
    max_seconds: float = math.inf  # no probe begins later
    # min_rate, max_rate: limits of the rates tried; None is start / 64 and start * 1024.
    min_rate: float | None = None
    max_rate: float | None = None


class _Stopped(Exception):
    """The budget is spent, or a probe cannot be trusted."""

    def __init__(self, stop: Stop, reason: str) -> None:
        self.stop = stop
        self.reason = reason


Probe = Callable[[float, int], Awaitable[ProbeOutcome]]


async def find_max_rate(
    probe: Probe,
    start_rate: float,
    options: SearchOptions | None = None,
    *,
    on_trial: Callable[[Trial], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The highest rate whose attainment is at least the target, as far as it can be told.

    A first look at each rate is short. From `start_rate` the rate is doubled while it looks good, or halved while it
    does not, and then bisected on a logarithmic scale. The highest that looks good is then measured for as long as it
    takes to be certain; where it does not become certain, a lower one is, by steps that grow.

    Args:
        probe: measures at a rate; called again at the same rate for more samples. It is told how many requests are
            wanted, and makes as many as it likes.
        on_trial: told of each rate after each of its probes.
        clock: seconds.

    Raises:
        BenchError: the target or the length of stalls is out of range.
    """
    options = options or SearchOptions()
    _check(options)
    search = _Search(probe, options, start_rate, on_trial, clock)
    try:
        stop, reason = await search.run()
    except _Stopped as stopped:
        stop, reason = stopped.stop, stopped.reason
    return SearchResult(
        rate=search.held,
        above=search.above,
        likely=None if search.held is not None or search.likely is None else search.likely.rate,
        trials=tuple(trial for trial in search.trials if trial.probes),
        stop=stop,
        reason=reason,
        warnings=tuple(contradictions(search.trials)),
        fitted=tuple(isotonic([(trial.rate, trial.share, trial.total) for trial in search.trials if trial.total])),
        confidence=0.5 * (1.0 + options.confidence),
    )


class _Search:
    def __init__(
        self,
        probe: Probe,
        options: SearchOptions,
        start_rate: float,
        on_trial: Callable[[Trial], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self.trials: list[Trial] = []
        self.held: float | None = None
        self.likely: Trial | None = None
        self.above: float | None = None
        self._probe = probe
        self._options = options
        self._start = start_rate
        self._floor = options.min_rate if options.min_rate is not None else start_rate / 64
        self._ceiling = options.max_rate if options.max_rate is not None else start_rate * 1024
        self._on_trial = on_trial
        self._clock = clock
        self._began = clock()
        self._probes = 0

    async def run(self) -> tuple[Stop, str]:
        stop, reason = await self._bracket()
        step, attempts = 1.0 + self._options.tolerance, 0
        while self.likely is not None:
            attempts += 1
            if await self._prove(self.likely, attempts):
                self.held = self.likely.rate
                if attempts > 1:
                    stop = Stop.NOISE
                    reason = f"{self.held:.4g} requests/s held and {self.above:.4g} could not be proven"
                return stop, reason
            rate, step = self.likely.rate / step, min(step**2, _LONGEST_STEP)
            self.above, self.likely = self.likely.rate, None
            while self.likely is None:
                if rate < self._floor:
                    return Stop.FLOOR, f"{self.above:.4g} requests/s did not hold, and lower rates were not allowed"
                if not await self._looks_good(rate):
                    self.above, rate, step = rate, rate / step, min(step**2, _LONGEST_STEP)
        return stop, reason

    # --- the first looks ----------------------------------------------------------------------------

    async def _bracket(self) -> tuple[Stop, str]:
        """Find the highest rate that looks good, to the tolerance."""
        rate = self._start
        while True:
            if await self._looks_good(rate):
                if self.above is None and rate >= self._ceiling:
                    return Stop.CEILING, f"{rate:.4g} requests/s held, and higher rates were not allowed"
            else:
                self.above = rate
                if self.likely is None and rate <= self._floor:
                    return Stop.FLOOR, f"{rate:.4g} requests/s did not hold, and lower rates were not allowed"
            if self.above is None:
                rate = min(2 * rate, self._ceiling)
            elif self.likely is None:
                rate = max(rate / 2, self._floor)
            elif self.above / self.likely.rate <= 1.0 + self._options.tolerance:
                between = f"{self.likely.rate:.4g} requests/s held and {self.above:.4g} did not"
                return Stop.PRECISE, f"{between}: closer than {100 * self._options.tolerance:.0f} %"
            else:
                rate = math.sqrt(self.likely.rate * self.above)

    async def _looks_good(self, rate: float) -> bool:
        trial = Trial(rate)
        self.trials.append(trial)
        allowed = 1.0 - self._options.target
        fewest, most = math.ceil(_LOOKS / allowed), math.ceil(_LOOKS**2 / allowed)
        while trial.verdict is Verdict.UNDECIDED:
            await self._look(trial, fewest - trial.total, self._options.confidence)
            missed = 1.0 - trial.share
            plain = missed >= 2.0 * allowed or (missed <= 0.5 * allowed and trial.is_steady)
            if trial.verdict is Verdict.FAILED or trial.total >= most or (plain and trial.total >= fewest):
                break
        if trial.verdict is not Verdict.FAILED and trial.share >= self._options.target and trial.is_steady:
            trial.verdict = Verdict.LIKELY
            self.likely = trial
        self._tell(trial)
        return trial.verdict is Verdict.LIKELY

    # --- the proof ----------------------------------------------------------------------------------

    async def _prove(self, trial: Trial, attempt: int) -> bool:
        """Whether the rate holds for certain.

        Each rate for which that is tried has a chance to be found good that is not. The chances are halved from one to
        the next, so that those of the whole search add up to what one alone would have.
        """
        options = self._options
        confidence = 1.0 - (1.0 - options.confidence) / 2.0**attempt
        blocks = least_blocks(options.target, confidence)
        trial.judge(options.stall_s, confidence)
        while True:
            trial.verdict = Verdict.UNDECIDED
            fewest = blocks * trial.block
            block = max(FEWEST_IN_BLOCK, trial.rate * options.stall_s)
            most = options.max_samples or math.ceil(_LONGEST_PROOF * blocks * block)
            if trial.low > options.target and trial.is_steady:
                trial.verdict = Verdict.HELD
            elif fewest > most:
                trial.reason = f"misses come in clusters, so a proof takes {fewest:,} requests"
            elif trial.total >= most or (trial.total >= fewest and trial.share < options.target):
                trial.reason = f"{trial.total:,} requests are not enough for a proof"
            else:
                await self._look(trial, fewest - trial.total, confidence)
                if trial.verdict is not Verdict.FAILED:
                    self._tell(trial)
                    continue
            self._tell(trial)
            return trial.verdict is Verdict.HELD

    # --- one probe ----------------------------------------------------------------------------------

    async def _look(self, trial: Trial, wanted: int, confidence: float) -> None:
        """One more probe; the verdict becomes FAILED where that is certain.

        A rate at which the server falls behind fails, however good the attainment still is: it would not stay so. One
        probe can be unlucky, so it takes two that are unsteady, and a fifth of all, or one that misses the target too.
        """
        self._check_budget()
        self._probes += 1
        began = self._clock()
        outcome = await self._probe(trial.rate, max(1, wanted))
        trial.seconds += self._clock() - began
        trial.probes.append(outcome)
        trial.judge(self._options.stall_s, confidence)
        if not outcome.valid:
            self._tell(trial)
            raise _Stopped(Stop.INVALID, f"the probe at {trial.rate:.4g} requests/s is not valid: {outcome.reason}")
        if not len(outcome.slowness):
            raise _Stopped(Stop.INVALID, f"the probe at {trial.rate:.4g} requests/s measured no request")
        missed = trial.share < self._options.target
        behind = trial.unsteady >= max(2, len(trial.probes) // 5) or (trial.unsteady and missed)
        if trial.high < self._options.target or behind or not outcome.offered:
            trial.verdict = Verdict.FAILED

    def _tell(self, trial: Trial) -> None:
        if self._on_trial is not None:
            self._on_trial(trial)

    def _check_budget(self) -> None:
        if self._probes >= self._options.max_probes:
            raise _Stopped(Stop.PROBES, f"all {self._options.max_probes} probes were used")
        if self._clock() - self._began >= self._options.max_seconds:
            raise _Stopped(Stop.TIME, f"the time limit of {self._options.max_seconds:g} s was reached")


def _check(options: SearchOptions) -> None:
    if not 0 < options.target < 1:
        raise BenchError(f"an attainment of {options.target:g} cannot be proven; give a share between 0 and 1")
    if not 0 <= options.stall_s < math.inf:
        raise BenchError(f"--stall-seconds is {options.stall_s:g}; give 0 or more")
