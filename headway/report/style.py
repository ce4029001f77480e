"""How pictures look: one palette for light, dark and print, and figures as PNG and as inline SVG.

Figures are drawn in the light palette. Every colour of it is unique, so in the SVG each is replaced by a CSS variable
(`var(--hw-blue)`), and the page decides what it looks like: the same picture reads on white, on black and on paper.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name: (on white, on black). Adjacent series and groups of phases differ in lightness as well as in hue, so that they
# are told apart with any colour vision and in a grey print. No two entries may share a light colour.
PALETTE: dict[str, tuple[str, str]] = {
    "ink": ("#1d2530", "#e8ebf0"),
    "muted": ("#566170", "#a9b3c0"),
    "line": ("#b9c1cb", "#4a5565"),
    "grid": ("#e3e7ec", "#2a323d"),
    "paper": ("#fefefe", "#12161c"),
    "panel": ("#f4f6f8", "#1b2129"),
    # series
    "blue": ("#0b63b0", "#5fb0ff"),
    "orange": ("#d26900", "#ffa84d"),
    "green": ("#128260", "#46d1a1"),
    "purple": ("#8150b3", "#c79cf3"),
    "red": ("#b72d46", "#ff7c8e"),
    "sky": ("#3a9bc4", "#8ad3f0"),
    "gold": ("#a48200", "#e6c84d"),
    "gray": ("#7d8897", "#929dac"),
    # phases of a request: compute blue, queue yellow to brown, stall wine to pink, the rest grey and green
    "prefill-compute": ("#1058a0", "#3f8fe0"),
    "decode-compute": ("#74b3e3", "#a6d4f8"),
    "queue-policy": ("#f2d58a", "#f7e3ae"),
    "queue-capacity": ("#e5a823", "#eab94a"),
    "queue-blocks": ("#a8680c", "#b9802a"),
    "prefill-stall": ("#e2a3bd", "#f0bdd1"),
    "stall-prefill": ("#a3235c", "#d4528c"),
    "stall-preempted": ("#5f1036", "#93305f"),
    "stall-recompute": ("#cf6f97", "#e58db1"),
    "sampling": ("#4e9a83", "#6cc2a8"),
    "schedule": ("#6c7785", "#8893a2"),
    "transport": ("#98a3af", "#b3bdc9"),
    "intake": ("#c4ccd4", "#d6dde4"),
    "output": ("#aab9b2", "#c3d3cb"),
    "send-blocked": ("#3f4854", "#6a7686"),
    "network": ("#dde2e7", "#39424e"),
    "server-rest": ("#8a82a0", "#b4abcc"),
    "client": ("#7d4fb8", "#bd93f9"),
}
SERIES = ("blue", "orange", "green", "purple", "red", "sky", "gold", "gray")
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
FONT_STACK = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif'
PNG_DPI = 150


def colour(name: str) -> str:
    """The light colour of a name of PALETTE, to draw with."""
    return PALETTE[name][0]


def series_colour(number: int) -> str:
    """Colours for a row of alike things; after eight they begin again (use `series_line` with them)."""
    return colour(SERIES[number % len(SERIES)])


def series_line(number: int) -> Any:
    """Line styles that go with `series_colour`, so that lines are told apart without colour too."""
    return LINE_STYLES[number % len(LINE_STYLES)]


def css_variables(dark: bool) -> str:
    """The palette as CSS declarations."""
    return "".join(f"--hw-{name}:{shades[dark]};" for name, shades in PALETTE.items())


def plain(text: object, longest: int = 48) -> str:
    """A user's text as a label: one line, printable, shortened in the middle."""
    line = "".join(c if c.isprintable() else " " for c in str(text))
    if len(line) <= longest:
        return line
    half = (longest - 1) // 2
    return f"{line[:half]}…{line[len(line) - half :]}"


@contextmanager
def drawing() -> Iterator[None]:
    """The style of our figures; a context manager and, as `@drawing()`, a decorator of functions that draw."""
    import matplotlib

    with matplotlib.rc_context(_settings()):
        yield


