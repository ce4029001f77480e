"""Figures of latency's distribution, and of the client that measured it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.load.measures.latencies import Floats, Latencies
from headway.load.measures.numbers import Distribution, Summary
from headway.load.record import ClientHealth, RequestRecord
from headway.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PERCENTILES = (50.0, 90.0, 99.0)
MOST_POINTS = 600  # points of a distribution's curve: more than the picture can show
MOST_GROUPS = 8


@style.drawing()
def latency_cdf(records: Sequence[RequestRecord], whole: Summary | None = None) -> Figure:
    """Cumulative distributions of TTFT and E2EL (from the schedule and from the send), TPOT and ITL; of vectors and
    scores only of E2EL.

    P50, P90 and P99 are marked on the curves counted from the schedule, as far as `whole`, the summary of these
    records, claims them; without it none is.
    """
    latencies = Latencies.of(records)
    if latencies.records and all(record.is_vector for record in latencies.records):
        figure, (e2e,) = style.new_figure(8.0, 3.2)
        curves = {"from the schedule": latencies.e2el("schedule"), "from the send": latencies.e2el("send")}
        _cdfs(e2e, curves, "End to end (ms)", "requests")
        if whole is not None and "e2el_ms" in whole.from_schedule:
            _mark_percentiles(e2e, whole.from_schedule["e2el_ms"])
        return figure
    figure, (ttft, e2e, tpot, itl) = style.new_figure(8.0, 5.6, rows=2, columns=2)
    for axes, of, name in ((ttft, latencies.ttft, "Time to first token"), (e2e, latencies.e2el, "End to end")):
        curves = {"from the schedule": of("schedule"), "from the send": of("send")}
        _cdfs(axes, curves, f"{name} (ms)", "requests")
    _cdfs(tpot, {"per request": latencies.tpot_ms}, "Time per output token (ms)", "requests")
    _cdfs(itl, {"all gaps": latencies.itl_ms}, "Time between tokens (ms)", "gaps")
    for axes, metric in ((ttft, "ttft_ms"), (e2e, "e2el_ms"), (tpot, "tpot_ms"), (itl, "itl_ms")):
        if whole is not None and metric in whole.from_schedule:
            _mark_percentiles(axes, whole.from_schedule[metric])
    return figure


@style.drawing()
def groups_cdf(groups: Mapping[str, Sequence[RequestRecord]]) -> Figure:
    """TTFT, TPOT and E2EL from the schedule, and steps; a curve for each group (the first eight), as of a class."""
    figure, panels = style.new_figure(8.0, 5.8, rows=2, columns=2, sharey=True)
    of_group = {style.plain(name, 24): Latencies.of(groups[name]) for name in list(groups)[:MOST_GROUPS]}
    views: tuple[tuple[str, Callable[[Latencies], Floats]], ...] = (
        ("Time to first token (ms)", lambda latencies: latencies.ttft("schedule")),
        ("Time per output token (ms)", lambda latencies: latencies.tpot_ms),
        ("End to end (ms)", lambda latencies: latencies.e2el("schedule")),
        ("Length of an answer (steps)", lambda latencies: latencies.steps.astype(float)),
    )
    for axes, (label, of) in zip(panels, views, strict=True):
        curves = {name: of(latencies) for name, latencies in of_group.items()}
        _cdfs(axes, curves, label, "requests", named=axes is panels[0])
    for axes in panels[1::2]:
        axes.set_ylabel("")
    return figure


def _cdfs(axes: Axes, curves: dict[str, Floats], label: str, things: str, named: bool = True) -> None:
    axes.set_xlabel(label)
    axes.set_ylabel(f"Share of {things} (%)")
    present = {name: np.sort(values[np.isfinite(values)]) for name, values in curves.items()}
    present = {name: values for name, values in present.items() if len(values)}
    if not present:
        style.nothing_to_show(axes, "no request has this latency")
        return
    for place, (name, values) in enumerate(present.items()):
        shown = thinned(values)
        axes.step(*shown, where="post", color=style.series_colour(place), ls=style.series_line(place), label=name)
    axes.set_ylim(0, 101)
    axes.set_yticks([0, 25, 50, 75, 90, 100])
    _scale_x(axes, list(present.values()))
    if named:
        style.legend(axes, loc="lower right")


def _scale_x(axes: Axes, curves: list[Floats]) -> None:
    """Logarithmic where 98 % of the values span a wide range; the few that are next to nothing do not stretch it."""
    low = min(float(np.quantile(values, 0.02)) for values in curves)
    high = max(float(values[-1]) for values in curves)
    if low > 0 and style.wants_log([low, high]):
        axes.set_xlim(low / 1.5, high * 1.2)
        style.log_axis(axes, "x")
    else:
        axes.set_xlim(left=min(0.0, low))


def thinned(values: Floats) -> tuple[Floats, Floats]:
    """Points of the curve: all, or quantiles that are denser towards the tail, where it matters."""
    shares = np.arange(1, len(values) + 1) / len(values)
    if len(values) > MOST_POINTS:
        tail = 1 - np.geomspace(0.2, 1 / len(values), MOST_POINTS // 3)
        wanted = np.unique(np.concatenate([np.linspace(0, 0.8, MOST_POINTS * 2 // 3), tail, [1.0]]))
        places = np.unique(np.clip(np.ceil(wanted * len(values)).astype(int) - 1, 0, len(values) - 1))
        values, shares = values[places], shares[places]
    return np.concatenate([values[:1], values]), np.concatenate([[0.0], shares * 100])


def _mark_percentiles(axes: Axes, found: Distribution) -> None:
    claims = [(p, claim.value) for p in PERCENTILES if (claim := found.percentile(p)) is not None]
    for p, value in claims:
        if value is None:
            continue
        axes.plot([value], [p], "o", ms=4, color=style.colour("ink"), zorder=5)
        # A curve that only rises leaves the places above and left, and below and right, of its points free.
        left = axes.transData.transform((value, p))[0] > axes.bbox.x0 + 0.66 * axes.bbox.width
        axes.annotate(
            f"P{p:g}  {style.number(value)}",
            (value, p),
            xytext=(-5, 3) if left else (6, -3),
            textcoords="offset points",
            ha="right" if left else "left",
            va="bottom" if left else "top",
            fontsize=7.5,
            color=style.colour("ink"),
        )


@style.drawing()
def client_lag(client: ClientHealth) -> Figure:
    """How late the client itself was: sends against the schedule, and its event loop against its timer."""
    figure, (start, loop) = style.new_figure(8.0, 2.9, columns=2)
    _cdfs(start, {"": np.asarray(client.start_lag_ms, dtype=float)}, "Send after its schedule (ms)", "requests")
    loop.set_xlabel("Time in the run (s)")
    loop.set_ylabel("Event loop late (ms)")
    lag = np.asarray(client.loop_lag_ms, dtype=float)
    if not len(lag):
        style.nothing_to_show(loop, "no samples of the event loop")
        return figure
    places, worst = worst_of_bins(lag, 400)
    loop.fill_between(
        places * client.sample_interval_s, 0, worst, step="post", color=style.colour("purple"), alpha=0.75, lw=0
    )
    loop.set_ylim(bottom=0)
    loop.set_xlim(left=0)
    return figure


def worst_of_bins(values: Floats, most: int) -> tuple[Floats, Floats]:
    """Reduce values to `most` points that keep every peak: the index where each bin begins, and its greatest value."""
    if len(values) <= most:
        return np.arange(len(values), dtype=float), values
    begins = np.linspace(0, len(values), most, endpoint=False).astype(int)
    return begins.astype(float), np.maximum.reduceat(values, begins)
