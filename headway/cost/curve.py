"""Curves that were measured at some sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def on_curve(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` of a curve of (x, value), x ascending from above 0: linear in log x, level beyond its ends."""
    if x <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if x < high:
            return before + math.log(x / low) / math.log(high / low) * (after - before)
    return points[-1][1]