def _settings() -> Any:
    ink, muted, line = colour("ink"), colour("muted"), colour("line")
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.labelsize": 9,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.facecolor": colour("paper"),
        "figure.titlesize": 11,
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "grid.color": colour("grid"),
        "grid.linewidth": 0.7,
        "legend.edgecolor": line,
        "legend.facecolor": colour("paper"),
        "legend.fontsize": 8,
        "legend.framealpha": 0.85,
        "legend.frameon": False,
        "legend.labelcolor": ink,
        "lines.linewidth": 1.6,
        "path.simplify": True,
        "path.simplify_threshold": 0.2,
        "patch.edgecolor": colour("paper"),
        "patch.linewidth": 0.0,
        "svg.fonttype": "none",
        "svg.hashsalt": "headway",  # the same data gives the same file
        "text.color": ink,
        "text.parse_math": False,  # a "$" in a model's name is a dollar sign
        "xtick.color": line,
        "xtick.labelcolor": muted,
        "xtick.labelsize": 8,
        "ytick.color": line,
        "ytick.labelcolor": muted,
        "ytick.labelsize": 8,
    }


def new_figure(
    width: float = 8.0,
    height: float = 3.6,
    rows: int = 1,
    columns: int = 1,
    x: str | Sequence[str] = "",
    y: str | Sequence[str] = "",
    **subplots: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row.

    Draw inside `drawing()`: what is added later (legends, lines, texts) takes its style from there.

    Args:
        width, height: inches; the page shows 8 inches as the full width of its column.
        x, y: labels of the axes, the same for all panels or one for each.
        subplots: arguments for Figure.subplots: sharex, width_ratios, ...
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    with drawing():
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = [axes for row in figure.subplots(rows, columns, squeeze=False, **subplots) for axes in row]
        for place, axes in enumerate(panels):
            for axis, label in ((axes.xaxis, x), (axes.yaxis, y)):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
                axis.set_label_text(label if isinstance(label, str) else label[place])
        return figure, panels


def legend(axes: Axes, **placing: Any) -> None:
    """A legend where there is something to tell apart: two labelled things or more."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, **placing)


def band(axes: Axes, x: Sequence[float], low: Sequence[float], high: Sequence[float], hue: str, **more: Any) -> None:
    """The ranges of points as an area; that of a single point as a bar, because an area needs two."""
    if len(x) == 1:
        axes.vlines(x, low, high, color=hue, alpha=0.35, lw=5, **more)
    else:
        axes.fill_between(x, low, high, color=hue, alpha=0.16, lw=0, **more)


def ranges(axes: Axes, x: Sequence[float], y: Sequence[float], hue: str, label: str, mark: str, **more: Any) -> None:
    """Points with the bars of their intervals: `xerr` or `yerr`, as of matplotlib, and the points' size `ms`."""
    axes.errorbar(x, y, fmt=mark, color=colour(hue), label=label, capsize=2.5, **more)


def legend_outside(figure: Figure, panels: Sequence[Axes], columns: int, above: bool = False) -> None:
    """A legend below or above the panels: whatever is labelled in any of them, once."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside upper left" if above else "outside lower left",
            ncols=columns,
            columnspacing=1.4,
        )


def log_axis(axes: Axes, which: str) -> None:
    """Logarithmic "x" or "y" with ticks written out (1, 2, 5, 10, ...) rather than as powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / max(low, 1e-12) < 2e3 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def wants_log(values: Sequence[float], ratio: float = 30.0) -> bool:
    """Whether positive values span so much that a linear axis would hide the small ones."""
    positive = [value for value in values if value > 0]
    return len(positive) > 1 and max(positive) / min(positive) > ratio


def number(value: float) -> str:
    """A number for people: four significant digits at most, thousands separated, no exponent below a billion."""
    if value != value or value in (float("inf"), float("-inf")):
        return "–"
    if abs(value) >= 1e9:
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def sentence(words: str) -> str:
    """The same with a capital letter and a full stop."""
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def stacked_bars(
    axes: Axes, parts: Iterable[tuple[str | None, str, Sequence[float]]], height: float = 0.66
) -> list[float]:
    """Horizontal bars, each from where the one before it ends: the label, colour and lengths by row of each part.

    Returns:
        Where each row ends.
    """
    ends: list[float] = []
    for label, hue, lengths in parts:
        ends = ends or [0.0] * len(lengths)
        axes.barh(range(len(lengths)), lengths, left=ends, height=height, color=colour(hue), label=label)
        ends = [end + float(length) for end, length in zip(ends, lengths, strict=True)]
    return ends


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of horizontal bars, with the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def beside(axes: Axes, x: float, row: int, text: str) -> None:
    """Write a text at the end of a horizontal bar."""
    axes.annotate(text, (x, row), (4, 0), textcoords="offset points", va="center", fontsize=8)


def nothing_to_show(axes: Axes, why: str) -> None:
    """An empty picture that says why it is empty; its axes keep their labels."""
    axes.text(0.5, 0.5, plain(why, 90), transform=axes.transAxes, ha="center", va="center", color=colour("muted"))
    axes.set_xticks([])
    axes.set_yticks([])


def _lay_out(figure: Figure) -> None:
    """Lay a figure out once for all forms in which it is saved, because that takes longer than drawing."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)


def to_png(figure: Figure) -> bytes:
    """The light version, 150 dots per inch."""
    file = io.BytesIO()
    with drawing(), _missing_glyphs_are_fine():
        _lay_out(figure)
        figure.savefig(file, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return file.getvalue()


_UNREAD_ID = re.compile(r' id="(?:figure|axes|matplotlib\.axis|patch|line2d|text|legend|xtick|ytick)[A-Za-z0-9_.]*"')
_ID = re.compile(r'( id="|href="#|url\(#)([^")]+)')
_FONT_FAMILY = re.compile(r" font-family: [^;\"]*;")
_FONT_SHORTHAND = re.compile(r"font: (?:bold |700 )?([0-9.]+px) [^;\"]*")  # older versions of matplotlib write it
_COLOUR = re.compile(r"(fill|stroke|stop-color): (#[0-9a-f]{6})")
_UNTURNED = re.compile(r' transform="rotate\(-?0 [^"]*"')
_VARIABLES = {light: f"var(--hw-{name})" for name, (light, _) in PALETTE.items()}
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
_HEAD = re.compile(r"<svg[^>]*?viewBox=\"([^\"]*)\"[^>]*>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_BLANKS = re.compile(r"\s*\n\s*")
_TOO_FINE = re.compile(r"(\d\.\d\d)\d+")
_DRAWN = re.compile(r' (?:d|x|y|points)="[^"]*"')
_STYLE = re.compile(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>\s*", re.DOTALL)


def to_svg(figure: Figure, name: str = "figure", title: str = "") -> str:
    """The figure as an <svg> element for an HTML page that holds `css_variables`.

    Text stays text in the page's font; colours are CSS variables; it scales to the width it is given.

    Args:
        name: a prefix of the ids inside, unique in the page: letters, digits and hyphens.
        title: what a screen reader says.
    """
    file = io.StringIO()
    with drawing(), _missing_glyphs_are_fine():
        _lay_out(figure)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = _STYLE.sub("", _METADATA.sub("", _COMMENT.sub("", text[text.index("<svg") :])))
    text = _UNREAD_ID.sub("", text).replace("xlink:href", "href")
    text = _ID.sub(rf"\g<1>{name}-\g<2>", text)
    text = _UNTURNED.sub("", _FONT_SHORTHAND.sub(r"font-size: \1", _FONT_FAMILY.sub("", text)))
    text = _DRAWN.sub(lambda match: _TOO_FINE.sub(r"\1", match[0]), text)
    text = _COLOUR.sub(lambda match: f"{match[1]}: {_VARIABLES.get(match[2], match[2])}", text)
    head = '<svg class="hw-figure" role="img" viewBox="{}"><title>{}</title>'
    text = _HEAD.sub(lambda match: head.format(match[1], escape(title, quote=False)), text, count=1)
    return _BLANKS.sub("\n", text).strip()


@contextmanager
def _missing_glyphs_are_fine() -> Iterator[None]:
    """The font that PNGs are drawn with need not have every character of a user's text."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield
