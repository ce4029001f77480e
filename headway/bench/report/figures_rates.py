"""Figures of several runs of one workload: latency, throughput and goodput against the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.bench.report.views import Run, load_of, steady_or_whole
from headway.load.measures.numbers import Distribution, Percentile, Summary
from headway.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRICS = (("ttft_ms", "Time to first token (ms)"), ("tpot_ms", "TPOT (ms)"), ("e2el_ms", "End to end (ms)"))
SHOWN = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One run of a sweep or search."""

    load: float  # what was varied: requests/s, or requests in flight of a closed loop
    summary: Summary  # the view that is shown: the steady state where there is one, else the whole run
    client_bound: bool = False  # its numbers are the client's, not the server's


def load_points(runs: Sequence[Run]) -> list[LoadPoint]:
    """A point for each run, by rising load."""
    loads = sorted(((load_of(run[0]), *run) for run in runs), key=lambda each: each[0])
    return [LoadPoint(load, steady_or_whole(views), result.client.bound) for load, result, views in loads]


@style.drawing()
def latency_against_load(points: Sequence[LoadPoint], load: str = "Request rate (1/s)") -> Figure:
    """P50, P90 and P99 of TTFT, TPOT and E2EL against the load, with their intervals and the objectives; without the
    latencies that no run has, as of vectors.
    """
    metrics = [each for each in METRICS if any(each[0] in point.summary.from_schedule for point in points)] or METRICS
    names = [name for _, name in metrics]
    figure, panels = style.new_figure(8.0, 3.3, columns=len(metrics), x=load, y=names)
    for axes, (metric, _) in zip(panels, metrics, strict=True):
        highest = _percentile_lines(axes, points, metric)
        if not highest:
            style.nothing_to_show(axes, "no percentile has enough samples")
            continue
        objective = _objective(points, metric)
        if objective is not None:
            axes.axhline(objective, color=style.colour("red"), lw=1, ls=(0, (4, 3)), label="objective")
        if style.wants_log(highest):
            style.log_axis(axes, "y")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlim(0, 1.06 * max(point.load for point in points))
    style.legend_outside(figure, panels, len(SHOWN) + 1, above=True)
    return figure


def _percentile_lines(axes: Axes, points: Sequence[LoadPoint], metric: str) -> list[float]:
    """Draw what can be claimed; returns the values drawn."""
    drawn = []
    for place, p in enumerate(SHOWN):
        known = [(point.load, claim) for point in points if (claim := _claim(point.summary, metric, p)) is not None]
        if not known:
            continue
        loads = [load for load, _ in known]
        values = [claim.value or 0.0 for _, claim in known]
        low = [value if claim.low is None else claim.low for value, (_, claim) in zip(values, known, strict=True)]
        high = [value if claim.high is None else claim.high for value, (_, claim) in zip(values, known, strict=True)]
        hue = style.series_colour(place)
        style.band(axes, loads, low, high, hue)
        axes.plot(loads, values, marker="os^"[place], ms=4, color=hue, ls=style.series_line(place), label=f"P{p:g}")
        drawn += values
    return drawn


@style.drawing()
def throughput_against_latency(points: Sequence[LoadPoint]) -> Figure:
    """The trade: output tokens per second against P90 TTFT, and against the speed that one user sees.

    Runs that no other beats in both are joined by a line (the Pareto front).
    """
    figure, (ttft, user) = style.new_figure(
        8.0,
        3.5,
        columns=2,
        x=("P90 time to first token (ms); left is better", "Tokens/s of the median request; right is better"),
        y="Output tokens/s of the server",
    )
    _trade(ttft, points, lambda summary: _value(summary, "ttft_ms", 90.0), smaller_is_better=True)
    _trade(user, points, _per_user, smaller_is_better=False)
    return figure


