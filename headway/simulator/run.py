"""A workload on a simulated server: the run of `headway simulate`, and what comes of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from headway.bench.client.load import collector_off
from headway.bench.jobs import sweep_loads, with_arrivals
from headway.bench.measures.server_metrics import over_time
from headway.bench.options import BenchOptions, Claims, Output, Sweep, Target
from headway.bench.record import ClientHealth, RunResult
from headway.bench.report.console import print_runs
from headway.bench.reporting import Reporting, Run, check_places
from headway.bench.runs import Load, load_of
from headway.bench.settings import settings_of_load
from headway.bench.tokens import load_tokenizer
from headway.bench.workload.arrival_flags import ArrivalFlags
from headway.bench.workload.build import Workload, build_workload
from headway.bench.workload.spec import WorkloadSpec
from headway.engine.config import SchedulingOptions
from headway.flags import Flag
from headway.policy.scheduler import Scheduler
from headway.simulator.clients import BEGAN_NS, Clients
from headway.simulator.deployed import Deployed, ServerOptions, deploy
from headway.simulator.log import StepLog
from headway.simulator.prompts import CHARACTERS, SketchSource
from headway.simulator.server import Answer, Simulated, simulate
from headway.simulator.traffic import Arrival
from headway.text.tokenizer import Tokenizer

_workload, _load = functools.partial(Flag, panel="Workload"), functools.partial(Flag, panel="Load")
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
        _workload(f"Folder or Hugging Face id of what measures texts. Default: {CHARACTERS} characters a token."),
    ] = None
    max_concurrency: Annotated[
        int | None, _load("Without a rate: users of a closed loop. With a rate: most requests in flight.", min=1)
    ] = None
    sweep: Annotated[
        Sweep | None, _load("Simulate each of rate:1,2,4 (requests/s) or concurrency:1,8,64.", parse=Sweep.parse)
    ] = None
    claims: Claims = field(default_factory=Claims)
    output: Output = field(default_factory=Output)


def run_simulation(options: SimulateOptions) -> int:
    """Simulate what was asked for, print what was found, write the results.

    Returns:
        The exit code: 0, or 1 where of a run nothing or too little was answered.

    Raises:
        ValueError: bad input; one line.
    """
    check_places(options.output)
    reporting = Reporting(options.claims, options.output, asyncio.Event(), Console(), Console(stderr=True))
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    about = deploy(options.server, options.scheduling).about
    title = f"headway simulate: {about['model']} on {about['hardware']}"
    asked = with_arrivals(
        BenchOptions(Target(), options.arrivals, options.workload, options.max_concurrency, sweep=options.sweep)
    )
    if asked.sweep is None:
        runs = [_run(options, load_of(asked.workload, asked.max_concurrency), tokenizer, reporting)]
        reporting.save(*runs[0])
        reporting.print(*runs[0])
    else:
        runs = []
        for number, load in enumerate(sweep_loads(asked), start=1):
            runs.append(_run(options, load, tokenizer, reporting))
            reporting.save(*runs[-1], number=number)
        claims = options.claims
        results, summaries = zip(*runs, strict=True)
        print_runs(reporting.out, results, summaries, target=claims.attainment, most_failed=claims.max_failed_share)
    reporting.report(runs, title=title)
    return reporting.exit_code(runs)


def _run(options: SimulateOptions, load: Load, tokenizer: Tokenizer | None, reporting: Reporting) -> Run:
    """One run, on a server that nothing has come to."""
    with reporting.progress.status("Making prompts ...") as status:
        workload = build_workload(load.spec, SketchSource(tokenizer), chat=False)
        total = len(workload.requests)

        def show(ended: int) -> None:
            status.update(f"Simulating ... {ended:,} of {total:,}")

        show(0)
        deployed = deploy(options.server, options.scheduling)
        result = simulated_run(options, deployed, load, workload, show)
    return result, reporting.summarise(result, workload)


def simulated_run(
    options: SimulateOptions, deployed: Deployed, load: Load, workload: Workload, show: Show | None = None
) -> RunResult:
    """One run of a workload, with all that is kept of it.

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
    return result


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
