"""Makes rows from what was measured, and markdown from rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from benchmarks.checkpoint import SHAPES
from benchmarks.processes import Died
from benchmarks.rounds import compare, spread
from benchmarks.sitting import Sitting
from benchmarks.work import shape_of, share

FIRST = "headway"
Best = Callable[[Iterable[float]], float]  # max for rates, min for times


@dataclass(frozen=True)
class Row:
    """One engine at one point: tokens a second, or seconds for a start.

    Args:
        share: of the machine's peak that it reached, the median over the rounds; see benchmarks.work.
        best: the peer with the best median at this point; None but for Headway's rows, and without a peer.
        ratio: Headway's median by the best peer's, with its range by round.
    """

    point: str
    engine: str
    median: float
    low: float
    high: float
    share: float | None = None
    best: str | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


def compared(point: str, measured: dict[str, list[float]], variants: set[str], best: Best) -> list[Row]:
    """A row for each engine that has values, in their order. Those in `variants` are nobody's best peer."""
    measured = {engine: values for engine, values in measured.items() if values}
    peers = {
        engine: statistics.median(values)
        for engine, values in measured.items()
        if not engine.startswith(FIRST) and engine not in variants
    }
    champion = next((engine for engine, median in peers.items() if median == best(peers.values())), None)
    found = []
    for engine, values in measured.items():
        row = Row(point, engine, statistics.median(values), min(values), max(values))
        if engine.startswith(FIRST) and champion is not None:
            ratio = compare(values, measured[champion])
            row = replace(row, best=champion, ratio=ratio.ratio, ratio_low=ratio.ratio_low, ratio_high=ratio.ratio_high)
        found.append(row)
    return found


def rows(sitting: Sitting) -> list[Row]:
    """Rows of all points in the order measured, with shares of the machine's peaks round by round."""
    shape, points = shape_of(SHAPES[sitting.shape]), {point.label: point for point in sitting.points}
    variants = {entry.label for entry in sitting.entries if entry.variant}
    # The peaks of products are those of all instructions.
    restricted = any(entry.isa for entry in sitting.entries)
    unknown = {label for label, point in points.items() if restricted and point.rate == "prefill"}
    found = []
    for label, measured in sitting.rates.items():
        for row in compared(label, measured, variants, max):
            peaks_of = [] if label in unknown else sitting.peaks[label]
            pairs = zip(measured[row.engine], peaks_of, strict=False)  # fewer rates where it died
            shares = [share(shape, sitting.precision, points[label], rate, peaks) for rate, peaks in pairs]
            known = [each for each in shares if each is not None]
            found.append(replace(row, share=statistics.median(known) if known else None))
    return found


def table(title: str, found: list[Row], left_out: dict[str, str], died: Iterable[Died] = ()) -> str:
    """Markdown: the best peer's ratio in Headway's rows, and what share of the peak each engine reached."""
    lines = [f"**{title}**", "", "| | engine | median (range) | of the peak | Headway / best peer |"]
    lines.append("|---|---|---:|---:|---|")
    for row in found:
        cells = [row.point, row.engine, spread(row.median, row.low, row.high)]
        cells.append("" if row.share is None else f"{row.share:.0%}")
        ratio = f"{spread(row.ratio, row.ratio_low, row.ratio_high)} {row.best}" if row.best else ""
        lines.append(f"| {' | '.join([*cells, ratio])} |")
    lines += [f"\n{point}: left out, {reason}." for point, reason in left_out.items()]
    lines += [f"\nWithout all rounds: {end.line}." for end in died]
    return "\n".join(lines) + "\n"
