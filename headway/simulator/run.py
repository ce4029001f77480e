"""A workload on a simulated server: the run of `headway simulate`, and what comes of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from headway.bench.client.load import collector_off
from headway.bench.interrupts import Interrupted
from headway.bench.jobs import carry_out, with_arrivals
from headway.bench.measures.server_metrics import over_time
from headway.bench.options import BenchOptions, Claims, Output, Sweep, Target
from headway.bench.record import ClientHealth, RunResult
from headway.bench.report.tables import sweep_table
from headway.bench.reporting import INTERRUPTED, Run, check_place, check_places
from headway.bench.runs import Load, Runner, load_of
from headway.bench.settings import settings_of_load
from headway.bench.tokens import load_tokenizer
from headway.bench.workload.arrival_flags import ArrivalFlags
from headway.bench.workload.build import Workload, build_workload
from headway.bench.workload.spec import WorkloadSpec
from headway.engine.config import SchedulingOptions
from headway.flags import Flag
from headway.policy.scheduler import Scheduler
from headway.report.console import print_table
from headway.report.parts import Section
from headway.simulator.answers import Answer
from headway.simulator.clients import BEGAN_NS, Clients
from headway.simulator.deployed import Deployed, ServerOptions, deploy
from headway.simulator.log import StepLog
from headway.simulator.prompts import CHARACTERS, SketchSource
from headway.simulator.server import Simulated, simulate
from headway.simulator.trace import write_trace
from headway.simulator.traffic import Arrival
from headway.simulator.what_if import COUNTERFACTUALS, WhatIf, parse_what_ifs, tail_table

_workload, _load = functools.partial(Flag, panel="Workload"), functools.partial(Flag, panel="Load")
_other = functools.partial(Flag, panel="What if")
MOST_POINTS = 2000  # of what is kept over time
SHOWN_EVERY = 500
Show = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """All of a `headway simulate`."""

    server: ServerOptions
    scheduling: SchedulingOptions
    arrivals: ArrivalFlags
    workload: WorkloadSpec
    tokenizer: Annotated[
        str | None,
        _workload(f"Tokenizer that measures texts. Default: {CHARACTERS} characters per token."),
    ] = None
    max_concurrency: Annotated[
        int | None, _load("Without a rate: clients of a closed loop. With a rate: limit of requests in flight.", min=1)
    ] = None
    find_max_rate: Annotated[bool, _load("Find the highest rate that meets --goodput.", "--find-max-rate")] = False
    sweep: Annotated[
        Sweep | None, _load("Simulate several loads: rate:1,2,4 (requests/s) or concurrency:1,8,64.", parse=Sweep.parse)
    ] = None
    what_ifs: Annotated[
        list[WhatIf],
        _other(
            "Simulate with other flags, too, as max-num-seqs=64 or hardware=H200,tensor-parallel-size=2. Repeatable.",
            "--what-if",
            parse=parse_what_ifs,
            repeated=True,
            metavar="FLAG=VALUE,...",
        ),
    ] = field(default_factory=list)
    explain_tail: Annotated[
        bool,
        _other("What the slowest requests would be without each cause of slowness.", "--explain-tail"),
    ] = False
    trace_output: Annotated[
        Path | None, _other("Write what the server did as a trace for Perfetto.", metavar="FILE")
    ] = None
    claims: Claims = field(default_factory=Claims)
    output: Output = field(default_factory=Output)

    def __post_init__(self) -> None:
        several = [self.find_max_rate, self.sweep is not None, bool(self.what_ifs), self.explain_tail]
        if sum(several) > 1:
            raise ValueError("--find-max-rate, --sweep, --what-if and --explain-tail exclude each other; give one")
        if self.trace_output is not None and any(several):
            raise ValueError("--trace-output is of one run; leave out --find-max-rate, --sweep, --what-if and the like")

    @property
    def asked(self) -> BenchOptions:
        """The same as the load generator has it. Raises BenchError where the arrivals make no sense."""
        options = BenchOptions(
            Target(),
            self.arrivals,
            self.workload,
            self.max_concurrency,
            find_max_rate=self.find_max_rate,
            sweep=self.sweep,
            stall_s=0.0,
            claims=self.claims,
            output=self.output,
        )
        return with_arrivals(options)


def run_simulation(options: SimulateOptions) -> int:
    """Simulate what was asked for, print what was found, write the results.

    Returns:
        The exit code: 0; 1 where of a run nothing or too little was answered; 130 when it was interrupted.

    Raises:
        ValueError: bad input; one line.
    """
    check_places(options.output)
    if options.trace_output is not None:
        check_place("--trace-output", options.trace_output)
    simulation = Simulation(options, Console(), Console(stderr=True))
    try:
        if options.what_ifs:
            return simulation.compare(options.what_ifs)
        if options.explain_tail:
            return simulation.explain_tail()
        return asyncio.run(carry_out(simulation))
    except Interrupted:
        simulation.progress.print("Stopped: nothing was simulated.")
        return INTERRUPTED


class Simulation(Runner):
    """Runs loads on simulated servers, each on one that nothing has come to."""

    def __init__(self, options: SimulateOptions, out: Console, progress: Console) -> None:
        super().__init__(options.asked, asyncio.Event(), out, progress)
        self.simulated = options
        self._tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        about = self._deploy().about
        self.title = f"headway simulate: {about['model']} on {about['hardware']}"

    def _deploy(self) -> Deployed:
        return deploy(self.simulated.server, self.simulated.scheduling)

    async def run(self, load: Load, label: str = "") -> Run:
        """As Runner.run(). Nothing in it waits."""
        return self.run_on(self._deploy(), load, label)

    def run_on(self, deployed: Deployed, load: Load, label: str = "") -> Run:
        """One run on this server."""
        with self.progress.status("Making prompts ...") as status, self.stoppable():
            context = deployed.scheduler.config.max_model_len
            workload = build_workload(load.spec, SketchSource(self._tokenizer), chat=False, context=context)
            total, named = len(workload.requests), f" {label}" if label else ""

            def show(ended: int) -> None:
                status.update(f"Simulating{named} ... {ended:,} of {total:,}")

            show(0)
            result, ran = simulated_run(self.simulated, deployed, load, workload, show)
            if self.simulated.trace_output is not None:
                write_trace(self.simulated.trace_output, ran)
                self.out.print(Text(f"Trace: {self.simulated.trace_output}", style="dim"), soft_wrap=True)
        return result, self.summarise(result, workload)

    def compare(self, what_ifs: list[WhatIf]) -> int:
        """The workload as asked, and with each change, in one table."""
        load, options = load_of(self.options.workload, self.options.max_concurrency), self.simulated
        servers = {"as asked": self._deploy()} | {
            each.text: each.deploy(options.server, options.scheduling) for each in what_ifs
        }
        runs = []
        for number, (name, deployed) in enumerate(servers.items(), start=1):
            runs.append(self.run_on(deployed, load, name))
            self.save(*runs[-1], number=number)
        claims = self.claims
        table = sweep_table(
            runs, "server", claims.attainment, claims.max_failed_share, intervals=False, names=list(servers)
        )
        print_table(self.out, table)
        self.report(runs[:1], extra=[Section("What if", tables=(table,))])
        return self.exit_code(runs[:1])

    def explain_tail(self) -> int:
        """The workload as asked, and what its slowest requests would have been without each cause."""
        load, options = load_of(self.options.workload, self.options.max_concurrency), self.simulated
        run = self.run_on(self._deploy(), load)
        others = {}
        for each in COUNTERFACTUALS:
            deployed = each.deploy(options.server, options.scheduling)
            others[each.title] = self.run_on(deployed, load, each.title)[0].records
        table = tail_table(run[0].records, others)
        self.print(*run)
        print_table(self.out, table)
        self.save(*run)
        self.report([run], extra=[Section("The tail", tables=(table,))])
        return self.exit_code([run])


def simulated_run(
    options: SimulateOptions, deployed: Deployed, load: Load, workload: Workload, show: Show | None = None
) -> tuple[RunResult, Simulated]:
    """One run of a workload, with all that is kept of it, and what the server did.

    Args:
        show: is told now and then how many requests have ended.
    """
    result, ran, clients = answer(deployed, load, workload, show)
    happened = {
        "never_due": len(workload.requests) - len(result.records),
        "waited_for_place": clients.waited_for_place,
        "longest_wait_ms": round(clients.longest_wait_ns / 1e6, 3),
    }
    result.settings = {
        "backend": "simulate",
        "model": deployed.about["model"],
        **settings_of_load(load.spec, workload, load.max_concurrency, options.claims, options.output),
        **{name: value for name, value in happened.items() if value},
    }
    result.server = deployed.about | {"metrics": metrics_of(ran, deployed.scheduler)}
    return result, ran


def answer(
    deployed: Deployed, load: Load, workload: Workload, show: Show | None = None
) -> tuple[RunResult, Simulated, Clients]:
    """Let a server answer a workload: what the load generator would have seen, what the server did, and who asked."""
    scheduler, seconds = deployed.scheduler, load.spec.duration_s
    clients = Clients(workload, scheduler.config.classes, load.mode, load.max_concurrency, seconds)
    ended = 0

    def after(answers: list[Answer]) -> list[Arrival]:
        nonlocal ended
        ended += 1
        if show is not None and ended % SHOWN_EVERY == 0:
            show(ended)
        return clients.after(answers)

    with collector_off():
        timing, limits, host = deployed.timing, deployed.limits, deployed.host
        ran = simulate(scheduler, clients.arrivals(), timing, limits, host, after, clients.sends)
    clients.give_up_waiting()
    records = sorted(clients.records, key=lambda record: record.index)
    ended_ns = max([BEGAN_NS, *(record.end_ns for record in records)])
    return RunResult({"seed": load.spec.seed}, records, BEGAN_NS, ended_ns, ClientHealth()), ran, clients


def metrics_of(ran: Simulated, scheduler: Scheduler) -> dict[str, Any]:
    """What the server did, under the keys of a live one's metrics (`server_metrics`), and how busy it was."""
    steps, prefixes = ran.steps, scheduler.blocks.prefix_stats
    answers = [answer for answer in ran.answers if answer.finish_reason is not None]
    reasons = [str(answer.finish_reason) for answer in answers]
    took_ns = np.asarray(steps.sampled_ns) - np.asarray(steps.planned_ns)
    stalls = scheduler.accounting.take_stalls()
    return {
        "prefix": "headway",
        "prompt_tokens": sum(answer.prompt_len for answer in answers if not answer.index),
        "generation_tokens": sum(len(answer.token_ns) for answer in answers),
        "preemptions": scheduler.num_preemptions,
        "prefix_cache": {
            "queries": prefixes.queries,
            "hits": prefixes.hits,
            "hit_rate": prefixes.hits / prefixes.queries if prefixes.queries else None,
        },
        "step": {
            "count": len(steps),
            "sum_s": float(took_ns.sum()) / 1e9,
            "mean_ms": float(took_ns.mean()) / 1e6 if len(steps) else None,
        },
        "requests_finished": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "stall_seconds": {str(phase): ns / 1e9 for phase, ns in sorted(stalls.items())},
        **over_time(gauges_of(steps, ran.ended_ns, scheduler.blocks.num_blocks)),
    }


