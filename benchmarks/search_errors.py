"""How often `headway bench --find-max-rate` claims a rate that misses its target, and how often one that does not.

    python -m benchmarks.search_errors --searches 100

Nothing is measured: requests miss by a process whose attainment is known, and the search sees what it would see of a
server. docs/statistics.md has the table.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from headway.load.measures.search import SearchOptions, find_max_rate
from headway.load.measures.trials import ProbeOutcome

RATE = 10.0  # requests/s; one block of the search is then ten requests
PROBE = 400  # requests, as of `headway bench`
Process = Callable[[np.random.Generator, int, float], np.ndarray]


def independent(rng: np.random.Generator, count: int, missed: float) -> np.ndarray:
    """Which of `count` requests miss, shape (count,): each by itself, a share of `missed`."""
    return rng.random(count) < missed


def stalls(rng: np.random.Generator, count: int, missed: float, length: float) -> np.ndarray:
    """The server stands still now and then, at random, for `length` requests."""
    return _alternating(rng, count, missed, length, lambda: length)


def bursts(rng: np.random.Generator, count: int, missed: float, length: float) -> np.ndarray:
    """Misses come in runs of random length, `length` on average."""
    return _alternating(rng, count, missed, length, lambda: rng.exponential(length))


def on_off(rng: np.random.Generator, count: int, missed: float, length: float) -> np.ndarray:
    """Now and then, for `length` requests on average, every second request misses, by itself."""
    on = _alternating(rng, count, 2.0 * missed, length, lambda: rng.exponential(length))
    return on & (rng.random(count) < 0.5)


def _alternating(
    rng: np.random.Generator, count: int, share: float, mean: float, length: Callable[[], float]
) -> np.ndarray:
    """A renewal process that is on for `length()` requests, `mean` on average, and off for an exponential time."""
    inside = np.zeros(count, dtype=bool)
    at = -20.0 * mean / share  # begun long before
    while at < count:
        at += rng.exponential(mean * (1.0 - share) / share)
        ends = at + length()
        if ends > 0.0:
            inside[max(0, round(at)) : max(0, round(ends))] = True
        at = ends
    return inside


SERVERS = 4


def queue(rng: np.random.Generator, count: int, missed: float, load: float) -> np.ndarray:
    """Waiting times of M/M/4 over the limit that a share of `missed` exceeds; shape (count,)."""
    return waits(rng, count, load) / limit(missed, load)


def limit(missed: float, load: float) -> float:
    """The waiting time, in mean service times, that a share of `missed` exceeds (Erlang C)."""
    offered = SERVERS * load
    terms = [offered**k / math.factorial(k) for k in range(SERVERS)]
    last = offered**SERVERS / math.factorial(SERVERS) / (1.0 - load)
    busy = last / (sum(terms) + last)
    return math.log(busy / missed) / (SERVERS * (1.0 - load))


def waits(rng: np.random.Generator, count: int, load: float) -> np.ndarray:
    """Waiting times in M/M/4, in mean service times, long after its start; shape (count,)."""
    ahead = 2000
    arrivals = np.cumsum(rng.exponential(1.0 / (SERVERS * load), count + ahead))
    return _queue_waits(arrivals, rng.exponential(1.0, count + ahead), SERVERS)[ahead:]


def _queue_waits(arrivals: np.ndarray, service: np.ndarray, servers: int) -> np.ndarray:
    free = [0.0] * servers
    waits = np.empty(len(arrivals))
    for index, (due, takes) in enumerate(zip(arrivals.tolist(), service.tolist(), strict=True)):
        first = min(range(servers), key=free.__getitem__)
        begins = max(due, free[first])
        free[first] = begins + takes
        waits[index] = begins - due
    return waits


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of searches at one rate: the share that claimed it, and the median of requests that this took."""

    claimed: float
    requests: float


def searched(process: Process, missed: float, searches: int, seed: int = 0, rate: float = RATE) -> Outcome:
    """Whether one rate holds, asked as often as `searches`."""
    taken = []
    for number in range(searches):
        rng = np.random.default_rng([seed, number])
        options = SearchOptions(min_rate=rate, max_rate=rate)
        found = asyncio.run(find_max_rate(_prober(process, rng, missed), rate, options))
        if found.rate is not None:
            taken.append(sum(trial.total for trial in found.trials))
    return Outcome(len(taken) / searches, float(np.median(taken)) if taken else float("nan"))


def _prober(process: Process, rng: np.random.Generator, missed: float):  # type: ignore[no-untyped-def]
    """What the search calls: it goes along one series, in which what misses and what does not look alike otherwise."""
    series = np.empty(0)
    begin = 0

    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        nonlocal series, begin
        if not len(series):
            drawn = process(rng, 40_000, missed) if missed else np.zeros(40_000, dtype=bool)
            series = drawn if drawn.dtype != bool else np.where(drawn, 2.0, rng.uniform(0.1, 0.9, len(drawn)))
        count = int(np.clip(wanted, PROBE, max(PROBE, 60 * rate)))
        begin += count
        return ProbeOutcome(rate, series[begin - count : begin])

    return probe


def found_loads(searches: int, at: float = 0.85, seed: int = 0) -> list[float]:
    """Loads at which searches found the highest rate of M/M/4, whose target of 99 % is just met at a load of `at`."""
    waits_at_most, found = limit(0.01, at), []
    for number in range(searches):
        rng = np.random.default_rng([seed, number])

        async def probe(load: float, wanted: int, rng: np.random.Generator = rng) -> ProbeOutcome:
            if load >= 1.0:
                return ProbeOutcome(load, np.full(PROBE, math.inf))
            return ProbeOutcome(load, waits(rng, min(max(wanted, PROBE), 600), load) / waits_at_most)

        found.append(asyncio.run(find_max_rate(probe, 0.25, SearchOptions(stall_s=0.0))).rate or 0.0)
    return found


PROCESSES: dict[str, Process] = {
    "independent": independent,
    "stalls of 5 requests": partial(stalls, length=5),
    "stalls of 10": partial(stalls, length=10),
    "stalls of 20": partial(stalls, length=20),
    "stalls of 60": partial(stalls, length=60),
    "stalls of 100": partial(stalls, length=100),
    "runs of 10": partial(bursts, length=10),
    "on and off, 10": partial(on_off, length=10),
    "M/M/4 at load 0.8": partial(queue, load=0.8),
}
BAD, GOOD = (0.058, 0.02, 0.0125, 0.0101), (0.005, 0.002, 0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=100, help="for each number")
    searches = parser.parse_args().searches
    print(f"| misses | {' | '.join(f'{100 * (1 - missed):.4g} %' for missed in BAD + GOOD)} |")
    print("|---" * (1 + len(BAD + GOOD)) + "|")
    for name, process in PROCESSES.items():
        row = []
        for missed in BAD + GOOD:
            outcome = searched(process, missed, searches)
            row.append(f"{100 * outcome.claimed:.3g} %" + ("" if missed in BAD else f", {outcome.requests:,.0f}"))
        print(f"| {name} | {' | '.join(row)} |", flush=True)
    loads = found_loads(searches // 4)
    low, middle, high = np.quantile(loads, (0.1, 0.5, 0.9))
    print(
        f"\n{len(loads)} searches of M/M/4, which meets its target up to a load of 0.85: found {middle:.2f}, 10 to 90 %"
    )
    print(f"{low:.2f} to {high:.2f}; beyond 0.85 in {100 * np.mean(np.array(loads) > 0.85):.3g} %")


if __name__ == "__main__":
    main()
