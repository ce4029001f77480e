"""Find the part of a run in which the server is in equilibrium, or say why there is none.

Three steps, each on what the client saw. The ramp-up is cut by MSER-5 (White 1997; White, Cobb & Spratt 2000), held to
the crossing rule (Fishman 1973) so that it takes no event for a ramp-up. The drain is cut: the last arrivals finish in
a server that empties. What is left must not grow or fall. docs/statistics.md explains each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from headway.load.measures.dependence import autocorrelation_time
from headway.load.measures.numbers import Window
from headway.load.measures.probability import t_tail
from headway.load.record import RequestRecord

OVERLOAD = "the offered load exceeds what the server can do"
_BATCH = 5  # the batch of MSER-5
_LONGEST_RAMP_UP = 0.5  # share of the requests
_CLOSE = 0.05  # share of its level: a series that close has reached it
_MIN_INDEPENDENT = 5  # how often the window must be longer than the series' memory
_CERTAIN = 3.0  # standard deviations
_MIN_REQUESTS = 30  # in the window
_DOUBT = 0.01 / 4  # chance of taking noise for a trend: 1 % over the four series
_NOTICEABLE = 0.25  # share of the level: less drift over the window is no trend worth the name
_AT_ONCE = 0.01  # share of the run
_LONGEST_REQUEST = 0.25  # share of the schedule, by the median


@dataclass(frozen=True, slots=True)
class _Trend:
    """A straight line through a series. `per_s` is its slope, in the series' unit per second."""

    per_s: float
    drift: float  # over the whole window, of the level
    p_value: float

    @property
    def real(self) -> bool:
        return abs(self.drift) > _NOTICEABLE and self.p_value < _DOUBT


@dataclass(frozen=True, slots=True)
class _Series:
    """A figure of each request, in the order in which they were due; NaN where a request has no such value."""

    name: str
    values: np.ndarray
    words: Callable[[float], str]  # describes a slope


@dataclass(frozen=True, slots=True)
class _Run:
    """Arrays of shape (requests,), in the order in which they were due. Times in ns."""

    scheduled: np.ndarray
    ended: np.ndarray
    in_flight: np.ndarray  # as a request found them when it became due, itself included
    ttft_ms: np.ndarray
    e2el_ms: np.ndarray

    @property
    def span(self) -> int:
        return int(self.scheduled[-1] - self.scheduled[0])

    def series(self) -> tuple[_Series, ...]:
        ttft = () if np.isnan(self.ttft_ms).all() else (_Series("TTFT", self.ttft_ms, _milliseconds),)
        return (
            *ttft,
            _Series("E2EL", self.e2el_ms, _milliseconds),
            _Series("the number of requests in flight", self.in_flight, lambda slope: f"{abs(slope):.3g}"),
        )


def find_steady_window(records: Iterable[RequestRecord], began_ns: int, ended_ns: int) -> Window:
    """The steady state of a run, for open and closed loops.

    Args:
        records: the records of the run, in any order; those that never became due are left out.
        began_ns, ended_ns: the begin and the end of the run.

    Returns:
        A window [began_ns, ended_ns) of times at which requests were due. Where there is no steady state it is the
        whole run, `found` is False, and `reason` says why: too few requests, all at once, a ramp, or a server that
        falls behind.
    """
    run = _read([record for record in records if record.scheduled_ns > 0])
    if run is None:
        return Window(began_ns, ended_ns, False, "no request was due")
    found = _find(run, ended_ns - began_ns)
    if isinstance(found, str):
        return Window(began_ns, ended_ns, False, found)
    first, last_ns = found
    first_ns = int(run.scheduled[first])
    kept = int(np.sum((run.scheduled >= first_ns) & (run.scheduled < last_ns)))
    reason = (
        f"{kept} of {len(run.scheduled)} requests, due in {(last_ns - first_ns) / 1e9:.3g} s: cut "
        f"{max(0, first_ns - began_ns) / 1e9:.3g} s of ramp-up by MSER-5 and {max(0, ended_ns - last_ns) / 1e9:.3g} s "
        "of drain; no trend in the rest"
    )
    return Window(first_ns, last_ns, True, reason)


def _read(records: list[RequestRecord]) -> _Run | None:
    if not records:
        return None
    records = sorted(records, key=lambda record: record.scheduled_ns)
    scheduled = np.array([record.scheduled_ns for record in records], dtype=np.int64)
    ended = np.array([max(record.end_ns, record.scheduled_ns) for record in records], dtype=np.int64)
    first = np.array(
        [record.first_token_ns if record.ok and not record.is_vector else 0 for record in records], dtype=np.int64
    )
    position = np.arange(1, len(records) + 1)
    return _Run(
        scheduled=scheduled,
        ended=ended,
        in_flight=(position - np.searchsorted(np.sort(ended), scheduled, side="right")).astype(float),
        ttft_ms=np.where(first > 0, (first - scheduled) / 1e6, np.nan),
        e2el_ms=(ended - scheduled) / 1e6,
    )