def _trade(
    axes: Axes, points: Sequence[LoadPoint], of: Callable[[Summary], float | None], smaller_is_better: bool
) -> None:
    known = [
        (x, point.summary.rates.get("output_throughput", 0.0), point) for point in points if (x := of(point.summary))
    ]
    if not known:
        style.nothing_to_show(axes, "no run has this latency")
        return
    sign = -1 if smaller_is_better else 1
    front: list[tuple[float, float]] = []
    for x, y, _ in sorted(known, key=lambda each: (sign * each[0], each[1]), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    if len(front) > 1:
        axes.plot(*zip(*front, strict=True), "-", color=style.colour("blue"), lw=1.2, alpha=0.6, label="Pareto front")
    for bound, mark, label in ((False, "o", "run (its load beside it)"), (True, "X", "client-bound run")):
        chosen = [(x, y) for x, y, point in known if point.client_bound is bound]
        if chosen:
            axes.plot(
                *zip(*chosen, strict=True), mark, ms=5, color=style.colour("red" if bound else "blue"), label=label
            )
    beside = (5, -9) if smaller_is_better else (5, 4)  # off the front, which rises or falls
    for x, y, point in known:
        axes.annotate(
            style.number(point.load), (x, y), xytext=beside, textcoords="offset points", fontsize=7.5,
            color=style.colour("muted"),
        )  # fmt: skip
    if style.wants_log([x for x, _, _ in known], 12):
        style.log_axis(axes, "x")
    else:
        axes.set_xlim(0, max(x for x, _, _ in known) * 1.15)
    axes.set_ylim(0, max(y for _, y, _ in known) * 1.12 or 1.0)
    style.legend(axes, loc="upper left", ncols=2, bbox_to_anchor=(0, 1.13), borderaxespad=0)


@style.drawing()
def goodput_against_load(points: Sequence[LoadPoint], load: str = "Request rate (1/s)", target: float = 0.99) -> Figure:
    """Throughput and goodput against the load, and the share of requests that met their objectives."""
    names = ("Requests (1/s)", "Requests that met their objectives (%)")
    figure, (rates, share) = style.new_figure(8.0, 3.3, columns=2, x=load, y=names)
    if not points:
        for axes in (rates, share):
            style.nothing_to_show(axes, "no runs")
        return figure
    loads = [point.load for point in points]
    answered = [point.summary.rates.get("request_throughput", 0.0) for point in points]
    if load.startswith("Request rate"):
        rates.plot([0, max(loads)], [0, max(loads)], color=style.colour("gray"), lw=1, ls=(0, (4, 3)), label="asked")
    rates.plot(loads, answered, "o-", ms=4, color=style.series_colour(0), label="answered")
    judged = [(point.load, point.summary.attainment) for point in points if point.summary.attainment is not None]
    if judged:
        good = [(at, found.requests_per_s) for at, found in judged]
        rates.plot(
            *zip(*good, strict=True), "s", ms=4, color=style.colour("green"), ls=style.series_line(1),
            label="goodput: objectives met",
        )  # fmt: skip
        _attainment(share, [(at, found.share, found.low, found.high) for at, found in judged], target)
    else:
        style.nothing_to_show(share, "no objectives were given (--goodput)")
    rates.set_xlim(left=0)
    rates.set_ylim(bottom=0)
    style.legend(rates, loc="upper left")
    return figure


def _attainment(axes: Axes, judged: Sequence[tuple[float, float, float, float]], target: float) -> None:
    loads = [each[0] for each in judged]
    shares, low, high = ([100 * each[place] for each in judged] for place in (1, 2, 3))
    axes.fill_between(loads, low, high, color=style.colour("green"), alpha=0.15, lw=0, label="95 % interval")
    axes.plot(loads, shares, "o-", ms=4, color=style.colour("green"), label="share")
    axes.axhline(100 * target, color=style.colour("red"), lw=1, ls=(0, (4, 3)), label=f"target {100 * target:g} %")
    bottom = min([*low, 100 * target])
    axes.set_ylim(max(0.0, bottom - 5), 101)
    axes.set_xlim(left=0)
    style.legend(axes, loc="lower left")


def _claim(summary: Summary, metric: str, p: float) -> Percentile | None:
    distribution: Distribution | None = summary.from_schedule.get(metric)
    claim = distribution.percentile(p) if distribution else None
    return claim if claim and claim.value is not None else None


def _value(summary: Summary, metric: str, p: float) -> float | None:
    claim = _claim(summary, metric, p)
    return claim.value if claim else None


def _per_user(summary: Summary) -> float | None:
    tpot = _value(summary, "tpot_ms", 50.0)
    return 1000 / tpot if tpot else None


def _objective(points: Sequence[LoadPoint], metric: str) -> float | None:
    """The one objective for this metric that all runs have; None where there is none, or several."""
    key = metric.removesuffix("_ms")
    limits = {point.summary.attainment.objectives.get(key) for point in points if point.summary.attainment}
    return limits.pop() if len(limits) == 1 else None
