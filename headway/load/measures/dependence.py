"""How much less a series of dependent values knows than as many independent ones.

Requests that are in the server at the same time wait for each other, so their latencies resemble each other, and n of
them are worth n / tau. Sources: Geyer 1992 (Practical Markov chain Monte Carlo, 3.3: initial monotone sequence);
Kish 1965 (Survey Sampling: design effect of clusters); Politis & White 2004 with the correction of Patton, Politis &
White 2009 (length of blocks).
"""

from __future__ import annotations

import math

import numpy as np


def autocovariance(series: np.ndarray) -> np.ndarray:
    """The autocovariance at lags 0 .. n - 1, shape (n,). It is divided by n, to be positive definite."""
    n = len(series)
    centred = np.asarray(series, dtype=float) - np.mean(series)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance: np.ndarray = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n] / n
    return covariance


def autocorrelation_time(series: np.ndarray) -> float:
    """tau >= 1 in arrival order: the mean of n values varies as the mean of n / tau independent ones.

    tau = 1 + 2 * (sum of autocorrelations). The sum ends where pairs of neighbouring lags stop being positive, and the
    pairs are made to fall (Geyer), because what lies beyond is noise. A tau that independent values would show as
    well (two standard errors of one autocorrelation, twice) is taken for 1. Where tau is a large part of n, the mean
    that was taken off has hidden a part of the correlation: that is put back to first order.
    """
    n = len(series)
    if n < 4:
        return 1.0
    covariance = autocovariance(series)
    if covariance[0] <= 1e-24 * (1.0 + float(np.mean(series)) ** 2):  # constant but for rounding
        return 1.0
    pairs = covariance[0 : n - n % 2 : 2] + covariance[1 : n - n % 2 : 2]
    ends = np.flatnonzero(pairs <= 0.0)
    positive = pairs[: ends[0]] if len(ends) else pairs
    falling = np.minimum.accumulate(positive)
    tau = float(2.0 * np.sum(falling) / covariance[0] - 1.0)
    if tau <= 1.0 + 4.0 / math.sqrt(n):
        return 1.0
    return min(float(n), tau * (1.0 + 4.0 * len(positive) / n))


def effective_count(values: np.ndarray, groups: np.ndarray | None = None) -> float:
    """How many independent values tell as much about the mean of `values` as these.

    Args:
        values: in arrival order.
        groups: the number of the group (the request) that each value belongs to, rising in arrival order of the groups.
            Values of a group depend on each other, and so do neighbouring groups.
    """
    n = len(values)
    if n == 0:
        return 0.0
    if groups is None:
        return n / autocorrelation_time(values)
    return n / design_effect(values, groups)


def design_effect(values: np.ndarray, groups: np.ndarray) -> float:
    """Variance of the sum of all values over what it would be if they were independent; >= 1.

    The sum over each group makes one series over the groups, and that series has an autocorrelation time of its own:
    groups that overlap in time share the same steps of the server.
    """
    n = len(values)
    _, group_of = np.unique(groups, return_inverse=True)
    count = int(group_of.max()) + 1 if n else 0
    if count < 2:
        return autocorrelation_time(values)  # one request alone: all there is to see is the order of its tokens
    centred = np.asarray(values, dtype=float) - np.mean(values)
    independent = float(np.sum(centred**2))
    if independent <= 0.0:
        return 1.0
    sums = np.bincount(group_of, weights=centred, minlength=count)
    clustered = float(np.sum(sums**2)) * count / (count - 1) * autocorrelation_time(sums)
    return min(float(n), max(1.0, clustered / independent))


def block_length(series: np.ndarray) -> int:
    """Length of the blocks of a circular block bootstrap that loses least (Politis & White 2004), 1 .. n / 3."""
    n = len(series)
    if n < 8:
        return 1
    covariance = autocovariance(series)
    if covariance[0] <= 0.0:
        return 1
    correlation = covariance / covariance[0]
    quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    longest = min(n - 1, math.ceil(math.sqrt(n)) + quiet)
    limit = 2.0 * math.sqrt(math.log10(n) / n)
    small = np.abs(correlation[1 : longest + 1]) < limit
    last = longest
    for lag in range(len(small) - quiet + 1):
        if small[lag : lag + quiet].all():
            last = lag
            break
    reach = min(2 * max(last, 1), longest)
    lags = np.arange(-reach, reach + 1)
    window = np.clip(2.0 * (1.0 - np.abs(lags) / reach), 0.0, 1.0)  # flat top, then falling
    both = covariance[np.abs(lags)]
    spread = float(np.sum(window * np.abs(lags) * both))
    level = float(np.sum(window * both))
    if level <= 0.0:
        return 1
    best = (2.0 * spread**2 / (4.0 / 3.0 * level**2)) ** (1.0 / 3.0) * n ** (1.0 / 3.0)
    return int(min(max(1, math.ceil(best)), max(1, min(3 * math.sqrt(n), n / 3))))
