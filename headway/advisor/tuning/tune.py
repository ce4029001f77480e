"""`headway tune`: baseline, ranking by simulation, paired live trials, and what is kept.

Steps of the baseline are recorded. With step times that are learnt from them, the simulator runs the same requests with
each candidate, so that only those that it expects something of are tried. A trial starts the server by turns with and
without the change, and sends both the same requests; it ends as soon as its verdict is clear (`race`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from headway.advisor.tuning.candidates import Prediction, candidates
from headway.advisor.tuning.options import TuneOptions
from headway.advisor.tuning.race import LEAST_GAIN, MOST_PAIRS, Race, attainment, distances, furthest, loss
from headway.advisor.tuning.subjects import Subject, subject_of
from headway.bench.interrupts import interrupts
from headway.bench.journal import Journal
from headway.changes import Change, applied, typed
from headway.load.measures.latencies import Latencies
from headway.load.record import RequestRecord
from headway.policy.step.options import SchedulingOptions
from headway.simulator.verify import serve_flags

SIMULATED_SEEDS = 2
# So many trials of a flag without a gain, and its other values are not tried on top of the same configuration.
MOST_FAILURES = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that was tried live."""

    prediction: Prediction
    race: Race

    @property
    def kept(self) -> bool:
        return self.race.verdict == "better"


@dataclass(slots=True)
class Tuned:
    """What a tuning found."""

    # before, after: summaries of the runs of the configuration at the beginning and at the end.
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)  # what was kept, in order
    trials: list[Trial] = field(default_factory=list)
    # Predictions of the candidates that were not tried on top of what was kept, the best first.
    left: list[Prediction] = field(default_factory=list)
    why: str = ""  # why no more was tried


def run_tuning(options: TuneOptions, progress: Console) -> Tuned:
    """Tune. What was found until an interruption is in the journal.

    Raises:
        ValueError: bad input, or a server that does not start or answer; one line.
        Interrupted: Ctrl-C.
    """
    import uvloop

    journal, stop = Journal(options.output / "journal.jsonl", _about(options)), asyncio.Event()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Tuner(options, subject_of(options, stop), journal, progress, stop).run())


def _about(options: TuneOptions) -> dict[str, Any]:
    """What two tunings must have in common to be one."""
    started = {} if options.start is None else {"start": options.start}
    return started | {
        "model": options.model,
        "flags": serve_flags(options.model_options, options.scheduling),
        "workload": repr((options.workload, options.arrivals, options.max_concurrency)),
        "objectives": options.claims.objectives,
    }


def summary(records: Sequence[RequestRecord], objectives: dict[str, float]) -> dict[str, Any]:
    """JSON-able: the loss of a run, its attainment, percentiles in ms, and the ledger of its slowest requests."""
    found, times = distances(records, objectives), Latencies.of(records)
    percentiles = {
        name: [float(each) for each in np.nanpercentile(values, (50, 90, 99))]
        for name, values in (
            ("ttft", times.ttft("schedule")),
            ("tpot", times.tpot_ms),
            ("e2el", times.e2el("schedule")),
        )
        if not np.isnan(values).all()
    }
    phases: Counter[str] = Counter()
    for place in furthest(found) if len(found) else ():
        phases.update((records[place].timings or {}).get("phases_ns", {}))
    whole = sum(phases.values()) or 1
    return {
        "loss": loss(found),
        "attainment": attainment(found),
        "percentiles_ms": percentiles,
        "slowest": {name: ns / whole for name, ns in phases.most_common(4)},
    }