def gauges_of(steps: StepLog, ended_ns: int, num_blocks: int) -> list[tuple[float, dict[str, float]]]:
    """What a live server's gauges would say at the end of each second of the run, or of as many as make MOST_POINTS.

    Returns:
        Seconds since the run began; and requests that run and wait, the share of the pool that is held, and the share
        of the time since the point before in which a step was under way.
    """
    length = max(1, -(-(ended_ns - BEGAN_NS) // (MOST_POINTS * 1_000_000_000))) * 1_000_000_000
    ends = np.arange(BEGAN_NS + length, ended_ns + length, length)
    begun, sampled = np.asarray(steps.planned_ns), np.asarray(steps.sampled_ns)
    done = np.searchsorted(sampled, ends, side="right")
    busy = np.concatenate([[0], np.cumsum(sampled - begun)])[done]
    under_way = done < len(steps)
    busy[under_way] += np.maximum(0, ends[under_way] - begun[done[under_way]])
    shares = np.diff(busy, prepend=0) / length
    found = []
    for end, last, share in zip(ends.tolist(), (done - 1).tolist(), shares.tolist(), strict=True):
        gauges = {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0}
        if last >= 0:
            gauges = {"running": steps.running[last], "waiting": steps.waiting[last]}
            gauges["kv_cache_usage"] = steps.blocks[last] / num_blocks
        found.append(((end - BEGAN_NS) / 1e9, gauges | {"utilisation": share}))
    return found
