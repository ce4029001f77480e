"""Percentiles that say how sure they are, and are refused where the sample is too small for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from headway.load.measures.dependence import effective_count
from headway.load.measures.numbers import Distribution, Percentile
from headway.load.measures.probability import beta_quantile, binomial_ranks


def distribution(
    values: np.ndarray, percentiles: Sequence[float], *, groups: np.ndarray | None = None, confidence: float = 0.95
) -> Distribution:
    """Describe a metric: moments, extremes, and percentiles with confidence intervals.

    A percentile is the linear interpolation between order statistics (numpy's and vLLM's). Its interval is that of
    order statistics, which holds for any distribution, on as many samples as are left when dependence is taken off. A
    bound that would have to reach beyond those is None. Where the sample is too small even if all were independent, the
    claim is refused: `value` is None. In both cases `needs` says how many samples it takes. docs/statistics.md derives
    it.

    Args:
        values: shape (n,), finite, in arrival order. None at all gives a distribution of NaNs without a claim.
        percentiles: each 0 < p < 100.
        groups: shape (n,), for each value the request it belongs to, rising in arrival order; None when every value
            is a request of its own. Below the number of requests that their P50 takes, no claim is made.
        confidence: the confidence of each interval, two-sided.
    """
    values = np.asarray(values, dtype=float)
    if not len(values):
        nothing = tuple(_refused(p, samples_needed(p, confidence)) for p in percentiles)
        return Distribution(0, 0.0, math.nan, math.nan, math.nan, math.nan, nothing)
    ordered = np.sort(values)
    points = np.percentile(ordered, [50.0, *percentiles])
    effective = functools.cache(lambda edge: effective_count(values > edge, groups))  # high percentiles share an edge
    least = 0
    if groups is not None:  # values of few requests say little of others, however many they are
        least = math.ceil(samples_needed(50.0, confidence) * len(values) / len(np.unique(groups)))
    return Distribution(
        count=len(values),
        effective_count=effective(float(points[0])),
        mean=float(np.mean(values)),
        std=float(np.std(values)),
        minimum=float(ordered[0]),
        maximum=float(ordered[-1]),
        percentiles=tuple(
            _percentile(p, float(point), ordered, effective, least, confidence)
            for p, point in zip(percentiles, points[1:], strict=True)
        ),
    )


def _percentile(
    p: float,
    point: float,
    ordered: np.ndarray,
    effective: Callable[[float], float],
    least: int,
    confidence: float,
) -> Percentile:
    """One percentile.

    Args:
        effective: how many independent values tell as much of the share beyond a value as all do.
        least: refuse the claim of fewer values.
    """
    n, count = len(ordered), effective(_edge_of_tail(p, point, ordered))
    independent = max(1, math.floor(count + 1e-9))
    low, high = binomial_ranks(independent, p / 100.0, confidence)
    needs = samples_needed(p, confidence, tau=n / count) if low is None or high is None else None
    wanted = max(samples_needed(p, confidence), least)
    if n < wanted:
        return _refused(p, max(needs or 0, wanted))
    # The r-th of m values stands at the share r / (m + 1); that share of the n values there are, rounded outwards.
    stretch = (n + 1) / (independent + 1)
    return Percentile(
        p,
        point,
        low=None if low is None else float(ordered[max(1, math.floor(low * stretch)) - 1]),
        high=None if high is None else float(ordered[min(n, math.ceil(high * stretch)) - 1]),
        needs=needs,
    )


def _edge_of_tail(p: float, point: float, ordered: np.ndarray) -> float:
    """Where to cut the values in two so that their order shows how the tail beyond `p` clusters.

    It is the percentile itself, but there are at least 50 values on the thinner side: a handful says nothing of
    dependence. Further in, dependence is rather stronger, which errs on the side of refusing.
    """
    n = len(ordered)
    thin = min(50, n // 2)
    if n * (100.0 - p) / 100.0 < thin:
        return float(ordered[n - thin - 1])
    if n * p / 100.0 < thin:
        return float(ordered[thin - 1])
    return point


def _refused(p: float, needs: int) -> Percentile:
    return Percentile(p, value=None, low=None, high=None, needs=needs)


def samples_needed(p: float, confidence: float = 0.95, tau: float = 1.0) -> int:
    """The smallest sample whose interval for the percentile p (in percent) has both bounds.

    The largest of n independent values lies above the quantile with probability 1 - p^n, so the upper bound exists
    when p^n <= (1 - confidence) / 2; the lower one likewise when (1 - p)^n is. Dependence makes it tau times as many.
    P50 needs 6, P90 36, P99 368 and P99.9 3688 at 95 %.
    """
    share = max(p, 100.0 - p) / 100.0
    independent = math.ceil(math.log(0.5 * (1.0 - confidence)) / math.log(share))
    return math.ceil(independent * tau - 1e-9)


def proportion_interval(
    met: float, total: float, confidence: float = 0.95, n_eff: float | None = None
) -> tuple[float, float]:
    """The Clopper-Pearson interval of met / total: exact, at least `confidence` whatever the true share.

    Args:
        n_eff: how many independent requests the `total` are worth (Korn & Graubard 1998 put it in the same way);
            None takes them all.
    """
    size = total if n_eff is None else n_eff
    if size == 0:
        return 0.0, 1.0
    hits = met / total * size
    tail = 0.5 * (1.0 - confidence)
    low = beta_quantile(tail, hits, size - hits + 1.0) if met > 0 else 0.0
    high = beta_quantile(1.0 - tail, hits + 1.0, size - hits) if met < total else 1.0
    return low, high
