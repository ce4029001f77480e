"""What several things measured over the same rounds, and how they compare: each round's neighbours with one another."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compared:
    """One measure of one thing, beside the first one's.

    Args:
        median, low, high: over the rounds.
        ratio: the first one's median by this one's.
        ratio_low, ratio_high: range of the ratio within a round.
        ratio_middle: the median of the ratios within a round. A machine that changes its speed between rounds changes
            this less than the ratio of medians. All four are None where a value is 0.
    """

    median: float
    low: float
    high: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    ratio_middle: float | None


def compare(first: list[float], other: list[float]) -> Compared:
    """Values of the same rounds, in the same order; at least one of each.

    One may have fewer, where it died: the ratio is then of the rounds that both have.
    """
    both = min(len(first), len(other))
    median = statistics.median(other)
    ratio, ratios = None, []
    if all(other):
        ratio = statistics.median(first[:both]) / statistics.median(other[:both])
        ratios = [ours / theirs for ours, theirs in zip(first, other, strict=False)]
    bounds = min(ratios, default=None), max(ratios, default=None)
    return Compared(median, min(other), max(other), ratio, *bounds, statistics.median(ratios) if ratios else None)


@dataclass
class Rounds:
    """Values by load, thing and measure, in the order measured."""

    values: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, load: str, thing: str, measured: dict[str, float]) -> None:
        measures = self.values.setdefault(load, {}).setdefault(thing, {})
        for measure, value in measured.items():
            measures.setdefault(measure, []).append(value)

    def compared(self, load: str, thing: str, measure: str, first: str) -> Compared:
        things = self.values[load]
        return compare(things[first][measure], things[thing][measure])

    def total(self, load: str, thing: str, measure: str) -> float:
        return sum(self.values[load][thing][measure])


def number(value: float | None) -> str:
    """Three digits that count, at most three of them after the point; "-" for none."""
    if value is None:
        return "-"
    before_point = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{max(0, min(2 - before_point, 3))}f}"


def spread(value: float | None, low: float | None, high: float | None) -> str:
    return number(value) if low == high else f"{number(value)} ({number(low)} .. {number(high)})"
