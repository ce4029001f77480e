"""What a statistic of a run would have been in other runs like it: the circular block bootstrap.

Requests are drawn again in blocks of neighbours, so that what they did to each other stays in (Künsch 1989; Politis &
Romano 1992). A resample is a row of weights: how often each request was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from headway.load.measures.probability import t_quantile, t_tail

Weights = npt.NDArray[np.float32]  # (resamples, units)
Replicates = Callable[[Weights], np.ndarray]  # weights to a statistic of shape (resamples,)

_AT_A_TIME = 4_000_000  # weights held in memory
_EXACT = 400  # distinct values; more are put in bins


@dataclass(frozen=True, slots=True)
class Estimate:
    """Intervals of the difference b - a and the ratio b / a of two runs; None where there is no ratio."""

    low: float
    high: float
    ratio_low: float | None
    ratio_high: float | None
    p_value: float


def block_weights(rng: np.random.Generator, units: int, block: int, resamples: int) -> Iterator[Weights]:
    """Weights of `resamples` circular block resamples of `units` requests, some rows at a time."""
    blocks = math.ceil(units / block)
    rows_at_a_time = max(1, _AT_A_TIME // units)
    for first in range(0, resamples, rows_at_a_time):
        rows = min(rows_at_a_time, resamples - first)
        starts = rng.integers(0, units, (rows, blocks)) + units * np.arange(rows)[:, None]
        begins = np.bincount(starts.ravel(), minlength=rows * units).reshape(rows, units)
        # A unit is drawn by every block that begins at it or up to block - 1 units before it, round the circle.
        run = np.cumsum(np.concatenate((begins[:, units - block :], begins), axis=1), axis=1)
        yield (run[:, block:] - run[:, :units]).astype(np.float32)


def ratio_of_sums(numerator: np.ndarray, denominator: np.ndarray) -> Replicates:
    """Replicates of sum(numerator) / sum(denominator), both of shape (units,): a mean, a share or a rate."""
    both = np.stack((numerator, denominator), axis=1)

    def replicate(weights: Weights) -> np.ndarray:
        sums = weights @ both
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: np.ndarray = sums[:, 0] / sums[:, 1]
        return ratio

    return replicate


def quantile(values: np.ndarray, unit_of: np.ndarray, units: int, share: float) -> Replicates:
    """Replicates of a quantile of `values`, of which each goes with its unit (the gaps of a request stay together).

    Many values are put in bins that are narrow where the quantile can be; inside of one the line is straight, and the
    replicates are moved by what the bins do to the sample itself.
    """
    edges = _edges(values, share)
    bins = np.searchsorted(edges, values, side="left")
    table = np.bincount(unit_of * len(edges) + bins, minlength=units * len(edges)).reshape(units, len(edges))
    table = table.astype(np.float32)

    def on_bins(weights: Weights) -> np.ndarray:
        below = np.cumsum(weights @ table, axis=1, dtype=np.float64)
        target = share * below[:, -1]
        column = np.minimum((below < target[:, None]).sum(axis=1), len(edges) - 1)
        before = np.maximum(column - 1, 0)
        rows = np.arange(len(weights))
        start = np.where(column > 0, below[rows, before], 0.0)
        width = below[rows, column] - start
        part = np.where(width > 0.0, (target - start) / np.where(width > 0.0, width, 1.0), 1.0)
        found: np.ndarray = edges[before] + part * (edges[column] - edges[before])
        found[below[:, -1] == 0.0] = np.nan  # none of the requests that have such a value was drawn
        return found

    offset = float(np.quantile(values, share)) - float(on_bins(np.ones((1, units), np.float32))[0])
    return lambda weights: on_bins(weights) + offset


def _edges(values: np.ndarray, share: float) -> np.ndarray:
    distinct = np.unique(values)
    if len(distinct) <= _EXACT:
        return distinct
    near = share + 0.75 * min(share, 1.0 - share) * np.linspace(-1.0, 1.0, 101)
    coarse = np.linspace(0.0, 1.0, 21)
    return np.unique(np.quantile(values, np.sort(np.concatenate((near, coarse)))))


def estimate(a: np.ndarray, b: np.ndarray, observed: float, freedom: float, confidence: float) -> Estimate:
    """Estimate from replicates of a statistic in both runs, shape (resamples,), paired row by row where the draws were.

    The interval is the expanded percentile interval (Hesterberg 2015): as much further out as Student's t is than the
    normal, for `freedom` + 1 independent blocks. The p-value is the share of resamples on the other side of zero, on
    the same scale; where there is none, the distance in standard errors tells what counting cannot.

    Args:
        observed: b - a in the runs themselves.
    """
    known = np.isfinite(a) & np.isfinite(b)
    a, b = a[known], b[known]
    difference = b - a
    tail = NormalDist().cdf(-t_quantile(confidence, freedom))
    low, high = (float(each) for each in np.quantile(difference, [tail, 1.0 - tail]))
    ratio: tuple[float | None, float | None] = (None, None)
    if np.all(a > 0.0):
        bounds = np.quantile(b / a, [tail, 1.0 - tail])
        ratio = float(bounds[0]), float(bounds[1])
    return Estimate(low, high, *ratio, p_value=_p_value(difference, observed, freedom))


def _p_value(difference: np.ndarray, observed: float, freedom: float) -> float:
    if observed == 0.0:
        return 1.0
    beyond = int(min(np.sum(difference <= 0.0), np.sum(difference >= 0.0)))
    distance = -NormalDist().inv_cdf(min(0.5, (beyond + 1) / (len(difference) + 1)))
    if beyond == 0:
        error = float(np.std(difference))
        distance = max(distance, abs(observed) / error if error > 0.0 else math.inf)
    return t_tail(distance, freedom)


def run_test(a: np.ndarray, b: np.ndarray, paired: bool, confidence: float) -> Estimate:
    """A statistic of several runs of each side, shapes (runs,): Welch's t-test, or the paired one, run by run.

    The interval of the ratio is that of the difference of logarithms, so it is one of geometric means.
    """
    low, high, p_value = _t_interval(a, b, paired, confidence)
    ratio: tuple[float | None, float | None] = (None, None)
    if np.all(a > 0.0) and np.all(b > 0.0):
        bounds = _t_interval(np.log(a), np.log(b), paired, confidence)
        ratio = math.exp(bounds[0]), math.exp(bounds[1])
    return Estimate(low, high, *ratio, p_value=p_value)


def _t_interval(a: np.ndarray, b: np.ndarray, paired: bool, confidence: float) -> tuple[float, float, float]:
    moved = float(np.mean(b) - np.mean(a))
    if paired:
        freedom = len(a) - 1.0
        error = float(np.std(b - a, ddof=1)) / math.sqrt(len(a))
    else:
        parts = [float(np.var(each, ddof=1)) / len(each) for each in (a, b)]
        error = math.sqrt(sum(parts))
        spread = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
        freedom = sum(parts) ** 2 / spread if spread > 0.0 else len(a) + len(b) - 2.0
    reach = t_quantile(confidence, freedom) * error
    t = abs(moved) / error if error > 0.0 else (math.inf if moved else 0.0)
    return moved - reach, moved + reach, t_tail(t, freedom)
