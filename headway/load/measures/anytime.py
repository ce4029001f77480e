"""An interval of a share that one may look at after every batch of samples."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np

# Bets, as parts of the largest one that a loss cannot make negative, and how the stake is spread over them. The largest
# grows quickest while nothing is missed, and is lost with the first block that is missed as a whole.
_BETS = np.array([1.0, 0.75, 0.5, 0.3, 0.15, 0.08, 0.04, 0.02, 0.01])
_LOG_STAKES = np.log(np.array([0.4, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]))


def anytime_interval(missed: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """An interval of the share that is met. It holds at every look at once: one may look after each batch of samples.

    A bet on each block that less is missed than a share m multiplies the stake by 1 + bet * (m - missed). Where m or
    more is missed on average, the stake is not expected to grow, whatever the values' distribution, so by Ville's
    inequality it reaches 2 / (1 - confidence) times its first value, ever, with probability (1 - confidence) / 2 at
    most. A share is ruled out when it does; likewise from the other side (Waudby-Smith & Ramdas, Estimating means of
    bounded random variables by betting, 2024). Nothing is assumed of what happens inside of a block.

    Args:
        missed: share of each block that is missed, each from 0 to 1, of blocks that do not depend on each other.

    Returns:
        (low, high) of the share that is met.
    """
    if not len(missed):
        return 0.0, 1.0
    limit = math.log(2.0 / (1.0 - confidence))
    values, counts = np.unique(missed, return_counts=True)
    share = float(np.average(values, weights=counts))
    most = 1.0 if share >= 1.0 else _nearest(share, 1.0, lambda m: _log_stake(m - values, counts, 1.0 - m) > limit)
    least = 0.0 if share <= 0.0 else _nearest(share, 0.0, lambda m: _log_stake(values - m, counts, m) > limit)
    return 1.0 - most, 1.0 - least


@functools.cache
def least_blocks(target: float, confidence: float = 0.95) -> int:
    """How many blocks must be met, without a miss, before a share of more than `target` is certain."""

    def certain(blocks: int) -> float:
        return anytime_interval(np.zeros(blocks), confidence)[0]

    enough = 1
    while certain(enough) <= target:
        enough *= 2
    return bisect.bisect_right(range(enough), target, key=certain)


def _log_stake(gains: np.ndarray, counts: np.ndarray, largest_loss: float) -> float:
    """log of what a stake of 1 has become after so many of each of these gains."""
    with np.errstate(divide="ignore"):
        factors = np.log(np.maximum(0.0, 1.0 + np.outer(_BETS, gains / largest_loss)))
    return float(np.logaddexp.reduce(_LOG_STAKES + factors @ counts))


def _nearest(inside: float, outside: float, ruled_out: Callable[[float], bool]) -> float:
    """The share nearest to `inside` that is ruled out, towards `outside` (which is returned where none is)."""
    for _ in range(40):
        middle = 0.5 * (inside + outside)
        if ruled_out(middle):
            outside = middle
        else:
            inside = middle
    return outside
