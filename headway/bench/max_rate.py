"""`--find-max-rate`: the search of measures/search.py, with a run for a probe."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
from rich.text import Text

from headway.bench.client.load import LoadMode
from headway.bench.interrupts import Interrupted
from headway.bench.options import Claims
from headway.bench.report import verdict
from headway.bench.report.console import print_runs, print_search
from headway.bench.report.search import search_json, search_section
from headway.bench.reporting import NOT_VALID, Run
from headway.bench.runs import RATED, Load, Runner, at_rate
from headway.load.errors import BenchError
from headway.load.measures.search import SearchOptions, SearchResult, Stop, find_max_rate
from headway.load.measures.slo import goals_of, slowness
from headway.load.measures.steady import falls_behind
from headway.load.measures.trials import ProbeOutcome, Trial
from headway.load.record import RunResult
from headway.load.workload.mix import load_mix
from headway.load.workload.spec import WorkloadSpec

PROBE_REQUESTS, PROBE_S = 400, 60.0  # the fewest requests of a probe, and how long one may last for more of them
FIRST_LOOK_USERS, FIRST_LOOK_REQUESTS = 16, 48
NOTHING = np.empty(0)


async def search(bench: Runner) -> int:
    """Look for the highest rate that holds the objectives; print, save and report it. Returns the exit code.

    Raises:
        BenchError: there are no objectives, or an arrival process without one rate.
    """
    _check(bench)
    prober = Prober(bench)
    start = bench.options.workload.arrival.mean_rate if bench.options.workload.arrival is not None else None
    start = start if start is not None else await prober.first_look()
    claims = bench.options.claims
    found = await find_max_rate(
        prober.probe,
        start,
        SearchOptions(
            target=claims.attainment, max_seconds=bench.options.max_search_seconds, stall_s=bench.options.stall_s
        ),
        on_trial=prober.say,
    )
    if prober.runs and bench.output.verbose:
        print_runs(bench.out, prober.runs, claims)
    print_search(bench.out, found, claims.attainment)
    prober.save(found)
    bench.report(prober.runs, extra=[search_section(found, claims.attainment)])
    if found.rate is None or found.stop is Stop.INVALID:
        return bench.exit_code([]) or NOT_VALID
    return bench.exit_code([])


def _check(bench: Runner) -> None:
    options = bench.options
    if not has_objectives(options.claims, options.workload):
        raise BenchError("--find-max-rate needs objectives; give --goodput, such as --goodput ttft:200 tpot:50")
    if options.sweep is not None:
        raise BenchError("--find-max-rate and --sweep contradict each other; give one")
    arrival = options.workload.arrival
    if arrival is not None and (not isinstance(arrival, RATED) or math.isinf(arrival.rate)):
        raise BenchError("--find-max-rate needs arrivals with a constant rate: poisson, gamma or constant")


def has_objectives(claims: Claims, workload: WorkloadSpec) -> bool:
    """Whether there are objectives, of all requests or of classes. Raises BenchError where a mix cannot be read."""
    of_classes = [each.objectives for each in load_mix(workload.mix).classes] if workload.mix is not None else []
    return any([claims.objectives, *of_classes])


def outcome_of(result: RunResult, rate: float) -> ProbeOutcome:
    """What a run says of how far objectives are met."""
    behind = falls_behind(result.records)
    doubts = ["it was interrupted"] if result.interrupted else []
    return ProbeOutcome(
        rate=rate,
        slowness=slowness(result.records, goals_of(result.settings)),
        steady=not behind,
        valid=not doubts,
        reason="; ".join([*doubts, *([behind] if behind else [])]),
    )


class Prober:
    """Measures at one rate after another, each time with new arrivals, lengths and prompts, and keeps the runs.

    Probes at one rate are pooled: with the same arrivals they would be the same sample again.
    """

    def __init__(self, bench: Runner) -> None:
        self.bench = bench
        self.runs: list[Run] = []
        self._rates: list[float] = []
        self._paths: list[Path] = []
        self._made = 0

    async def first_look(self) -> float:
        """A rate to start at: half of what a few users in a closed loop get."""
        base = self.bench.options.workload
        spec = dataclasses.replace(base, num_prompts=FIRST_LOOK_REQUESTS, duration_s=None, users=FIRST_LOOK_USERS)
        result, summaries = await self.bench.run(Load(spec, LoadMode.CLOSED, FIRST_LOOK_USERS), "a first look")
        self._made += 1
        rate = summaries[0].rates["request_throughput"] / 2
        if self.bench.stop.is_set():
            raise Interrupted
        if not rate > 0:
            kinds = ", ".join(f"{kind}: {message}" for kind, _, message in verdict.failures_by_kind(result))
            raise BenchError(
                f"the first requests were not answered ({kinds}); check the server, or give a start with --request-rate"
            )
        return float(f"{rate:.2g}")

    async def probe(self, rate: float, wanted: int) -> ProbeOutcome:
        options = self.bench.options
        spec = dataclasses.replace(options.workload, seed=options.workload.seed + self._made)
        if spec.num_prompts is None and spec.duration_s is None:
            most = max(PROBE_REQUESTS, round(rate * PROBE_S))
            spec = dataclasses.replace(spec, num_prompts=min(max(wanted, PROBE_REQUESTS), most))
        load = at_rate(options, spec, rate)
        try:
            run = await self.bench.run(load, f"{rate:.4g} requests/s")
        except Interrupted:
            return ProbeOutcome(rate, NOTHING, valid=False, reason="it was interrupted")
        except BenchError as error:
            if not self.runs:
                raise
            return ProbeOutcome(rate, NOTHING, valid=False, reason=str(error))
        self._made += 1
        self.runs.append(run)
        self._rates.append(rate)
        if self.bench.keeps_probes and (path := self.bench.write(run, len(self.runs))):
            self._paths.append(path)
        result = run[0]
        return dataclasses.replace(
            outcome_of(result, rate),
            offered=not result.client.bound,
            client="; ".join(result.client.reasons) or self._client_delays(run),
        )

    def _client_delays(self, run: Run) -> str:
        """The figures of the objectives that this client may have made more than a tenth of; "" for none."""
        result, summaries = run
        if not result.records:
            return ""
        limits = goals_of(result.settings).values()
        judged = {verdict.METRIC_NAMES[f"{name}_ms"] for each in limits for name in each}
        found = [name for name in verdict.spoilt_figures(summaries) if name.split()[0] in judged]
        return f"its own delays may be more than 10 % of {', '.join(found)}" if found else ""

    def save(self, found: SearchResult) -> None:
        """Say where the results of the probes are. If they were not kept, save the last run at the rate found."""
        if self.bench.keeps_probes:
            if self._paths:
                many = f" to {self._paths[-1].name} ({len(self._paths)} files)" if len(self._paths) > 1 else ""
                self.bench.out.print(Text(f"Results: {self._paths[0]}{many}", style="dim"), soft_wrap=True)
            return
        at = [place for place, rate in enumerate(self._rates) if rate in (found.rate, found.likely)]
        if self.runs:
            self.bench.save(self.runs[at[-1] if at else -1], more={"search": search_json(found)})

    def say(self, trial: Trial) -> None:
        if not (self.bench.keeps_probes or self.bench.output.verbose):
            return
        self.bench.progress.print(
            f"{trial.rate:.4g} requests/s: {trial.met} of {trial.total} met their objectives, {trial.verdict}",
            highlight=False,
        )
