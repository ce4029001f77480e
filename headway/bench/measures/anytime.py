"""An interval of a share that one may look at after every batch of samples."""

from __future__ import annotations

import math

from headway.bench.measures.probability import beta_cdf, log_beta


def anytime_interval(met: float, total: float, confidence: float = 0.95) -> tuple[float, float]:
    """An interval of a share that holds at every look at once, so that one may look after each batch of samples.

    The bound of the ones who look only once would be crossed by chance when they look again and again. A share p is
    ruled out when the average likelihood of the shares beyond it is 2 / (1 - confidence) times its own, which by
    Ville's inequality happens at any time with probability (1 - confidence) / 2 at most, on either side (Robbins 1970).
    """
    if total <= 0:
        return 0.0, 1.0
    limit = math.log(2.0 / (1.0 - confidence))
    hit, miss = max(0.0, met), max(0.0, total - met)
    share = hit / total
    low = 0.0 if hit == 0 else _ruled_out_up_to(hit, miss, share, limit)
    high = 1.0 if miss == 0 else 1.0 - _ruled_out_up_to(miss, hit, 1.0 - share, limit)
    return low, high


def _ruled_out_up_to(hit: float, miss: float, share: float, limit: float) -> float:
    """The largest p below `share` that is ruled out from above, by bisection."""
    low, high = 0.0, share
    for _ in range(40):
        p = 0.5 * (low + high)
        if p <= 0.0 or p >= 1.0 or _log_evidence(hit, miss, p) > limit:
            low = p
        else:
            high = p
    return low


def _log_evidence(hit: float, miss: float, p: float) -> float:
    """log of (likelihood averaged over the shares above p, over the likelihood of p)."""
    above = 1.0 - beta_cdf(p, hit + 1.0, miss + 1.0)
    if above <= 0.0:
        return -math.inf
    average = log_beta(hit + 1.0, miss + 1.0) + math.log(above) - math.log1p(-p)
    return average - hit * math.log(p) - miss * math.log1p(-p)
