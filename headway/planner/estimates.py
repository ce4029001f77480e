"""Predictions with their error bars.

The bars of TTFT and TPOT come from measurements (`cost.catalogue.uncertainty`); the others follow from these two as if
both erred to the same side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.cost.catalogue import uncertainty
from headway.cost.hardware import Hardware
from headway.cost.serving import Workload
from headway.planner.loads import Outcome
from headway.planner.plan import Estimate


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of an outcome; None where the outcome has None."""

    ttft: Estimate | None = None
    tpot: Estimate | None = None
    ttlt: Estimate | None = None
    output_tokens_per_s: Estimate | None = None


def of_steady(outcome: Outcome, workload: Workload, hardware: Hardware) -> Estimates:
    """Of a batch or of clients, whose next request waits for the last: slower steps mean fewer tokens."""
    ttft = _around(outcome.ttft_s, hardware, "ttft")
    tpot = _around(outcome.tpot_s, hardware, "tpot")
    ttlt = _last(ttft, tpot, outcome.ttlt_s, workload)
    value = outcome.requests_per_s * workload.output
    bar = ttlt or tpot
    rate = Estimate(value, value * bar.value / bar.high, value * bar.value / bar.low) if bar else None
    return Estimates(ttft, tpot, ttlt, rate)


def of_arrivals(
    outcome: Outcome,
    workload: Workload,
    hardware: Hardware,
    asked: float,
    saturation: float,
    at: Callable[[float], Outcome],
) -> Estimates:
    """Of requests that come however slow the steps are.

    Steps that take f times as long are the same system at f times the rate with a clock that is f times as slow, so
    the queue at the ends of the bar is that of other rates.

    Args:
        asked: requests a second that come.
        saturation: as many as can be served at most.
        at: the outcome at f times the rate; above saturation its TTFT is None.
    """
    rate, output = outcome.requests_per_s, workload.output
    low, high = uncertainty(hardware, "tpot")
    tokens = Estimate(rate * output, min(asked, saturation / high) * output, min(asked, saturation / low) * output)
    around = _around(outcome.ttft_s, hardware, "ttft")
    if around is None:
        return Estimates(tpot=_around(outcome.tpot_s, hardware, "tpot"), output_tokens_per_s=tokens)
    slow, fast = at(high), at(low)
    ttft = Estimate(
        around.value, min(around.low, _scaled(fast.ttft_s, low)), max(around.high, _scaled(slow.ttft_s, high))
    )
    tpot = None
    if outcome.tpot_s is not None:
        bar = (_scaled(fast.tpot_s, low), _scaled(slow.tpot_s, high))
        plain = outcome.tpot_s * low, outcome.tpot_s * high
        tpot = Estimate(outcome.tpot_s, min(bar[0], plain[0]), max(bar[1], plain[1]))
    return Estimates(ttft, tpot, _last(ttft, tpot, outcome.ttlt_s, workload), tokens)


def _scaled(seconds: float | None, factor: float) -> float:
    return float("inf") if seconds is None else seconds * factor


def _around(value: float | None, hardware: Hardware, metric: str) -> Estimate | None:
    if value is None:
        return None
    low, high = uncertainty(hardware, metric)
    return Estimate(value, value * low, value * high)


def _last(ttft: Estimate | None, tpot: Estimate | None, value: float | None, workload: Workload) -> Estimate | None:
    """TTFT + (n - 1) TPOT (document 001, chapter 4), at each end of the bars."""
    if ttft is None or value is None:
        return None
    if tpot is None:
        return ttft
    later = workload.output - 1
    return Estimate(value, ttft.low + later * tpot.low, ttft.high + later * tpot.high)