def _find(run: _Run, duration: int) -> tuple[int, int] | str:
    """(position of the first request in the window, the window's end in ns), or why there is none."""
    count = len(run.scheduled)
    if run.span <= _AT_ONCE * duration:
        return "all requests were due at once: a steady state needs arrivals over time"
    if count < _MIN_REQUESTS:
        return f"{count} requests are too few: at least {_MIN_REQUESTS} must be left in the window"
    ramp = None if _closed_loop(run) else _arrival_trend(run.scheduled)
    if ramp is not None and ramp.real:
        way = "rises" if ramp.per_s > 0 else "falls"
        return f"the arrival rate {way} by {abs(ramp.per_s):.3g} requests/s per second: a ramp has no steady state"
    first = _start(run)
    if against := _growth(run, first).text:
        return against
    typical = float(np.median(run.e2el_ms[count // 2 :])) * 1e6
    if typical > _LONGEST_REQUEST * run.span:
        lengths = f"a request takes {typical / 1e9:.3g} s and the arrivals lasted {run.span / 1e9:.3g} s"
        return f"{lengths}: the run is too short to reach equilibrium"
    last_ns = int(run.scheduled[-1] - typical) + 1
    kept = int(np.sum(run.scheduled[first:] < last_ns))
    if kept < _MIN_REQUESTS:
        return f"{kept} of {count} requests are left after ramp-up and drain: at least {_MIN_REQUESTS} must be"
    return first, last_ns


def _closed_loop(run: _Run) -> bool:
    """Whether a request is due whenever another ends: then as many are in flight at almost every arrival."""
    most = run.in_flight.max()
    return bool(most > 1 and np.mean(run.in_flight[int(most) :] >= most) > 0.9) if most < len(run.scheduled) else False


def _arrival_trend(scheduled: np.ndarray) -> _Trend | None:
    """Lewis & Robinson 1974: Laplace's test of a constant rate, for gaps of any spread; None when all are at once.

    Arrivals that come in clusters (on and off) spread the mean arrival time further: the gaps' autocorrelation.
    """
    gaps = np.diff(scheduled).astype(float)
    span = float(scheduled[-1] - scheduled[0])
    if span <= 0.0:
        return None
    middle = float(np.mean(scheduled[1:] - scheduled[0])) / span - 0.5
    ranks = _ranks(gaps)
    trend = np.polyval(np.polyfit(np.arange(len(ranks)), ranks, 1), np.arange(len(ranks)))  # a ramp is no cluster
    spread = float(np.std(gaps) / np.mean(gaps)) * math.sqrt(autocorrelation_time(ranks - trend))
    score = middle * math.sqrt(12.0 * len(gaps)) / max(spread, 1e-9)
    drift = 12.0 * middle  # the drift of a rate that changes evenly, over the mean rate
    rate = len(gaps) / span * 1e9
    return _Trend(per_s=drift * rate / (span / 1e9), drift=drift, p_value=math.erfc(abs(score) / math.sqrt(2.0)))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Equal values have equal ranks: their mean."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - 0.5 * (counts + 1.0))[position]
    return ranks


def _ramp_up(values: np.ndarray) -> int:
    """How many requests at the start belong to the ramp-up, by one series.

    MSER-5 takes the start off that leaves the mean of the rest most certain, at most half. It would also take off all
    before a freeze in the first half; but a series that has reached its level (of the second half) has ramped up.
    """
    known = np.flatnonzero(~np.isnan(values))
    batches = len(known) // _BATCH
    if batches < 4:
        return 0
    means = values[known[: batches * _BATCH]].reshape(batches, _BATCH).mean(axis=1)
    rest = batches - np.arange(int(batches * _LONGEST_RAMP_UP) + 1)
    # Sums over the batches from each position on, about the level, so that large values do not cancel.
    centred = means - np.mean(means)
    sums = np.cumsum(centred[::-1])[::-1][: len(rest)]
    squares = np.cumsum(centred[::-1] ** 2)[::-1][: len(rest)]
    cut = int(np.argmin((squares - sums**2 / rest) / rest**2))
    off = means / max(float(np.median(means[batches // 2 :])), 1e-12) - 1.0  # the level is above 0 in all series
    side = np.where(np.abs(off) <= _CLOSE, 0.0, np.sign(off))
    reached = np.flatnonzero((side == 0.0) | (side != side[0]))
    cut = min(cut, int(reached[0])) if len(reached) else cut
    return int(known[cut * _BATCH])


def falls_behind(records: Iterable[RequestRecord]) -> str:
    """Why the server plainly cannot keep up with the offered load; "" when that cannot be said.

    Stricter than the lack of a steady state, which may also come of a short run: latency or the number in flight
    grows, by much and beyond doubt.
    """
    run = _read([record for record in records if record.scheduled_ns > 0])
    if run is None or len(run.scheduled) < _MIN_REQUESTS:
        return ""
    finding = _growth(run, _start(run))
    return finding.text if finding.certain and finding.upwards else ""


def _start(run: _Run) -> int:
    """Position of the first request after the ramp-up; 0 where the ramp-up has no end."""
    first = max(_ramp_up(series.values) for series in run.series())
    return first if first < 0.9 * _LONGEST_RAMP_UP * len(run.scheduled) else 0


@dataclass(frozen=True, slots=True)
class _Finding:
    """Evidence against an equilibrium. The text is empty when there is none."""

    text: str = ""
    certain: bool = False
    upwards: bool = False


def _growth(run: _Run, first: int) -> _Finding:
    seconds = (run.scheduled[first:] - run.scheduled[first]) / 1e9
    backlog = _backlog_grows(run, first)
    finding = _Finding()
    for series in run.series():
        values = series.values[first:]
        known = ~np.isnan(values)
        trend = _trend(seconds[known], values[known])
        if trend is None:
            continue
        noticeable = abs(trend.drift) > _NOTICEABLE
        if trend.real or (backlog and trend.drift > _NOTICEABLE):
            return _Finding(_describe(series, trend, backlog), certain=True, upwards=trend.per_s > 0)
        independent = np.sum(known) / autocorrelation_time(_ranks(values[known]))
        if independent < _MIN_INDEPENDENT and not finding.text:
            way = _trend_text(series, trend) if noticeable else f"{series.name} wanders"
            finding = _Finding(f"{way}, too slowly to judge in this time: the run is too short")
    return finding


def _trend_text(series: _Series, trend: _Trend) -> str:
    return f"{series.name} {'grows' if trend.per_s > 0 else 'falls'} by {series.words(trend.per_s)} per second"


def _describe(series: _Series, trend: _Trend, backlog: bool) -> str:
    if trend.per_s <= 0:
        why = "the server had not settled in time"
    elif backlog:
        why = OVERLOAD
    else:
        why = "the server, or the machine that it runs on, became slower"
    return f"{_trend_text(series, trend)}: {why}"


def _backlog_grows(run: _Run, first: int) -> bool:
    """Whether arrivals outrun departures by more than chance allows for a server that just keeps up.

    What is in flight then walks at random, each arrival by the spread of the gaps between arrivals and between
    departures; a server with capacity to spare is drawn back to its level and stays below that.
    """
    arrivals = run.scheduled[first:]
    departures = np.sort(run.ended)
    departures = departures[(departures > arrivals[0]) & (departures <= arrivals[-1])]
    growth = float(run.in_flight[-1] - run.in_flight[first])
    spread = sum(_gap_dispersion(times) for times in (arrivals, departures))
    return growth > _CERTAIN * math.sqrt(len(arrivals) * spread)


def _gap_dispersion(times: np.ndarray) -> float:
    """Squared coefficient of variation of the gaps between events; 1 for a Poisson process, and for too few to tell."""
    gaps = np.diff(times).astype(float)
    mean = float(np.mean(gaps)) if len(gaps) >= 10 else 0.0
    return float(np.var(gaps)) / mean**2 if mean > 0.0 else 1.0


def _trend(seconds: np.ndarray, values: np.ndarray) -> _Trend | None:
    """A straight line by least squares; its error allows for residuals that depend on each other."""
    n = len(values)
    if n < 10 or np.ptp(seconds) <= 0.0 or np.mean(values) <= 0.0:
        return None
    centred = seconds - np.mean(seconds)
    slope = float(np.dot(centred, values) / np.dot(centred, centred))
    residuals = values - np.mean(values) - slope * centred
    independent = n / autocorrelation_time(residuals)
    freedom = max(1.0, independent - 2.0)
    error = math.sqrt(float(np.mean(residuals**2)) / freedom / float(np.mean(centred**2)))
    t = abs(slope) / error if error > 0.0 else (math.inf if slope else 0.0)
    return _Trend(slope, slope * float(np.ptp(seconds)) / float(np.mean(values)), t_tail(t, freedom))


def _milliseconds(slope: float) -> str:
    return f"{abs(slope):.3g} ms" if abs(slope) < 1e4 else f"{abs(slope) / 1e3:.3g} s"
