"""The picture of benchmarks.classes: what each contestant has of goodput, class by class."""

from __future__ import annotations

import statistics
from pathlib import Path

from headway.files import write_files
from headway.report import style

PREFIX = "goodput "


def draw(values: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    """Bars of the medians over the rounds, a panel for each load; whiskers are the range of the total.

    Args:
        values: of Rounds: by load, contestant and measure.
    """
    most = max(len(measured) for measured in values.values())
    with style.drawing():
        figure, panels = style.new_figure(8.0, 0.5 + (0.9 + 0.25 * most) * len(values), rows=len(values))
        for axes, (load, measured) in zip(panels, values.items(), strict=True):
            names = list(measured)
            left = [0.0] * len(names)
            for place, key in enumerate(key for key in measured[names[0]] if key.startswith(PREFIX)):
                widths = [statistics.median(measured[name][key]) for name in names]
                colour = style.series_colour(place)
                axes.barh(names, widths, left=left, height=0.7, color=colour, label=key.removeprefix(PREFIX))
                left = [start + width for start, width in zip(left, widths, strict=True)]
            totals = [measured[name]["goodput"] for name in names]
            ends = [[end - min(each), max(each) - end] for end, each in zip(left, totals, strict=True)]
            reach = [[max(side, 0.0) for side in sides] for sides in zip(*ends, strict=True)]
            axes.errorbar(left, names, xerr=reach, fmt="none", ecolor=style.colour("ink"), elinewidth=1, capsize=2)
            axes.invert_yaxis()
            axes.set_title(load)
            axes.set_xlabel("Requests/s that met the objectives of their class")
        style.legend_outside(figure, panels, 4)
        write_files({path: style.to_png(figure)})
