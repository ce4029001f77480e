"""The few distributions that the statistics need, in plain Python: importing scipy would take longer than using these.

Sources: the incomplete beta function by its continued fraction (DLMF 8.17.22, evaluated by Lentz's method); Student's t
and the binomial from it (DLMF 8.17.5); Clopper & Pearson 1934.
"""

from __future__ import annotations

import math

import numpy as np

_TINY = 1e-300


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for a, b > 0, to about 1e-13."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    # The fraction converges quickly only below the mean.
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) - log_beta(a, b) - math.log(a)
    return math.exp(log_front) * _beta_fraction(x, a, b)


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for term in (even, odd):
            d = 1.0 / _nonzero(1.0 + term * d)
            c = _nonzero(1.0 + term / c)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return fraction


def _nonzero(x: float) -> float:
    return x if abs(x) > _TINY else _TINY


def beta_quantile(q: float, a: float, b: float) -> float:
    """x with I_x(a, b) = q, by bisection; to 1e-13 of the smaller of x and 1 - x, or to rounding."""
    low, high = 0.0, 1.0
    while high - low > 1e-13 * min(high, 1.0 - low):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if beta_cdf(middle, a, b) < q:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def t_tail(t: float, df: float) -> float:
    """P(|T| > |t|) of Student's t with `df` degrees of freedom."""
    if math.isinf(t):
        return 0.0
    return beta_cdf(df / (df + t * t), 0.5 * df, 0.5)


def t_quantile(confidence: float, df: float) -> float:
    """The t for which P(|T| <= t) = confidence."""
    x = beta_quantile(1.0 - confidence, 0.5 * df, 0.5)
    return math.sqrt(df * (1.0 - x) / x) if x > 0.0 else math.inf


def binomial_ranks(n: int, share: float, confidence: float) -> tuple[int | None, int | None]:
    """Ranks (l, u), from 1, of the order statistics that enclose the quantile `share` of n independent values.

    P(B < l) <= tail and P(B >= u) <= tail for B ~ Binomial(n, share) and tail = (1 - confidence) / 2, each as close to
    the middle as that allows. None where no order statistic is far enough out (David & Nagaraja 2003, 7.1).
    """
    tail = 0.5 * (1.0 - confidence)
    first, cdf = _binomial_cdf(n, share)
    # cdf[i] = P(B <= first + i); l is the largest rank with P(B <= l - 1) <= tail.
    low = first + int(np.searchsorted(cdf, tail, side="right"))
    high = first + int(np.searchsorted(cdf, 1.0 - tail, side="left")) + 1
    return (low if low >= 1 else None), (high if high <= n else None)


def _binomial_cdf(n: int, share: float) -> tuple[int, np.ndarray]:
    """(k0, P(B <= k) for k = k0, k0 + 1, ...) over all k that are not beyond reach (40 standard deviations)."""
    mode = min(n, int((n + 1) * share))
    reach = 40 + int(40 * math.sqrt(n * share * (1.0 - share)))
    first, last = max(0, mode - reach), min(n, mode + reach)
    k = np.arange(first, last, dtype=float)
    log_ratio = np.log((n - k) / (k + 1.0)) + math.log(share / (1.0 - share))  # pmf(k + 1) / pmf(k)
    log_pmf = np.concatenate(([0.0], np.cumsum(log_ratio)))
    pmf = np.exp(log_pmf - log_pmf[mode - first])
    cdf = np.cumsum(pmf)
    return first, cdf / cdf[-1]
