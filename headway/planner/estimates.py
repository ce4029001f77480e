"""Predictions with their error bars.

The bars of TTFT and TPOT come from measurements: those of others (`cost.catalogue.uncertainty`), or the residuals of a
calibration. The other bars follow from these two as if both erred to the same side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from headway.calibration.samples import Kind
from headway.calibration.store import CalibratedMachine
from headway.cost.catalogue import uncertainty
from headway.cost.hardware import Hardware
from headway.cost.requests import RequestShape
from headway.cost.timing import LINEAR, TimeBreakdown
from headway.planner.loads import Outcome
from headway.planner.plan import Bars, Estimate

UNKNOWN = (math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Estimates:
    """The figures of an outcome with their error bars; None where the outcome has None."""

    ttft: Estimate | None = None
    tpot: Estimate | None = None
    ttlt: Estimate | None = None
    output_tokens_per_s: Estimate | None = None


def published_bars(hardware: Hardware) -> Bars:
    """Bars that come from the measurements of others."""
    return Bars(*(uncertainty(hardware, name) for name in ("ttft", "tpot", "ttft_arrivals", "ttft_clients")))


def calibrated_bars(machine: CalibratedMachine, prefill: TimeBreakdown, decode: TimeBreakdown, intake_s: float) -> Bars:
    """Bars that come from the residuals of a calibration.

    Each part of a step adds its residual in proportion to its time, as if all parts erred to the same side.

    Args:
        intake_s: seconds of a request before its first step. Nobody measured them here, so they have the bar of
            published figures.
    """
    published = published_bars(machine.hardware)
    ttft = _weighed([*_pieces(machine, prefill, Kind.PROMPT), (intake_s, published.ttft)])
    tpot = _weighed(_pieces(machine, decode, Kind.DECODE))
    arrivals, clients = (
        (min(low, ttft[0]), max(high, ttft[1])) for low, high in (published.ttft_arrivals, published.ttft_clients)
    )
    return Bars(ttft, tpot, arrivals, clients)


def _pieces(
    machine: CalibratedMachine, step: TimeBreakdown, attention: Kind
) -> list[tuple[float, tuple[float, float]]]:
    """Seconds of each part of a step, with the residuals of its kind; what the host does is that of a tiny model."""
    found = [(step.host_s + sum(part.overhead_s for part in step.parts), machine.residuals[Kind.STEP])]
    for part in step.parts:
        kind = attention if part.name == "attention" else Kind.LINEAR if part.name in LINEAR else Kind.ELEMENTS
        found.append((part.seconds - part.overhead_s, machine.residuals[kind]))
    return found


def _weighed(pieces: list[tuple[float, tuple[float, float]]]) -> tuple[float, float]:
    whole = sum(seconds for seconds, _ in pieces)
    return sum(s * low for s, (low, _) in pieces) / whole, sum(s * high for s, (_, high) in pieces) / whole


def of_steady(outcome: Outcome, workload: RequestShape, bars: Bars, of_ttft: tuple[float, float]) -> Estimates:
    """Estimates for a batch, or for clients that wait for an answer before they ask again.

    Slower steps mean fewer tokens a second here.

    Args:
        of_ttft: the bar of TTFT under this load.
    """
    ttft = _with_bar(outcome.ttft_s, of_ttft)
    tpot = _with_bar(outcome.tpot_s, bars.tpot)
    ttlt = _ttlt(ttft, tpot, outcome.ttlt_s, workload)
    value = outcome.requests_per_s * workload.output
    bar = ttlt or tpot
    rate = Estimate(value, value * bar.value / bar.high, value * bar.value / bar.low) if bar else None
    return Estimates(ttft, tpot, ttlt, rate)


def of_arrivals(
    outcome: Outcome,
    workload: RequestShape,
    bars: Bars,
    asked: float,
    saturation: float,
    at: Callable[[float], Outcome] | None,
) -> Estimates:
    """Estimates for requests that arrive at a rate, however slow the steps are.

    Steps that take f times as long are the same system at f times the rate with a clock that is f times as slow. So the
    queue at an end of the bar is found by running the load at another rate.

    Args:
        asked: requests a second that arrive.
        saturation: requests a second that can be served at most.
        at: the outcome at f times the rate; above saturation its TTFT is None. Without it the bars of times are NaN.
    """
    rate, output = outcome.requests_per_s, workload.output
    low, high = bars.tpot
    tokens = Estimate(rate * output, min(asked, saturation / high) * output, min(asked, saturation / low) * output)
    around = _with_bar(outcome.ttft_s, bars.ttft_arrivals)
    if around is None:
        return Estimates(tpot=_with_bar(outcome.tpot_s, bars.tpot), output_tokens_per_s=tokens)
    if at is None:
        around, tpot = _with_bar(outcome.ttft_s, UNKNOWN), _with_bar(outcome.tpot_s, UNKNOWN)
        return Estimates(around, tpot, _ttlt(around, tpot, outcome.ttlt_s, workload), tokens)
    slow, fast = at(high), at(low)
    ttft = Estimate(
        around.value, min(around.low, _scaled(fast.ttft_s, low)), max(around.high, _scaled(slow.ttft_s, high))
    )
    tpot = None
    if outcome.tpot_s is not None:
        bar = (_scaled(fast.tpot_s, low), _scaled(slow.tpot_s, high))
        plain = outcome.tpot_s * low, outcome.tpot_s * high
        tpot = Estimate(outcome.tpot_s, min(bar[0], plain[0]), max(bar[1], plain[1]))
    return Estimates(ttft, tpot, _ttlt(ttft, tpot, outcome.ttlt_s, workload), tokens)


def _scaled(seconds: float | None, factor: float) -> float:
    return float("inf") if seconds is None else seconds * factor


def _with_bar(value: float | None, bar: tuple[float, float]) -> Estimate | None:
    return None if value is None else Estimate(value, value * bar[0], value * bar[1])


def _ttlt(ttft: Estimate | None, tpot: Estimate | None, value: float | None, workload: RequestShape) -> Estimate | None:
    """The time to the last token: TTFT + (n - 1) TPOT (document 001, chapter 4), at each end of the bars."""
    if ttft is None or value is None:
        return None
    if tpot is None:
        return ttft
    later = workload.output - 1
    return Estimate(value, ttft.low + later * tpot.low, ttft.high + later * tpot.high)
