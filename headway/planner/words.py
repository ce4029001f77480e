"""How figures of a plan are written."""

from __future__ import annotations

import math

from headway.cost.capacity import Settings
from headway.planner.plan import Estimate
from headway.report.style import number


def gigabytes(size: float) -> str:
    """A size in decimal units, as data sheets and checkpoints give it: 16.1 GB, 131 kB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            return f"{number(size / factor)} {unit}"
    return f"{size:,.0f} bytes"


def seconds(value: float) -> str:
    """A time with the unit that suits it: 7.5 ms."""
    if value >= 100:
        return f"{number(value)} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(value * 1e9)} ns"


def amount(value: float, unit: str) -> str:
    """An amount with a prefix that suits it: 16.2 TFLOP."""
    for prefix, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{number(value / factor)} {prefix}{unit}"
    return f"{number(value)} {unit}"


def many(count: int, what: str) -> str:
    """A count with its noun: 1 sequence, 2 sequences."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def milliseconds(estimate: Estimate | None) -> str:
    """A time with its bar; a bar without an end where the queue has none."""
    if estimate is None:
        return "–"
    value, ends = timed(estimate)
    return f"{value} ({ends})"


def timed(estimate: Estimate) -> tuple[str, str]:
    """A time in ms, from ten seconds on in s, and its bar in the same unit."""
    if estimate.value >= 10:
        return f"{number(estimate.value)} s", bar(estimate)
    return f"{number(estimate.value * 1e3)} ms", bar(estimate.scaled(1e3))


def bar(estimate: Estimate) -> str:
    """The ends of an error bar: "1.2 to 1.5"."""
    if estimate.low == estimate.high:
        return f"exactly {number(estimate.value)}"
    if math.isinf(estimate.high):
        return f"{number(estimate.low)} or more"
    return f"{number(estimate.low)} to {number(estimate.high)}"


def share_of_memory(settings: Settings) -> str:
    """The share of a device's memory that an engine takes."""
    if settings.free_share is not None:
        return f"the weights' memory and {settings.free_share:.0%} of the rest"
    return f"{settings.utilization:.0%} of the memory"


def dollars(value: float | None) -> str:
    """An amount of money, to the cent, or below a dollar to three digits."""
    if value is None:
        return "–"
    if value >= 1 or value == 0:
        return f"${value:,.2f}"
    digits = f"{value:.{2 - math.floor(math.log10(value))}f}".rstrip("0")
    return f"${digits}"


def letter(place: int) -> str:
    """A, B, ... Z, and numbers after them: names of what stands side by side."""
    return chr(ord("A") + place) if place < 26 else str(place + 1)
