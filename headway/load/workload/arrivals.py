"""When requests come: arrival processes.

All times are seconds after the start of the run, ascending. A process draws from the generator that it is given and
from nothing else. But for a ramp, whose shape depends on the whole, a run limited by time begins with the same arrivals
as one limited by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.load.errors import BenchError
from headway.load.workload.arrival_flags import ARRIVALS, TRACES, Arrival, ArrivalFlags

Times = NDArray[np.float64]
LINEAR, EXPONENTIAL = "linear", "exponential"
RAMP_STRATEGIES = (LINEAR, EXPONENTIAL)


def _positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BenchError(f"{what} is {value:g}; it must be a finite number above 0")


def _renewals_until(duration_s: float, rate: float, gaps: Callable[[int], Times]) -> Times:
    """Arrival times below duration_s of the process whose successive gaps `gaps(n)` gives n at a time."""
    _positive("the duration in seconds", duration_s)
    batch = math.ceil(duration_s * rate * 1.1) + 16
    drawn = gaps(batch)
    while (times := np.cumsum(drawn))[-1] < duration_s:
        drawn = np.concatenate([drawn, gaps(batch)])
    return times[: np.searchsorted(times, duration_s)]


@dataclass(frozen=True, slots=True)
class Rated:
    """A process with one rate: requests per second, in the mean."""

    rate: float

    def __post_init__(self) -> None:
        _positive("the request rate", self.rate)

    @property
    def mean_rate(self) -> float:
        return self.rate


@dataclass(frozen=True, slots=True)
class Poisson(Rated):
    """Independent arrivals: exponential gaps of mean 1 / rate, the first of them before the first arrival.

    `vllm bench serve` then stretches the times so that the last is exactly count / rate. That is no Poisson process
    (its count in a window varies less), so it is not done here.
    """

    def gaps(self, count: int, rng: np.random.Generator) -> Times:
        return rng.standard_exponential(count) / self.rate

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        return np.cumsum(self.gaps(count, rng))

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        return _renewals_until(duration_s, self.rate, lambda count: self.gaps(count, rng))

    def describe(self) -> str:
        return f"Poisson, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Gamma(Poisson):
    """Gamma gaps of mean 1 / rate and coefficient of variation 1 / sqrt(burstiness).

    Burstiness is the distribution's shape, as in `vllm bench serve`: 1 is Poisson, below 1 arrivals cluster, above
    1 they are more even.
    """

    burstiness: float

    def __post_init__(self) -> None:
        Poisson.__post_init__(self)
        _positive("the burstiness", self.burstiness)

    def gaps(self, count: int, rng: np.random.Generator) -> Times:
        return rng.standard_gamma(self.burstiness, count) / (self.rate * self.burstiness)

    def describe(self) -> str:
        return f"gamma, {self.rate:g} requests/s, burstiness {self.burstiness:g}"


@dataclass(frozen=True, slots=True)
class Constant(Rated):
    """Arrivals with equal gaps: arrival i comes at i / rate."""

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        return np.arange(count) / self.rate

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        _positive("the duration in seconds", duration_s)
        times = np.arange(math.ceil(duration_s * self.rate) + 1) / self.rate
        return times[times < duration_s]

    def describe(self) -> str:
        return f"constant, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class OnOff(Rated):
    """Bursts: a Poisson process for `on_s` seconds, silence for `off_s`, and again from the start.

    Args:
        rate: mean over time, silence included; while on, it is rate * (on_s + off_s) / on_s.
    """

    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        Rated.__post_init__(self)
        _positive("the length of the on-phase in seconds", self.on_s)
        _positive("the length of the off-phase in seconds", self.off_s)

    @property
    def rate_on(self) -> float:
        return self.rate * (self.on_s + self.off_s) / self.on_s

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        return self._clock_times(Poisson(self.rate_on).offsets(count, rng))

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        _positive("the duration in seconds", duration_s)
        cycles, rest = divmod(duration_s, self.on_s + self.off_s)
        on_time = cycles * self.on_s + min(rest, self.on_s)
        return self._clock_times(Poisson(self.rate_on).offsets_until(on_time, rng))

    def _clock_times(self, on_times: Times) -> Times:
        """Convert time that counts on-phases only to time on the clock."""
        return on_times + np.floor(on_times / self.on_s) * self.off_s

    def describe(self) -> str:
        return f"on/off, {self.rate:g} requests/s in the mean, {self.on_s:g} s on, {self.off_s:g} s off"


@dataclass(frozen=True, slots=True)
class Ramp:
    """A Poisson process whose rate goes from `start_rate` to `end_rate` over the whole run.

    Linear: rate(t) = start + (end - start) t / T. Exponential: rate(t) = start (end / start)^(t / T). T is the
    duration, or for a given count the time in which the rate's integral is that count. Given how many arrivals there
    are in T, their times are independent draws with density rate(t) / integral; each is found by inverting the
    integral, so there are no steps (Cinlar, Introduction to Stochastic Processes, 1975, chapter 4).
    """

    start_rate: float
    end_rate: float
    strategy: str = LINEAR

    def __post_init__(self) -> None:
        if self.strategy not in RAMP_STRATEGIES:
            raise BenchError(
                f"the ramp's strategy is '{self.strategy}'; it must be one of {', '.join(RAMP_STRATEGIES)}"
            )
        for what, rate in (("start", self.start_rate), ("end", self.end_rate)):
            if not (math.isfinite(rate) and rate >= 0):
                raise BenchError(
                    f"the ramp's {what} rate is {rate:g}; it must be a finite number of requests/s, 0 or more"
                )
        if self.start_rate == self.end_rate == 0:
            raise BenchError("the ramp goes from 0 to 0 requests/s; one of the two rates must be above 0")
        if self.strategy == EXPONENTIAL and not (self.start_rate and self.end_rate):
            raise BenchError("an exponential ramp cannot start or end at 0 requests/s; use a linear one")

    @property
    def mean_rate(self) -> float:
        """Integral over T, divided by T."""
        if self.strategy == LINEAR or self.start_rate == self.end_rate:
            return (self.start_rate + self.end_rate) / 2
        return (self.end_rate - self.start_rate) / math.log(self.end_rate / self.start_rate)

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        return self._times(count, count / self.mean_rate, rng)

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        _positive("the duration in seconds", duration_s)
        return self._times(int(rng.poisson(self.mean_rate * duration_s)), duration_s, rng)

    def _times(self, count: int, duration_s: float, rng: np.random.Generator) -> Times:
        # Shares are in (0, 1], because the integral of a ramp that starts at 0 cannot be inverted there.
        shares = 1.0 - np.sort(rng.random(count))[::-1]
        return self.inverse(shares * self.mean_rate * duration_s, duration_s)

    def inverse(self, integral: Times, duration_s: float) -> Times:
        """The times by which the rate's integral is `integral`, which must be above 0; shape [n] to [n]."""
        start, end = self.start_rate, self.end_rate
        if self.strategy == LINEAR or start == end:
            slope = (end - start) / duration_s
            root = np.sqrt(np.maximum(start * start + 2 * slope * integral, 0.0))
            return np.minimum(2 * integral / (start + root), duration_s)
        growth = math.log(end / start) / duration_s
        return np.minimum(np.log1p(growth * integral / start) / growth, duration_s)

    def describe(self) -> str:
        return f"{self.strategy} ramp, {self.start_rate:g} to {self.end_rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """All requests come at time 0."""

    @property
    def mean_rate(self) -> None:
        return None

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        return np.zeros(count)

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        raise BenchError(f"a duration of {duration_s:g} s does not limit arrivals all at once; give --num-prompts")

    def describe(self) -> str:
        return "all at once"


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded times, from the first of them on."""

    timestamps: tuple[float, ...]  # seconds, ascending, from any origin
    scale: float = 1.0  # 2.0 replays twice as fast

    def __post_init__(self) -> None:
        _positive("the time scale", self.scale)
        if not self.timestamps:
            raise BenchError("a trace of arrivals needs at least one timestamp")
        falling = np.flatnonzero(~(np.diff(self.timestamps) >= 0))
        if falling.size:
            at = int(falling[0])
            raise BenchError(
                f"timestamp {at + 2} of the trace is {self.timestamps[at + 1]:g} s, before the one in front of it "
                f"({self.timestamps[at]:g} s); timestamps must ascend"
            )

    @property
    def mean_rate(self) -> float | None:
        """Gaps per second; None for a trace that takes no time."""
        taken = (self.timestamps[-1] - self.timestamps[0]) / self.scale
        return (len(self.timestamps) - 1) / taken if taken else None

    def offsets(self, count: int, rng: np.random.Generator) -> Times:
        if count > len(self.timestamps):
            raise BenchError(f"{count} arrivals were asked for and the trace has {len(self.timestamps)}; ask for fewer")
        return (np.asarray(self.timestamps[:count]) - self.timestamps[0]) / self.scale

    def offsets_until(self, duration_s: float, rng: np.random.Generator) -> Times:
        _positive("the duration in seconds", duration_s)
        times = self.offsets(len(self.timestamps), rng)
        return times[: np.searchsorted(times, duration_s)]

    def describe(self) -> str:
        return f"{len(self.timestamps)} timestamps of a trace" + (
            f", {self.scale:g}x as fast" if self.scale != 1 else ""
        )


