"""`headway bench pareto`: saved runs of several configurations, by tokens/s of a user against tokens/s of a device.

A run is on the front if no other one gives each user as many tokens a second and the device more, or each user more and
the device as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.bench.options import ParetoOptions
from headway.bench.report.views import load_of, steady_or_whole
from headway.bench.results import load_json
from headway.load.errors import BenchError
from headway.load.measures.summary import summarise_all
from headway.load.record import RunResult
from headway.report import style
from headway.report.parts import Cell, Page, Picture, Section, Table, cells
from headway.report.style import number, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEWEST = 2  # runs
DIGITS = 3  # of the number of a run of a sweep, behind the name of its file


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    configuration: str  # its label, or the name of its file without a number behind it
    load: float  # requests/s, or requests in flight
    user: float  # median tokens/s of a request after its first token
    device: float  # output tokens/s of a device
    ttft_ms: float | None  # median, from the schedule; None where there are too few samples
    is_front: bool = False  # no other run is better for both


def points_of(files: Sequence[Path], options: ParetoOptions) -> tuple[list[Point], list[str]]:
    """A point for each run, and for each run that is none, why not.

    Raises:
        BenchError: a file cannot be read, or fewer than two runs are left.
    """
    found, left_out = [], []
    for path in files:
        result = load_json(path)
        view = steady_or_whole(summarise_all(result, percentiles=(50.0,)))
        claim = view.from_schedule["ttft_ms"].percentile(50.0) if "ttft_ms" in view.from_schedule else None
        ttft = None if claim is None else claim.value
        if view.tps is None or result.interrupted:
            left_out.append(f"{path}: {'it was interrupted' if result.interrupted else 'no request has a TPOT'}")
        elif options.ttft_ms is not None and (ttft is None or ttft > options.ttft_ms):
            left_out.append(f"{path}: its median TTFT is above {options.ttft_ms:g} ms, or not known")
        else:
            user, device = _median(result), view.rates["output_throughput"] / options.devices
            found.append(Point(_configuration(result, path), load_of(result), user, device, ttft))
    if len(found) < FEWEST:
        said = f": {'; '.join(left_out)}" if left_out else ""
        raise BenchError(f"{len(found)} of {len(files)} runs can be shown, and a front takes {FEWEST}{said}")
    return marked(found), left_out


def _median(result: RunResult) -> float:
    """Median tokens/s of a request, also where there are too few for an interval."""
    import numpy as np

    from headway.load.measures.latencies import Latencies

    return 1000 / float(np.nanmedian(Latencies.of(result.records).tpot_ms))


def _configuration(result: RunResult, path: Path) -> str:
    label = result.settings.get("label")
    stem, _, number_ = path.stem.rpartition("-")
    is_of_sweep = bool(stem) and number_.isdecimal() and len(number_) <= DIGITS
    return str(label) if label else stem if is_of_sweep else path.stem


def marked(points: Sequence[Point]) -> list[Point]:
    """The same points, the one with most tokens/s of a user first, with those on the front marked as such."""
    ordered = sorted(points, key=lambda each: (-each.user, -each.device))
    most, found = float("-inf"), []
    for each in ordered:
        fields = (each.configuration, each.load, each.user, each.device, each.ttft_ms)
        found.append(Point(*fields, is_front=each.device > most))
        most = max(most, each.device)
    return found


def front_table(points: Sequence[Point]) -> Table:
    """A row for each run."""
    rows = []
    for each in points:
        ttft = "–" if each.ttft_ms is None else number(each.ttft_ms)
        figures = (number(each.load), number(each.user), number(each.device), ttft)
        rows.append(cells(plain(each.configuration), *figures, Cell("front", "good") if each.is_front else Cell("")))
    return Table(
        f"{len(points)} runs",
        ("configuration", "load", "tokens/s of a user", "of a device", "TTFT P50, ms", ""),
        tuple(rows),
        left=frozenset({5}),
        note="Tokens/s of a user: median over requests, after the first token. Front: no other run is better for user "
        "and device.",
    )


@style.drawing()
def front_figure(points: Sequence[Point]) -> Figure:
    """Tokens/s of a device against those of a user: a line for each configuration, and the front."""
    figure, (axes,) = style.new_figure(8.0, 4.2, x="Tokens/s of a user", y="Output tokens/s of a device")
    for place, name in enumerate(dict.fromkeys(each.configuration for each in points)):
        own = [each for each in points if each.configuration == name]
        hue, line = style.series_colour(place), style.series_line(place)
        axes.plot(
            [p.user for p in own], [p.device for p in own], marker="o", ms=4, color=hue, ls=line, label=plain(name)
        )
    front = [each for each in points if each.is_front]
    axes.plot(
        [p.user for p in front],
        [p.device for p in front],
        color=style.colour("red"),
        lw=1,
        ls=(0, (4, 3)),
        label="front",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    style.legend_outside(figure, [axes], 3)
    return figure


def front_page(points: Sequence[Point]) -> Page:
    """The picture and the table."""
    caption = "Up and to the right is better. Each point is a run; a line joins the runs of a configuration."
    drawn = Picture("pareto", "Tokens/s of a device against tokens/s of a user", caption, front_figure(points))
    count = len(dict.fromkeys(each.configuration for each in points))
    return Page(
        title="Pareto front",
        subtitle=f"{len(points)} runs of {count} configurations",
        sections=(Section("Runs", tables=(front_table(points),), pictures=(drawn,), anchor="runs"),),
    )
