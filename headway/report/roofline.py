"""The roofline plot: what a machine allows by arithmetic intensity, and what reaches how much of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.report import style
from headway.report.spots import Spot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Roofs = Mapping[str, Callable[[float], float]]  # FLOP/s at so many FLOPs per byte, by label


@dataclass(frozen=True, slots=True)
class Marks:
    """Points of one kind: FLOPs per byte across, FLOP/s in the unit of the plot up.

    Args:
        marker: a marker of matplotlib.
        colour: a name of the palette.
    """

    label: str
    marker: str
    colour: str
    spots: Sequence[Spot]


def draw_roofline(
    axes: Axes,
    roofs: Roofs,
    marks: Sequence[Marks],
    unit: float,
    across: tuple[float, float],
    up: tuple[float, float] | None = None,
) -> None:
    """Draw roofs and points on logarithmic axes.

    Args:
        unit: FLOP/s that count as 1.
        across: FLOPs per byte at the left and right end.
        up: FLOP/s in that unit at the bottom and top; None for what is drawn.
    """
    grid = np.geomspace(*across, 200).tolist()
    for number, (label, attainable) in enumerate(roofs.items()):
        line = {"color": style.colour("ink"), "ls": style.series_line(number), "lw": 1.2}
        axes.plot(grid, [attainable(x) / unit for x in grid], label=label, **line)
    for kind in marks:
        axes.scatter(
            [spot.x for spot in kind.spots],
            [spot.y for spot in kind.spots],
            s=[spot.area for spot in kind.spots],
            marker=kind.marker,
            label=kind.label,
            zorder=3,
            color=style.colour(kind.colour),
            edgecolors=style.colour("paper"),
            linewidths=0.8,
        )
    axes.set_xlim(*across)
    if up is not None:
        axes.set_ylim(*up)
    style.log_axis(axes, "x")
    style.log_axis(axes, "y")
