"""Figures of a run over its time: latencies, requests in flight, tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.bench.report import samples
from headway.bench.report.figures_requests import draw_bars
from headway.load.measures.latencies import Floats, Latencies
from headway.load.measures.numbers import Window
from headway.load.measures.throughput import prompt_tokens, token_arrivals
from headway.load.record import RequestRecord
from headway.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 60  # bins that the time of a run is cut into
MOST_DOTS = 1200  # above, dots become shaded cells
CELLS = (90, 40)
SHADES = (0.12, 0.25, 0.45, 0.7)
ENOUGH_FOR_P99 = 100
ENOUGH_FOR_P90 = 10


@style.drawing()
def itl_over_time(records: Sequence[RequestRecord], began_ns: int, steady: Window | None = None) -> Figure:
    """Every gap between tokens over time, with the median and P99 of each bin; the steady state is shaded."""
    figure, (axes,) = style.new_figure(8.0, 3.2, x="Time in the run (s)", y="Time between tokens (ms)")
    times, lengths = samples.gaps(records, began_ns)
    _cloud(axes, times, lengths, "no request has two chunks of tokens")
    _rolling_lines(axes, times, lengths)
    _shade(axes, steady, began_ns)
    style.legend(axes, loc="upper left", ncols=4, bbox_to_anchor=(0, 1.14), borderaxespad=0)
    return figure


def first_latency(latencies: Latencies) -> tuple[Floats, str]:
    """The time from the schedule to the first token, or to the end if answers have no tokens; and its name."""
    ttft = latencies.ttft("schedule")
    if np.isnan(ttft).any():
        return latencies.e2el("schedule"), "End to end (ms)"
    return ttft, "Time to first token (ms)"


@style.drawing()
def latency_over_time(records: Sequence[RequestRecord], began_ns: int, steady: Window | None = None) -> Figure:
    """Each request's TTFT from the schedule over when it was due; failed requests below, as crosses.

    Of vectors and scores it is the end-to-end latency.
    """
    latencies = Latencies.of(records)
    values, name = first_latency(latencies)
    figure, (axes,) = style.new_figure(8.0, 3.2, x="Time at which the request was due (s)", y=name)
    due = np.asarray([(record.scheduled_ns - began_ns) / 1e9 for record in latencies.records])
    _cloud(axes, due, values, "no request was answered")
    _rolling_lines(axes, due, values)
    failed = [(each.scheduled_ns - began_ns) / 1e9 for each in records if each.failed and each.scheduled_ns]
    if failed:
        axes.plot(
            failed,
            np.full(len(failed), 0.02),
            "x",
            ms=5,
            color=style.colour("ink"),
            transform=axes.get_xaxis_transform(),
            label="failed",
        )
    _shade(axes, steady, began_ns)
    style.legend(axes, loc="upper left", ncols=5, bbox_to_anchor=(0, 1.14), borderaxespad=0)
    return figure


@style.drawing()
def load_over_time(
    records: Sequence[RequestRecord], began_ns: int, ended_ns: int, steady: Window | None = None
) -> Figure:
    """Three panels over one time axis: requests due and answered per second, in flight, output tokens per second; input
    tokens where all answers are vectors or scores.
    """
    x, y = ("", "", "Time in the run (s)"), ("Requests (1/s)", "Requests in flight", "Output tokens (1/s)")
    figure, (rate, flight, tokens) = style.new_figure(8.0, 5.4, rows=3, x=x, y=y, sharex=True)
    known = samples.sent(records)
    if not known:
        for axes in (rate, flight, tokens):
            style.nothing_to_show(axes, "no request was sent")
        return figure
    edges = _edges(max((ended_ns - began_ns) / 1e9, 1e-3))
    due = np.asarray([(record.scheduled_ns - began_ns) / 1e9 for record in known])
    starts = np.asarray([(record.sent_ns - began_ns) / 1e9 for record in known])
    ends = np.asarray([(record.end_ns - began_ns) / 1e9 for record in known])
    answered = ends[np.asarray([record.ok for record in known])]
    rate.stairs(samples.per_second(due, None, edges), edges, color=style.series_colour(0), lw=1.4, label="due")
    done = samples.per_second(answered, None, edges)
    rate.stairs(done, edges, color=style.series_colour(1), lw=1.4, ls=style.series_line(1), label="answered")
    flight.step(*_thin_steps(*samples.open_over_time(starts, ends)), where="post", color=style.series_colour(0), lw=1.3)
    times, weights = token_arrivals(records)
    completed = [record for record in records if record.ok]
    if completed and all(record.is_vector for record in completed):
        tokens.set_ylabel("Input tokens (1/s)")
        weights = np.array([prompt_tokens(record) for record in completed], float)
        times = np.array([record.end_ns for record in completed])
    produced = samples.per_second((times - began_ns) / 1e9, weights, edges)
    tokens.stairs(produced, edges, fill=True, color=style.colour("sky"), alpha=0.6, lw=0)
    for axes in (rate, flight, tokens):
        axes.set_ylim(bottom=0)
        _shade(axes, steady, began_ns)
    tokens.set_xlim(0, edges[-1])
    style.legend(rate, loc="upper left", ncols=3, bbox_to_anchor=(0, 1.22), borderaxespad=0)
    return figure


@style.drawing()
def server_over_time(gauges: Mapping[str, Sequence[float | None]]) -> Figure:
    """Two panels over one time axis: requests that run and wait; how much of the KV cache and of the time is used.

    Args:
        gauges: the `gauges_over_time` of `server_metrics`.
    """
    x, y = ("", "Time in the run (s)"), ("Requests in flight", "Share (%)")
    figure, panels = style.new_figure(8.0, 3.8, rows=2, x=x, y=y, sharex=True)
    times = np.asarray(gauges["t_s"], dtype=float)
    for axes, scale, shown in (
        (panels[0], 1.0, {"running": "running", "waiting": "waiting"}),
        (panels[1], 100.0, {"kv_cache_usage": "KV cache", "utilisation": "busy with steps"}),
    ):
        for number, (gauge, name) in enumerate((gauge, name) for gauge, name in shown.items() if gauge in gauges):
            values = scale * np.asarray(gauges[gauge], dtype=float)  # one that was not read is NaN, and a gap
            colour, line = style.series_colour(number), style.series_line(number)
            axes.plot(*_thin_steps(times, values), drawstyle="steps-post", color=colour, ls=line, lw=1.3, label=name)
        axes.set_ylim(bottom=0)
        style.legend(axes, loc="upper left", ncols=2, bbox_to_anchor=(0, 1.25), borderaxespad=0)
    panels[1].set_xlim(left=0)
    return figure


def _edges(seconds: float, bins: int = BINS) -> Floats:
    """Bins of a round width, about so many of them."""
    raw = seconds / bins
    scale = 10.0 ** np.floor(np.log10(raw))
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= raw)
    return np.arange(0, int(np.ceil(seconds / width)) + 1) * width


def _cloud(axes: Axes, times: Floats, values: Floats, why_empty: str) -> None:
    """Dots, or, where there are many, cells shaded by how many there are."""
    if not len(values):
        style.nothing_to_show(axes, why_empty)
        return
    logarithmic = bool(np.quantile(values, 0.01) > 0) and style.wants_log([np.quantile(values, 0.01), values.max()], 12)
    if len(values) <= MOST_DOTS:
        axes.plot(times, values, ".", ms=4.5, color=style.colour("blue"), alpha=0.5, mew=0, label="each")
    else:
        _cells(axes, times, values, logarithmic)
    if logarithmic:
        axes.set_ylim(float(np.quantile(values, 0.01)) / 1.6, float(values.max()) * 1.3)
        style.log_axis(axes, "y")
    else:
        axes.set_ylim(0, float(values.max()) * 1.08 or 1.0)
    axes.set_xlim(min(0.0, float(times.min())), max(float(times.max()) * 1.01, 1e-3))


def _cells(axes: Axes, times: Floats, values: Floats, logarithmic: bool) -> None:
    low, high = float(np.quantile(values, 0.01)), float(values.max())
    x_edges = np.linspace(float(times.min()), float(times.max()), CELLS[0] + 1)
    y_edges = np.geomspace(low / 1.3, high * 1.001, CELLS[1] + 1) if logarithmic else np.linspace(0, high, CELLS[1] + 1)
    counts, _, _ = np.histogram2d(times, values, bins=(x_edges, y_edges))
    # Single slow gaps are what one looks for, so even a cell with one of them is to be seen.
    levels = [0.5, *np.unique(np.geomspace(1.5, max(float(counts.max()), 2.0), len(SHADES)))[:-1], np.inf]
    for shade, least, most in zip(SHADES, levels[:-1], levels[1:], strict=False):
        columns, rows = np.nonzero((counts >= least) & (counts < most))
        bars = [(x_edges[c], x_edges[c + 1], y_edges[r], y_edges[r + 1]) for c, r in zip(columns, rows, strict=True)]
        if bars:
            draw_bars(axes, bars, "blue", "each (darker: more)" if shade == SHADES[-2] else None, shade)


def _rolling_lines(axes: Axes, times: Floats, values: Floats) -> None:
    """The median of each bin of time, and as high a percentile as its few values bear: P99 of 100, P90 of 10."""
    if len(values) < 2 * ENOUGH_FOR_P90:
        return
    # Twice as many values to a bin as a P90 takes, so that hardly any bin has too few and the line has no gaps.
    edges = _edges(max(float(times.max()), 1e-3), min(BINS, len(values) // (2 * ENOUGH_FOR_P90)))
    counts, _ = np.histogram(times, bins=edges)
    tail, least = (0.99, ENOUGH_FOR_P99) if np.median(counts) >= ENOUGH_FOR_P99 else (0.9, ENOUGH_FOR_P90)
    middles = (edges[:-1] + edges[1:]) / 2
    lines = samples.rolling(times, values, edges, (0.5, tail), least)
    for share, line, shade in zip((0.5, tail), lines, ("ink", "orange"), strict=True):
        if not np.isnan(line).all():
            label = f"P{100 * share:g} of each {style.number(float(edges[1]))} s"
            axes.plot(middles, line, ".-", ms=3, lw=1.3, color=style.colour(shade), label=label)


def _shade(axes: Axes, steady: Window | None, began_ns: int) -> None:
    if steady is None or not steady.found:
        return
    low, high = (steady.began_ns - began_ns) / 1e9, (steady.ended_ns - began_ns) / 1e9
    axes.axvspan(low, high, color=style.colour("green"), alpha=0.1, lw=0, label="steady state", zorder=0)
    for edge in (low, high):
        axes.axvline(edge, color=style.colour("green"), lw=0.8, ls=(0, (4, 3)), zorder=0.5)


def _thin_steps(times: Floats, counts: Floats, most: int = 1500) -> tuple[Floats, Floats]:
    """Reduce a curve to about `most` steps. The highest of those that are merged is kept."""
    if len(times) <= most:
        return times, counts
    begins = np.linspace(0, len(times), most, endpoint=False).astype(int)
    return times[begins], np.maximum.reduceat(counts, begins)
