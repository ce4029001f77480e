"""What a comparison of two sides says: in words, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.bench.report.tables import value_in_words
from headway.load.measures.compare import Comparison, Difference, Verdict
from headway.report import style
from headway.report.parts import Banner, Cell, Picture, Section, Table, Tone, cells
from headway.report.style import number, plain, sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "e2el_ms": "E2EL",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "attainment": "met their objectives",
}
MORE_IS_BETTER = ("request_throughput", "output_throughput", "attainment")


def label_of(difference: Difference) -> str:
    """Name a difference, such as "TTFT P99" or "output tokens/s"."""
    name = LABELS.get(difference.metric, difference.metric)
    if difference.statistic in ("rate", "share"):
        return name
    return f"{name} {'P' + difference.statistic[1:] if difference.statistic.startswith('p') else difference.statistic}"


def is_better(difference: Difference) -> bool:
    """Whether b is the better of the two, where there is a difference."""
    return (
        (difference.difference or 0.0) > 0
        if difference.metric in MORE_IS_BETTER
        else (difference.difference or 0.0) < 0
    )


def comparison_table(comparison: Comparison, a: str, b: str) -> Table:
    """Every statistic of both sides, their difference with its interval, and whether it is real."""
    share = f"{100 * comparison.confidence:g} %"
    rows = tuple(_row(difference) for difference in comparison.differences)
    note = (
        f"a: {plain(a, 60)}; b: {plain(b, 60)}. Latencies in ms from the schedule, with the {share} interval below "
        f"each difference. Method: {comparison.method}. "
        "Verdicts allow for the number of comparisons, so chance alone is rarely called real."
    )  # fmt: skip
    columns = ("", "a", "b", "b - a", "b / a", "verdict")
    return Table("Differences", columns, rows, left=frozenset({0, 5}), note=note)


def _row(found: Difference) -> tuple[Cell, ...]:
    share = found.statistic == "share"

    def shown(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{100 * value:.4g} %" if share else number(value)

    change = Cell(_signed(found.difference, share), detail=_interval(found.low, found.high, share))
    ratio = Cell(
        "–" if found.ratio is None else f"{found.ratio:.3g}", detail=_interval(found.ratio_low, found.ratio_high)
    )
    return cells(label_of(found), shown(found.a), shown(found.b), change, ratio, _verdict_cell(found))


def _signed(value: float | None, share: bool) -> str:
    if value is None:
        return "–"
    text = f"{100 * abs(value):.3g} points" if share else number(abs(value))
    return f"{'-' if value < 0 else '+'}{text}"


def _interval(low: float | None, high: float | None, share: bool = False) -> str:
    if low is None or high is None:
        return ""
    scale = 100 if share else 1
    return f"{number(scale * low)} to {number(scale * high)}"


def _verdict_cell(found: Difference) -> Cell:
    if found.verdict is Verdict.TOO_FEW:
        return Cell(f"needs {found.needs:,}+ samples" if found.needs else "too few samples", "quiet")
    if found.verdict is Verdict.NOISE:
        return Cell("noise", "quiet", _p_value(found))
    better = is_better(found)
    tone: Tone = "good" if better else "bad"
    return Cell("real: b is better" if better else "real: b is worse", tone, _p_value(found))


def _p_value(found: Difference) -> str:
    return "" if found.adjusted_p_value is None else f"p = {found.adjusted_p_value:.2g}"


@style.drawing()
def ratios(comparison: Comparison) -> Figure:
    """b / a of every statistic with its interval; 1 is no difference."""
    shown = [each for each in comparison.differences if each.ratio is not None and each.ratio > 0]
    height = 1.3 + 0.26 * max(len(shown), 3)
    figure, (axes,) = style.new_figure(8.0, height, x="b / a (1: no difference)", y="Statistic")
    if not shown:
        style.nothing_to_show(axes, "no statistic can be compared: too few samples")
        return figure
    for better, colour, label in ((True, "green", "real, b is better"), (False, "red", "real, b is worse")):
        chosen = [
            (row, each) for row, each in enumerate(shown) if each.verdict is Verdict.REAL and is_better(each) is better
        ]
        _points(axes, chosen, colour, label)
    _points(axes, [(row, each) for row, each in enumerate(shown) if each.verdict is not Verdict.REAL], "gray", "noise")
    axes.axvline(1, color=style.colour("ink"), lw=0.9)
    axes.set_yticks(range(len(shown)), [label_of(each) for each in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    limits = [value for each in shown for value in (each.ratio, each.ratio_low, each.ratio_high) if value and value > 0]
    if max(limits) / min(limits) > 4 and all(math.isfinite(value) for value in limits):
        axes.set_xlim(min(*limits, 1.0) / 1.2, max(*limits, 1.0) * 1.2)
        style.log_axis(axes, "x")
    style.legend_outside(figure, [axes], 3, above=True)
    return figure


def _points(axes: Axes, chosen: Sequence[tuple[int, Difference]], colour: str, label: str) -> None:
    if not chosen:
        return
    ratios_ = [each.ratio or 1.0 for _, each in chosen]
    low = [max(ratio - (each.ratio_low or ratio), 0.0) for ratio, (_, each) in zip(ratios_, chosen, strict=True)]
    high = [max((each.ratio_high or ratio) - ratio, 0.0) for ratio, (_, each) in zip(ratios_, chosen, strict=True)]
    rows, mark = [row for row, _ in chosen], "D" if colour == "red" else "o"
    style.ranges(axes, ratios_, rows, colour, label, mark, xerr=[low, high], ms=4.5, elinewidth=1.4)


def comparison_banners(comparison: Comparison, a: str, b: str) -> tuple[Banner, ...]:
    """The outcome in a sentence or two, then what stands against it."""
    real = [each for each in comparison.differences if each.verdict is Verdict.REAL]
    who = f"a is {plain(a, 60)}, b is {plain(b, 60)}."
    few = sum(each.verdict is Verdict.TOO_FEW for each in comparison.differences)
    unknown = f" {few} could not be judged: too few samples." if few else ""
    if not real:
        total = len(comparison.differences) - few
        found = Banner(
            "No difference is real", (f"{who} All {total} differences judged are within noise.{unknown}",), ""
        )
    else:
        better = ", ".join(_in_words(each) for each in real if is_better(each))
        worse = ", ".join(_in_words(each) for each in real if not is_better(each))
        lines = [
            who,
            f"b is better in {better}." if better else "",
            f"b is worse in {worse}." if worse else "",
            unknown.strip(),
        ]
        tone: Tone = "warn" if better and worse else "good" if better else "bad"
        found = Banner(f"{len(real)} real difference{'s' * (len(real) != 1)}", tuple(filter(None, lines)), tone)
    warnings = tuple(sentence(warning) for warning in comparison.warnings)
    doubts = (Banner("Beware", warnings, "warn"),) if warnings else ()
    return (found, *doubts)


def _in_words(found: Difference) -> str:
    if found.ratio is not None and found.ratio > 0:
        return f"{label_of(found)} ({100 * (found.ratio - 1):+.3g} %)"
    return f"{label_of(found)} ({_signed(found.difference, found.statistic == 'share')})"


def settings_table(comparison: Comparison) -> Table | None:
    """What was set differently; None where nothing was."""
    rows = tuple(
        cells(plain(key), *(plain(value_in_words(value), 80) for value in values))
        for key, values in comparison.settings.items()
    )
    if not rows:
        return None
    return Table("Settings that differ", ("", "a", "b"), rows, left=frozenset({0, 1, 2}))


def comparison_section(comparison: Comparison, a: str = "a", b: str = "b") -> Section:
    """The section of a comparison, for the top of a report.

    Args:
        a, b: what to call the two sides: their files, or labels.
    """
    tables = [comparison_table(comparison, a, b), settings_table(comparison)]
    caption = (
        "Each point is b / a with its own interval. A grey interval that excludes 1 would be significant alone, but "
        "not among this many comparisons."
    )
    return Section(
        "Comparison",
        banners=comparison_banners(comparison, a, b),
        tables=tuple(table for table in tables if table is not None),
        pictures=(Picture("comparison", "How b compares with a", caption, ratios(comparison)),),
        anchor="comparison",
    )
