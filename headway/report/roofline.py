"""The roofline plot: what a machine allows by arithmetic intensity, and what reaches how much of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headway.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Roofs = Mapping[str, Callable[[float], float]]  # FLOP/s at so many FLOPs per byte, by label
# Inches, of text of 7.5 points.
LETTER, LINE = 0.062, 0.135
NEAR = 0.2
GAP = 0.05
MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Spot:
    """A point with a name, and the area of its marker in square points."""

    name: str
    x: float
    y: float
    area: float = 0.0

    @property
    def radius(self) -> float:
        """The radius of the marker, in inches."""
        return math.sqrt(self.area) / 2 / 72


@dataclass(frozen=True, slots=True)
class Marks:
    """Points of one kind: FLOPs per byte across, FLOP/s in the unit of the plot up."""

    label: str
    marker: str  # a marker of matplotlib
    colour: str  # a name of the palette
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


@dataclass(frozen=True, slots=True)
class _Box:
    """Inches from the lower left corner of the axes."""

    left: float
    bottom: float
    right: float
    top: float

    def covers(self, other: _Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )


def name_spots(
    axes: Axes,
    groups: Sequence[Sequence[Spot]],
    colours: Sequence[str],
    avoid: Sequence[Spot],
    size: tuple[float, float],
) -> None:
    """Write the names of each group in its colour of the palette; points close together share a name.

    Args:
        axes: logarithmic both ways, with its final limits.
        groups: groups of spots, those that matter most first.
        avoid: places of a line that names should not cover.
        size: the size of the axes, about, in inches.
    """
    limits = axes.get_xlim(), axes.get_ylim()

    def place(spot: Spot) -> tuple[float, float]:
        """The place of a spot, in inches."""
        x, y = (
            length * math.log(value / low) / math.log(high / low)
            for value, (low, high), length in zip((spot.x, spot.y), limits, size, strict=True)
        )
        return x, y

    taken = [_box_around(place(spot), spot.radius) for group in groups for spot in group]
    taken += [_box_around(place(spot), 0.01) for spot in avoid]
    whole = _Box(0.0, 0.0, *size)
    for group, colour in zip(groups, colours, strict=True):
        for cluster in _clusters(group, place):
            text = _name(cluster)
            x, y = place(cluster[0])
            choices = list(_choices(x, y, len(text) * LETTER, cluster[0].radius))
            box = min(choices, key=lambda choice: _badness(choice, taken, whole))
            taken.append(box)
            axes.annotate(
                text,
                (cluster[0].x, cluster[0].y),
                ((box.left - x) * 72, (box.bottom - y) * 72 + 2),
                textcoords="offset points",
                fontsize=7.5,
                color=style.colour(colour),
            )


def _clusters(group: Sequence[Spot], place: Callable[[Spot], tuple[float, float]]) -> list[list[Spot]]:
    """Each spot with the first one that it is near to."""
    found: list[list[Spot]] = []
    for spot in group:
        near = [each for each in found if math.dist(place(each[0]), place(spot)) < NEAR]
        if near:
            near[0].append(spot)
        else:
            found.append([spot])
    return found


def _name(cluster: Sequence[Spot]) -> str:
    names = [spot.name for spot in cluster]
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _choices(x: float, y: float, width: float, radius: float) -> Iterator[_Box]:
    """Places for a text beside a marker, the best first: right, left, below, above, and further away."""
    for away in (1.0, 3.2, 5.8):
        gap = radius + GAP * away
        for bottom in (y - LINE / 2, y - gap - LINE, y + gap):
            yield _Box(x + gap, bottom, x + gap + width, bottom + LINE)
            yield _Box(x - gap - width, bottom, x - gap, bottom + LINE)
        for bottom in (y - gap - LINE, y + gap):
            yield _Box(x - width / 2, bottom, x + width / 2, bottom + LINE)


def _badness(box: _Box, taken: Sequence[_Box], whole: _Box) -> int:
    outside = box.left < whole.left or box.right > whole.right or box.bottom < whole.bottom or box.top > whole.top
    return sum(box.covers(other) for other in taken) + 10 * outside


def _box_around(place: tuple[float, float], half: float) -> _Box:
    return _Box(place[0] - half, place[1] - half, place[0] + half, place[1] + half)
