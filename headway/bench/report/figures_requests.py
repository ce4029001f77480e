"""Figures of single requests: the timeline, the slowest, and what the tail is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.bench.report import samples
from headway.bench.report.phases import PARTS, Lengths, Part, Slice, lengths, worth_a_legend
from headway.load.record import RequestRecord
from headway.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 200
EXCERPT = 120
MOST_SLOWEST = 40
Bar = tuple[float, float, float, float]  # x from, x to, y from, y to


def timeline_rows(records: Sequence[RequestRecord]) -> tuple[list[RequestRecord], int]:
    """Requests in order of arrival, and the rank of the first of them.

    All of up to MOST_ROWS; of more, the EXCERPT around the slowest one, side by side: who stood in whose way can only
    be seen of neighbours.
    """
    ordered = samples.sent(records)
    if len(ordered) <= MOST_ROWS:
        return ordered, 0
    worst = max(range(len(ordered)), key=lambda rank: ordered[rank].end_ns - ordered[rank].scheduled_ns)
    first = min(max(worst - EXCERPT * 2 // 3, 0), len(ordered) - EXCERPT)
    return ordered[first : first + EXCERPT], first


def slowest(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The slowest answered requests, by E2EL from the schedule, the slowest first."""
    done = [record for record in samples.sent(records) if record.ok]
    return sorted(done, key=lambda each: each.end_ns - each.scheduled_ns, reverse=True)[:MOST_SLOWEST]


@style.drawing()
def timeline(records: Sequence[RequestRecord], began_ns: int) -> Figure:
    """Each request as a bar over the run's time, coloured by where its time went.

    A bar's parts are totals in the order of the chain; a dot marks when the first token really came.
    """
    rows, first_rank = timeline_rows(records)
    height = 2.4 + 0.02 * len(rows)
    figure, (axes,) = style.new_figure(8.0, height, x="Time in the run (s)", y="Request, in order of arrival")
    if not rows:
        style.nothing_to_show(axes, "no request was sent")
        return figure
    bars = [(lengths(record), (record.scheduled_ns - began_ns) / 1e9) for record in rows]
    _bars(axes, bars, first_rank)
    answered = [(rank, record) for rank, record in enumerate(rows, first_rank) if record.ok]
    if answered:
        axes.plot(
            [(record.first_token_ns - began_ns) / 1e9 for _, record in answered],
            [rank + 0.5 for rank, _ in answered],
            ".",
            ms=3,
            mew=0,
            color=style.colour("ink"),
            label="first token",
        )
    axes.set_ylim(first_rank + len(rows), first_rank)
    axes.grid(axis="y", visible=False)
    style.legend_outside(figure, [axes], 3)
    return figure


@style.drawing()
def slowest_requests(records: Sequence[RequestRecord]) -> Figure:
    """The slowest requests side by side, each from when it was due."""
    rows = slowest(records)
    height = 1.9 + 0.1 * max(len(rows), 8)
    figure, (axes,) = style.new_figure(8.0, height, x="Time since the request was due (s)", y="Request (its number)")
    if not rows:
        style.nothing_to_show(axes, "no request was answered")
        return figure
    _bars(axes, [(lengths(record), 0.0) for record in rows])
    every = 1 if len(rows) <= 20 else 2
    axes.set_yticks([row + 0.5 for row in range(0, len(rows), every)], [str(r.index) for r in rows[::every]])
    axes.tick_params(axis="y", labelsize=6.5)
    axes.plot(
        [(r.first_token_ns - r.scheduled_ns) / 1e9 for r in rows],
        [row + 0.5 for row in range(len(rows))],
        ".",
        ms=4,
        color=style.colour("ink"),
        label="first token",
    )
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    style.legend_outside(figure, [axes], 3)
    return figure


@style.drawing()
def composition(slices: Sequence[tuple[str, Slice]]) -> Figure:
    """Stacked bars of where time went: (label, slice) each, from top to bottom."""
    figure, (axes,) = style.new_figure(8.0, 1.5 + 0.42 * max(len(slices), 2), x="Mean time of a request (ms)")
    if not slices:
        style.nothing_to_show(axes, "too few requests to compare the median with the slowest")
        axes.set_ylabel("Requests")
        return figure
    shown = sorted({part for _, each in slices for part in each.parts_ms}, key=PARTS.index)
    longest = {part: max(each.parts_ms.get(part, 0.0) for _, each in slices) for part in shown}
    named = worth_a_legend(longest, max(sum(each.parts_ms.values()) for _, each in slices))
    parts = (
        (part.label if part in named else None, part.colour, [each.parts_ms.get(part, 0.0) for _, each in slices])
        for part in shown
    )
    ends = style.stacked_bars(axes, parts, 0.62)
    for row, end in enumerate(ends):
        style.beside(axes, end, row, f"{style.number(end)} ms")
    style.name_rows(axes, [label for label, _ in slices])
    axes.set_xlim(0, max(ends) * 1.12 or 1.0)
    style.legend_outside(figure, [axes], 3)
    return figure


def _bars(axes: Axes, rows: Sequence[tuple[Lengths, float]], first_rank: int = 0) -> None:
    """Draw the parts of each row one after the other from its start (s); one path for each part keeps files small."""
    bars: dict[Part, list[Bar]] = {}
    for row, (parts, at) in enumerate(rows, first_rank):
        for part, length in parts.items():
            bars.setdefault(part, []).append((at, at + length / 1e9, row + 0.06, row + 0.94))
            at += length / 1e9
    longest = {part: max(x1 - x0 for x0, x1, _, _ in of_part) for part, of_part in bars.items()}
    drawn = [bar for of_part in bars.values() for bar in of_part]
    extent = max((x1 for _, x1, _, _ in drawn), default=0.0) - min((x0 for x0, _, _, _ in drawn), default=0.0)
    named = worth_a_legend(longest, extent)
    for part in PARTS:
        if part in bars:
            draw_bars(axes, bars[part], part.colour, part.label if part in named else None)
    axes.autoscale_view()


def draw_bars(axes: Axes, bars: Sequence[Bar], colour: str, label: str | None = None, alpha: float = 1.0) -> None:
    """Rectangles of one colour as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = np.asarray([[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)] for x0, x1, y0, y1 in bars])
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(bars))
    path = Path(corners.reshape(-1, 2), codes)
    # Not by add_patch(), which looks for the limits of each line as of a curve: 70 us a bar.
    axes.add_artist(PathPatch(path, facecolor=style.colour(colour), lw=0, alpha=alpha, label=label))
    axes.update_datalim(path.vertices)
