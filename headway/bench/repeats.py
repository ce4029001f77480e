"""The same load again and again, each time with another seed, until its figures are known well enough."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from rich.text import Text

from headway.bench.interrupts import Interrupted
from headway.bench.report import verdict
from headway.bench.report.views import steady_or_whole, tokens_per_s
from headway.bench.reporting import NOT_VALID, Run
from headway.bench.runs import Runner, load_of
from headway.load.measures.numbers import Summary
from headway.load.measures.probability import t_quantile
from headway.load.option_values import THROUGHPUT
from headway.report.console import print_table
from headway.report.parts import Cell, Section, Table, cells
from headway.report.style import number

FEWEST = 3  # runs: an interval of two is as wide as the sea
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class Repeated:
    """A figure over several runs."""

    key: str
    values: tuple[float, ...]  # of each run, in its order
    wanted: float  # the half width of the interval that is wanted, as a share of the mean

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half(self) -> float:
        """Half of the 95 % interval of the mean, by Student's t; infinite below FEWEST runs."""
        if len(self.values) < FEWEST:
            return math.inf
        error = statistics.stdev(self.values) / math.sqrt(len(self.values))
        return t_quantile(CONFIDENCE, len(self.values) - 1) * error

    @property
    def is_narrow(self) -> bool:
        return self.half <= self.wanted * self.mean


def figure(key: str, summaries: Sequence[Summary]) -> float | None:
    """Tokens a second, or the median latency in ms from the schedule; None where the run has no such figure."""
    view = steady_or_whole(summaries)
    if key == THROUGHPUT:
        return tokens_per_s(view)[0] or None
    found = view.from_schedule.get(f"{key}_ms")
    median = None if found is None else found.percentile(50.0)
    return None if median is None else median.value


def of_runs(runs: Sequence[Run], wanted: Mapping[str, float]) -> list[Repeated]:
    """The figures that are wanted, over all runs that have them."""
    found = []
    for key, share in wanted.items():
        values = [figure(key, summaries) for _, summaries in runs]
        found.append(Repeated(key, tuple(value for value in values if value is not None), share))
    return found


async def repeat(bench: Runner) -> int:
    """Run until every figure is narrow enough, or as often as is allowed. Returns the exit code.

    Raises:
        BenchError: a run cannot be made.
        Interrupted: before anything was measured.
    """
    options, spec = bench.options, bench.options.workload
    runs: list[Run] = []
    found: list[Repeated] = []
    for at in range(options.max_repeats):
        load = load_of(dataclasses.replace(spec, seed=spec.seed + at), options.max_concurrency)
        try:
            run = await bench.run(load, f"run {at + 1}")
        except Interrupted:
            break
        runs.append(run)
        found = of_runs(runs, options.repeat_until)
        more = {"repeats": {each.key: {**dataclasses.asdict(each), "mean": each.mean} for each in found if each.values}}
        bench.save(run, at + 1, more)
        bench.out.print(Text(f"run {at + 1}: {verdict.headline(*run)}"))
        done = all(each.is_narrow for each in found)
        if done or bench.stop.is_set() or "ended_early" in run[0].settings:
            break
    if not runs:
        raise Interrupted
    table = repeats_table(found, len(runs))
    print_table(bench.out, table)
    bench.report(runs[-1:], extra=[Section("Repeated runs", tables=(table,))])
    code = bench.exit_code(runs)
    return code or (0 if all(each.is_narrow for each in found) else NOT_VALID)


def repeats_table(found: Sequence[Repeated], runs: int) -> Table:
    """A row for each figure: its mean over the runs, and the interval of that."""
    rows = []
    for each in found:
        if len(each.values) < FEWEST:
            rows.append(cells(each.key, "–", "–", f"{100 * each.wanted:g} %", Cell("too few runs", "bad")))
            continue
        share = f"± {100 * each.half / each.mean:.1f} %"
        word = Cell("yes", "good") if each.is_narrow else Cell("no", "bad")
        rows.append(cells(each.key, number(each.mean), share, f"{100 * each.wanted:g} %", word))
    return Table(
        f"{runs} runs",
        ("", "mean", "interval", "wanted", "narrow"),
        tuple(rows),
        note="Medians in ms from the schedule, and tokens/s, of the steady state of each run if it has one. Interval: "
        "of the mean over runs, 95 %, by Student's t. Each run has another seed.",
    )