class Tuner:
    """The search.

    Args:
        options: the settings to begin with, the objectives and the budget.
        stop: set when it is to end.
    """

    def __init__(
        self, options: TuneOptions, subject: Subject, journal: Journal, progress: Console, stop: asyncio.Event
    ) -> None:
        self._options, self._subject, self._journal = options, subject, journal
        self._progress, self._stop = progress, stop
        self._objectives = options.claims.objectives

    async def run(self) -> Tuned:
        found, now = Tuned(), self._options.scheduling
        with interrupts(self._stop, self._progress), self._progress.status("") as self._status:
            found.before = found.after = await self._baseline()
            failures: Counter[str] = Counter()
            tried: set[str] = set()
            while True:
                found.left = await self._ranked(now, found.changes, tried, failures)
                best = next((each for each in found.left if each.high >= LEAST_GAIN), None)
                if best is None:
                    found.why = (
                        f"no further change is predicted to gain {LEAST_GAIN - 1:.0%}, not even at the end of its bar"
                    )
                    break
                if self._journal.seconds >= self._options.budget_s:
                    found.why = f"the budget of {self._options.budget_s:g} s is spent"
                    break
                tried.add(best.change.typed)
                race, runs = await self._race(now, best.change)
                found.trials.append(Trial(best, race))
                if race.verdict == "better":
                    now = applied(now, [best.change])
                    found.changes.append(best.change)
                    found.after = runs
                    failures.clear()
                else:
                    failures[best.change.field] += 1
        return found

    # --- simulated -------------------------------------------------------------------------------------

    async def _ranked(
        self, now: SchedulingOptions, kept: list[Change], tried: set[str], failures: Counter[str]
    ) -> list[Prediction]:
        """Predictions of all candidates that are left, the best first."""
        found, tunable = [], self._subject.tunable
        for change in candidates(now, self._subject.device):
            if change.typed in tried or failures[change.field] >= MOST_FAILURES:
                continue
            if tunable is not None and change.field not in tunable:
                continue
            question = f"simulated {typed(kept)} then {change.typed}"
            gains = self._journal.answer(question)
            if gains is None:
                self._status.update(f"Simulating {change.typed} ...")
                gains = await self._simulated_gains(now, applied(now, [change]))
                if gains is not None:
                    self._journal.add(question, gains)
            if gains is None:
                found.append(Prediction.unknown(change))
            elif gains:
                found.append(Prediction.of(change, gains))
        return sorted(found, key=lambda each: each.times, reverse=True)

    async def _simulated_gains(self, now: SchedulingOptions, then: SchedulingOptions) -> list[float] | None:
        """How much smaller the loss gets, for some seeds; none where the settings contradict each other.

        None where nothing can be simulated.
        """
        gains = []
        try:
            for seed in range(SIMULATED_SEEDS):
                plain, other = [await self._subject.simulated(each, seed) for each in (now, then)]
                if plain is None or other is None:
                    return None
                gains.append(self._loss(plain) - self._loss(other))
        except ValueError:
            return []
        return gains

    def _loss(self, records: Sequence[RequestRecord]) -> float:
        return loss(distances(records, self._objectives))

    # --- live ------------------------------------------------------------------------------------------

    async def _baseline(self) -> list[dict[str, Any]]:
        known = self._journal.answer("baseline")
        if known is None:
            began = time.monotonic()
            self._status.update("Measuring the baseline ...")
            told = [summary(records, self._objectives) for records in await self._subject.learn()]
            known = {"device": self._subject.device, "runs": told}
            self._journal.add("baseline", known, time.monotonic() - began)
        self._subject.device = known["device"]
        runs: list[dict[str, Any]] = known["runs"]
        return runs

    async def _race(self, now: SchedulingOptions, change: Change) -> tuple[Race, list[dict[str, Any]]]:
        """Let two configurations answer the same requests by turns until the verdict is clear.

        The server is started for two runs at a time: the second of one pair, and the first of the next.

        Returns:
            The race, and the summaries of the candidate's runs.
        """
        sides = now, applied(now, [change])
        flags = [" ".join(serve_flags(each)) for each in sides]
        runs: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        race, turn = Race(()), 0
        while race.verdict == "undecided" and len(race.gains) < MOST_PAIRS:
            side, ahead = turn % 2, turn % 2 == 0 and turn == 0
            wanted = range(len(runs[side]), min(MOST_PAIRS, len(runs[side]) + (1 if ahead else 2)))
            question = f"race {flags[0]} against {change.typed}: {'with' if side else 'without'} {list(wanted)}"
            known = self._journal.answer(question)
            if known is None:
                self._status.update(f"Trying {change.typed}: {len(race.gains)} pairs, {race.times:.2f} x so far ...")
                began = time.monotonic()
                live = await self._subject.measured(sides[side], list(wanted))
                known = [summary(records, self._objectives) for records in live]
                self._journal.add(question, known, time.monotonic() - began)
            runs[side].extend(known)
            pairs = zip(*runs, strict=False)
            race, turn = Race(tuple(plain["loss"] - other["loss"] for plain, other in pairs)), turn + 1
        return race, runs[1]
