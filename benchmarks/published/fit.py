"""Fitting the efficiencies to published measurements, and the error bars to what is left over."""

from __future__ import annotations

import math
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.published.predict import EfficiencyOf, Predicted, predict
from benchmarks.published.rows import Row
from headway.cost.catalogue import find_hardware
from headway.cost.efficiency import Efficiency
from headway.cost.hardware import Hardware

METRICS = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
# Architectures with several sources of their own.
WELL_MEASURED = ("ampere", "hopper")
# The usual errors of sound figures, in the logarithm. Errors are weighed by them.
USUAL_ERROR = {"ttft_ms": 0.15, "tpot_ms": 0.08, "output_tokens_per_s": 0.08}


@dataclass(frozen=True)
class Parameter:
    """One number that is fitted.

    Args:
        section: all, architecture.NAME or engine.NAME, as in the table of efficiencies.
        field: of Efficiency; with a dot, an entry of one of its tables.
        guess: what is believed without data, and `doubt`, the standard deviation of its logarithm.
        most: that it may be.
    """

    section: str
    field: str
    guess: float
    doubt: float = 0.3
    most: float = math.inf


class Table:
    """Efficiencies by section, made of the parameters' values."""

    def __init__(self, parameters: Sequence[Parameter], values: Sequence[float]) -> None:
        self.sections: dict[str, dict[str, Any]] = {"all": {}}  # in the order of the parameters
        for parameter, value in zip(parameters, values, strict=True):
            fields = self.sections.setdefault(parameter.section, {})
            name, _, entry = parameter.field.partition(".")
            if entry:
                fields.setdefault(name, {})[entry] = value
            else:
                fields[name] = value
        self._made: dict[tuple[str, str], Efficiency] = {}

    def efficiency(self, hardware: Hardware, engine: str) -> Efficiency:
        """The efficiency, with sections merged as `headway.cost.catalogue.efficiency` does."""
        key = (hardware.architecture, engine)
        if key not in self._made:
            merged = dict(self.sections["all"])
            merged |= self.sections.get(f"architecture.{hardware.architecture}", {})
            merged |= self.sections.get(f"engine.{engine}", {})
            self._made[key] = Efficiency(**merged)
        return self._made[key]


@dataclass(frozen=True)
class Compared:
    """One figure, measured and predicted."""

    row: Row
    metric: str
    measured: float
    predicted: float

    @property
    def log_ratio(self) -> float:
        """The logarithm of predicted / measured."""
        return math.log(self.predicted / self.measured)

    @property
    def as_time(self) -> Compared:
        """A rate as the time that it stands for, so that errors of both point the same way."""
        if self.metric != "output_tokens_per_s":
            return self
        return Compared(self.row, self.metric, 1.0 / self.measured, 1.0 / self.predicted)

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1.0


Known = dict[tuple[Row, str], Predicted]


def compare(rows: Iterable[Row], efficiency_of: EfficiencyOf, known: Known | None = None) -> Iterator[Compared]:
    """Each published figure beside its prediction. A rate that only repeats TPOT is left out.

    Args:
        known: predictions that need not be made again, by row and efficiency; it is added to.
    """
    known = {} if known is None else known
    for row in rows:
        key = (row, repr(efficiency_of(find_hardware(row.hardware), row.engine)))
        if key not in known:
            known[key] = predict(row, efficiency_of)
        predicted = known[key]
        for metric in METRICS:
            measured, ours = getattr(row, metric), getattr(predicted, metric)
            if measured is None or ours is None or (metric == "output_tokens_per_s" and row.tpot_ms is not None):
                continue
            yield Compared(row, metric, measured, ours)


def weights(compared: Sequence[Compared]) -> np.ndarray:
    """Each source counts as the square root of how many figures it has, whatever share of them."""
    counts = Counter(each.row.source.key for each in compared)
    return np.array([counts[each.row.source.key] ** -0.25 for each in compared])


# Predictions of this process: a step in one parameter leaves most rows as they were.
_KNOWN: Known = {}
MOST_KNOWN = 50_000


