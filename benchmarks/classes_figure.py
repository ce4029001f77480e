"""The picture of benchmarks.classes: what each contestant has of goodput, class by class."""

from __future__ import annotations

import statistics
from pathlib import Path

from headway.files import write_files
from headway.report import style

PREFIX = "goodput "
Measured = dict[str, dict[str, list[float]]]


def draw(values: dict[str, Measured], path: Path) -> None:
    """Bars of the medians over the rounds, a panel for each load; whiskers are the range of the total.

    Args:
        values: of Rounds: by load, contestant and measure.
    """
    keys = [key for measured in values.values() for key in next(iter(measured.values()))]
    colours = {
        key: style.SERIES[place % len(style.SERIES)] for place, key in enumerate(dict.fromkeys(filter(_is_class, keys)))
    }
    heights = [0.4 + 0.2 * len(measured) for measured in values.values()]
    with style.drawing():
        figure, panels = style.new_figure(8.0, 0.8 + sum(heights), rows=len(values), height_ratios=heights)
        for axes, (load, measured) in zip(panels, values.items(), strict=True):
            medians = {key: [statistics.median(each.get(key, [0.0])) for each in measured.values()] for key in colours}
            parts = ((key.removeprefix(PREFIX), colours[key], lengths) for key, lengths in medians.items())
            style.stacked_bars(axes, parts, 0.7)
            for place, each in enumerate(measured.values()):
                low, high = min(each["goodput"]), max(each["goodput"])
                axes.plot([low, high], [place, place], color=style.colour("ink"), lw=1, marker="|", ms=4)
            style.name_rows(axes, list(measured))
            axes.set_title(load)
        panels[-1].set_xlabel("Requests/s that met the objectives of their class")
        style.legend_outside(figure, panels, 4)
        write_files({path: style.to_png(figure)})


def _is_class(key: str) -> bool:
    return key.startswith(PREFIX)
