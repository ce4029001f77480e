"""`headway tune`: baseline, ranking by simulation, paired live trials, and what is kept.

Steps of the baseline are recorded. With step times that are learnt from them, the simulator runs the same requests with
each candidate, so that only those that it expects something of are tried. A trial starts the server by turns with and
without the change, and sends both the same requests; it ends as soon as its verdict is clear (`race`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from headway.advisor.tuning.candidates import Prediction, candidates
from headway.advisor.tuning.journal import Journal
from headway.advisor.tuning.options import TuneOptions
from headway.advisor.tuning.race import LEAST_GAIN, MOST_PAIRS, Race, attainment, distances, furthest, loss
from headway.bench.interrupts import interrupts, unless_stopped
from headway.bench.options import Target
from headway.bench.profile.local_server import LocalServer
from headway.bench.runs import Load, is_made_up, load_of
from headway.bench.session import Session
from headway.changes import Change, applied, typed
from headway.load.measures.latencies import Latencies
from headway.load.record import RequestRecord
from headway.load.workload.arrivals import make_arrival
from headway.policy.step.options import SchedulingOptions
from headway.simulator.engine import Host
from headway.simulator.learnt import RecordedStep
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.verify import Measured, host_of, measure, recorded_steps, serve_flags, simulated

LEARN_SEEDS = (1_000_003, 1_000_033)  # added to the seed for the runs of the baseline
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
    """What a tuning found.

    Args:
        before, after: summaries of the runs of the configuration at the beginning and at the end.
        changes: what was kept, in order.
        left: predictions of the candidates that were not tried on top of what was kept, the best first.
        why: why no more was tried.
    """

    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    left: list[Prediction] = field(default_factory=list)
    why: str = ""


def run_tuning(options: TuneOptions, progress: Console) -> Tuned:
    """Tune. What was found until an interruption is in the journal.

    Raises:
        ValueError: bad input, or a server that does not start or answer; one line.
        Interrupted: Ctrl-C.
    """
    import uvloop

    journal = Journal(options.output / "journal.jsonl", _about(options))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Tuner(options, journal, progress).run())


def _about(options: TuneOptions) -> dict[str, Any]:
    """What two tunings must have in common to be one."""
    return {
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


class _Tuner:
    def __init__(self, options: TuneOptions, journal: Journal, progress: Console) -> None:
        self._options, self._journal, self._progress = options, journal, progress
        spec = options.workload
        arrival = make_arrival(options.arrivals, None if spec.mix else spec.dataset_name)
        self._load = load_of(dataclasses.replace(spec, arrival=arrival), options.max_concurrency)
        self._objectives = options.claims.objectives
        self._stop = asyncio.Event()
        self._learnt: tuple[Recording, list[RecordedStep], Host] | None = None
        self._device = ""

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
        found = []
        for change in candidates(now, self._device):
            if change.typed in tried or failures[change.field] >= MOST_FAILURES:
                continue
            question = f"simulated {typed(kept)} then {change.typed}"
            gains = self._journal.answer(question)
            if gains is None:
                self._status.update(f"Simulating {change.typed} ...")
                gains = await self._simulated_gains(now, applied(now, [change]))
                self._journal.add(question, gains)
            if gains:
                found.append(Prediction.of(change, gains))
        return sorted(found, key=lambda each: each.times, reverse=True)

    async def _simulated_gains(self, now: SchedulingOptions, then: SchedulingOptions) -> list[float]:
        """How much smaller the loss gets, for some seeds; none where the settings contradict each other."""
        try:
            return [
                await self._simulated_loss(now, seed) - await self._simulated_loss(then, seed)
                for seed in range(SIMULATED_SEEDS)
            ]
        except ValueError:
            return []

    async def _simulated_loss(self, scheduling: SchedulingOptions, seed: int) -> float:
        recording, steps, host = self._learnt or await self._learn()
        await unless_stopped(self._stop, asyncio.sleep(0))
        result = simulated(recording, steps, self._of_seed(seed), host, scheduling)
        return loss(distances(result.records, self._objectives))

    # --- live ------------------------------------------------------------------------------------------

    async def _baseline(self) -> list[dict[str, Any]]:
        known = self._journal.answer("baseline")
        if known is None:
            await self._learn()
            known = self._journal.answer("baseline")
        assert known is not None
        self._device = known["device"]
        runs: list[dict[str, Any]] = known["runs"]
        return runs

    async def _learn(self) -> tuple[Recording, list[RecordedStep], Host]:
        """Measure the configuration as it is, and learn how long its steps take."""
        began, file = time.monotonic(), self._options.output / "steps.jsonl"
        file.unlink(missing_ok=True)
        self._status.update("Measuring the baseline ...")
        runs = await self._live(self._options.scheduling, LEARN_SEEDS, "--record-steps", str(file))
        recording = read_recordings(file)[-1]
        steps = recorded_steps(recording, runs)
        self._learnt = recording, steps, host_of(recording, runs, steps)
        self._device = "cpu" if recording.engine.device == "cpu" else "cuda"
        if self._journal.answer("baseline") is None:
            told = [summary(each.result.records, self._objectives) for each in runs]
            self._journal.add("baseline", {"device": self._device, "runs": told}, time.monotonic() - began)
        return self._learnt

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
                live = await self._live(sides[side], list(wanted))
                known = [summary(each.result.records, self._objectives) for each in live]
                self._journal.add(question, known, time.monotonic() - began)
            runs[side].extend(known)
            pairs = zip(*runs, strict=False)
            race, turn = Race(tuple(plain["loss"] - other["loss"] for plain, other in pairs)), turn + 1
        return race, runs[1]

    async def _live(self, scheduling: SchedulingOptions, seeds: Sequence[int], *more: str) -> list[Measured]:
        """Start a server and let it answer the workload with each seed."""
        options = self._options
        named = [options.model] if options.model is not None else []
        arguments = [*named, *serve_flags(options.model_options, scheduling), *more]
        async with LocalServer(arguments, options.ready_timeout_s) as server:
            target = Target(base_url=server.startup.url)
            session = await unless_stopped(self._stop, Session.open(target, made_up=is_made_up(self._load.spec)))
            return [await measure(session, self._of_seed(seed), self._stop) for seed in seeds]

    def _of_seed(self, seed: int) -> Load:
        spec = dataclasses.replace(self._load.spec, seed=self._load.spec.seed + seed)
        return dataclasses.replace(self._load, spec=spec)