def make_arrival(flags: ArrivalFlags, dataset_name: str | None = None) -> Arrival | None:
    """The process that the flags describe; None leaves times to the dataset or to a closed loop.

    Without `arrival` the flags that were given tell: a ramp's, the phases', a burstiness other than 1, and else Poisson
    at `request_rate`. An infinite rate is "all-at-once", no rate at all None.

    Args:
        dataset_name: whose times "trace" means; None where there is not one dataset but a mix.

    Raises:
        BenchError: naming a flag that is missing, or one that does not belong to the process.
    """
    kind = flags.arrival
    said = {f"--{name.replace('_', '-')}": value for name, value in asdict(flags).items() if name != "arrival"}
    if flags.burstiness == 1 and kind != "gamma":
        del said["--burstiness"]
    given = {flag: value for flag, value in said.items() if value is not None}
    kind = _kind_of(given) if kind is None else kind
    if kind is None:
        return None
    if kind == "poisson" and flags.request_rate == math.inf:
        kind = "all-at-once"
    build: dict[str, tuple[Callable[..., Arrival | None], Sequence[str], Sequence[str]]] = {
        "poisson": (Poisson, ["--request-rate"], []),
        "gamma": (Gamma, ["--request-rate", "--burstiness"], []),
        "constant": (Constant, ["--request-rate"], []),
        "on-off": (OnOff, ["--request-rate", "--on-seconds", "--off-seconds"], []),
        "ramp": (Ramp, ["--ramp-up-start-rps", "--ramp-up-end-rps"], ["--ramp-up-strategy"]),
        "all-at-once": (AllAtOnce, [], []),
        "trace": (lambda: None, [], []),
    }
    if kind not in build:
        raise BenchError(f"--arrival is '{kind}'; it must be one of {', '.join(ARRIVALS)}")
    if kind == "trace" and dataset_name not in TRACES:
        raise BenchError(f"--arrival trace needs a dataset with times: --dataset-name {', '.join(TRACES)}")
    make, needed, optional = build[kind]
    if kind == "all-at-once" and given.get("--request-rate") == math.inf:
        del given["--request-rate"]
    return make(*_values_of(kind, given, needed, optional))


def _values_of(kind: str, given: dict[str, Any], needed: Sequence[str], optional: Sequence[str]) -> list[Any]:
    for flag in needed:
        if flag not in given:
            raise BenchError(f"--arrival {kind} needs {flag}")
    for flag, value in given.items():
        if flag not in [*needed, *optional]:
            raise BenchError(f"{flag} is {value}, which does not apply to --arrival {kind}; leave one of the two out")
    return [given[flag] for flag in [*needed, *optional] if flag in given]


def _kind_of(given: dict[str, Any]) -> str | None:
    if any(flag.startswith("--ramp-up") for flag in given):
        return "ramp"
    if "--on-seconds" in given or "--off-seconds" in given:
        return "on-off"
    if "--burstiness" in given:
        return "gamma"
    return "poisson" if "--request-rate" in given else None
