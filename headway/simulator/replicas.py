"""`--find-replicas`: the fewest servers with which a workload's objectives hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.load.measures.trials import ProbeOutcome, Trial, Verdict
from headway.report.parts import Cell, Table, Tone
from headway.report.style import number

CONFIDENCE = 0.95
MOST_SEEDS = 8  # with one number of replicas, after which it is left undecided
MOST_REPLICAS = 1024

# A run on so many replicas, with the workload of this seed.
Probe = Callable[[int, int], ProbeOutcome]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The result of a search."""

    fewest: int | None  # the fewest replicas that are enough; None if no number was shown to be
    trials: dict[int, Trial]  # the trials of each number of replicas
    target: float  # share of requests that must meet their objectives
    reason: str = ""  # why there is no such number


def fewest_replicas(probe: Probe, target: float) -> Replicas:
    """Double the replicas until the objectives hold, and bisect.

    With one number of replicas seeds are added until the interval of the attainment lies on one side of the target.
    What is undecided does not hold. Where all requests met their objectives and were too few to show it, more replicas
    would not show it either.
    """
    trials: dict[int, Trial] = {}

    def holds(replicas: int) -> bool:
        trials[replicas] = _tried(probe, replicas, target)
        return trials[replicas].verdict is Verdict.HELD

    high = 1
    while not holds(high):
        if trials[high].met == trials[high].total:
            few = (
                f"all {trials[high].total:,} requests met them with {high} replicas, but these are too few for a proof"
            )
            return Replicas(None, trials, target, f"{few}; raise --num-prompts")
        high *= 2
        if high > MOST_REPLICAS:
            return Replicas(None, trials, target, f"{MOST_REPLICAS} are not enough")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return Replicas(high, trials, target)


def _tried(probe: Probe, replicas: int, target: float) -> Trial:
    trial = Trial(0.0)
    for seed in range(MOST_SEEDS):
        trial.probes.append(probe(replicas, seed))
        trial.judge(0.0, CONFIDENCE)
        if trial.unsteady or trial.high < target:
            trial.verdict = Verdict.FAILED
            trial.reason = "it falls behind" if trial.unsteady else ""
            break
        if trial.low >= target:
            trial.verdict = Verdict.HELD
            break
    return trial


def replicas_table(found: Replicas, price_per_hour: float | None, at_once: bool = False) -> Table:
    """A row for each number of replicas that was tried.

    Args:
        price_per_hour: the price of one replica; None leaves out what they cost.
        at_once: all requests came at the start.
    """
    rows = []
    for replicas, trial in sorted(found.trials.items()):
        tone: Tone = "good" if trial.verdict is Verdict.HELD else "bad" if trial.verdict is Verdict.FAILED else "quiet"
        rows.append(
            (
                Cell(f"{replicas}"),
                Cell(f"{len(trial.probes)}"),
                Cell(f"{trial.total:,}"),
                Cell(f"{100 * trial.share:.2f} %", tone),
                Cell(f"{100 * trial.low:.2f} to {100 * trial.high:.2f} %"),
                Cell(f"{24 * replicas}"),
                *(() if price_per_hour is None else (Cell(number(24 * replicas * price_per_hour)),)),
                Cell(trial.reason or str(trial.verdict), tone),
            )
        )
    price = () if price_per_hour is None else ("price a day",)
    columns = ("replicas", "seeds", "requests", "met", "95 % interval", "replica-hours a day", *price, "")
    said = f"{100 * found.target:g} % of the requests"
    note = f"Smallest number of replicas that meets the objectives for {said}: {found.fewest}."
    if found.fewest is None:
        note = f"No number of replicas was proven to meet the objectives for {said}: {found.reason}."
    if at_once:
        note += " All requests came at once; --request-rate gives the load of a day."
    return Table("Replicas", columns, tuple(rows), note=note)