@dataclass(frozen=True)
class _Residuals:
    """Residuals by the logarithms of parameters: errors over usual errors, and distances from the guesses."""

    rows: Sequence[Row]
    parameters: Sequence[Parameter]
    fixed: Mapping[Parameter, float]

    def __call__(self, logs: np.ndarray) -> np.ndarray:
        values = [*self.fixed.values(), *np.exp(logs).tolist()]
        found = Table([*self.fixed, *self.parameters], values)
        if len(_KNOWN) > MOST_KNOWN:
            _KNOWN.clear()
        compared = list(compare(self.rows, found.efficiency, _KNOWN))
        usual = np.array([USUAL_ERROR[each.metric] for each in compared])
        left = np.array([each.log_ratio for each in compared]) / usual * weights(compared)
        doubts = [(log - math.log(each.guess)) / each.doubt for log, each in zip(logs, self.parameters, strict=True)]
        return np.concatenate([left, doubts])


def fit(
    rows: Sequence[Row],
    parameters: Sequence[Parameter],
    start: Mapping[Parameter, float] | None = None,
    rounds: int = 12,
    fixed: Mapping[Parameter, float] | None = None,
) -> dict[Parameter, float]:
    """Values of the parameters with the least squared logarithm of predicted by measured, outliers held down.

    Parameters that no row speaks of stay at their guess. Uses all cores.

    Args:
        start: values to begin at; None: the guesses.
        rounds: of the optimiser at most.
        fixed: further parameters with their values.
    """
    from scipy.optimize import least_squares

    most = np.log([each.most for each in parameters]) + 1e-9
    begin = np.log([start[each] if start else each.guess for each in parameters])
    begin = np.minimum(begin, most - 1e-6)
    with multiprocessing.get_context("fork").Pool() as pool:
        found = least_squares(
            _Residuals(rows, parameters, fixed or {}),
            begin,
            bounds=(-np.inf, most),
            loss="soft_l1",
            diff_step=0.02,
            max_nfev=rounds,
            workers=pool.map,
        )
    return dict(zip(parameters, np.exp(found.x).tolist(), strict=True))


def fit_in_turn(
    rows: Sequence[Row],
    parameters: Sequence[Parameter],
    start: Mapping[Parameter, float] | None = None,
    rounds: int = 12,
) -> dict[Parameter, float]:
    """First what all architectures share, to rows of the best measured ones; then what is particular to the others."""
    late = [each for each in parameters if each.section.startswith("architecture.") and _later(each.section)]
    early = [each for each in parameters if each not in late]
    of_late = [row for row in rows if _later(f"architecture.{find_hardware(row.hardware).architecture}")]
    found = fit([row for row in rows if row not in of_late], early, start, rounds)
    return found | fit(of_late, late, start, rounds, found)


def _later(section: str) -> bool:
    return section.removeprefix("architecture.") not in WELL_MEASURED


def leave_one_out(
    rows: Sequence[Row], judged: Sequence[Row], parameters: Sequence[Parameter], start: Mapping[Parameter, float]
) -> Iterator[list[Compared]]:
    """Each family of `rows` predicted by efficiencies that were fitted to all others, from the values `start` on.

    Args:
        judged: rows that nothing is fitted to; those of the same family are predicted with it.
    """
    for family in sorted({row.source.family for row in rows}):
        values = fit_in_turn([row for row in rows if row.source.family != family], parameters, start)
        found = Table(list(values), list(values.values()))
        yield list(compare([row for row in [*rows, *judged] if row.source.family == family], found.efficiency))


def error_bar(compared: Sequence[Compared], share: float = 0.8) -> tuple[float, float]:
    """Factors on a prediction between which this share of the measurements lies, as many below as above.

    Sources are weighed as in `weights`. Raises ValueError without any figure.
    """
    if not compared:
        raise ValueError("no figure to take an error bar from")
    order = sorted(compared, key=lambda each: -each.log_ratio)
    counts = Counter(each.row.source.key for each in order)
    weight = np.array([counts[each.row.source.key] ** -0.5 for each in order])
    below = (np.cumsum(weight) - weight / 2) / weight.sum()
    ratios = np.array([math.exp(-each.log_ratio) for each in order])  # measured by predicted, ascending
    low, high = np.interp([(1 - share) / 2, (1 + share) / 2], below, ratios)
    return float(low), float(high)


def summary(compared: Sequence[Compared]) -> Mapping[str, float]:
    """Median and 90th percentile of the absolute relative error, and the median of predicted by measured."""
    errors = [abs(each.error) for each in compared]
    return {
        "figures": len(errors),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "median_ratio": float(np.median([each.predicted / each.measured for each in compared])),
    }
