"""A workload on a simulated server: the run of `headway simulate`, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from headway.bench.client.load import collector_off
from headway.bench.interrupts import Interrupted
from headway.bench.jobs import carry_out, with_arrivals
from headway.bench.max_rate import has_objectives, outcome_of
from headway.bench.options import BenchOptions, Target
from headway.bench.report.tables import sweep_table
from headway.bench.reporting import INTERRUPTED, NOT_VALID, Run, check_place, check_places
from headway.bench.runs import Load, Runner, load_of
from headway.bench.settings import settings_of_load
from headway.bench.tokens import load_tokenizer
from headway.load.measures.trials import ProbeOutcome
from headway.load.record import ClientHealth, RunResult
from headway.load.workload.arrivals import AllAtOnce
from headway.load.workload.build import Workload, build_workload
from headway.planner.models import names_taken
from headway.planner.words import letter
from headway.policy.admission.quota import TOTAL
from headway.policy.fleet.routing import router_of
from headway.policy.fleet.scaling import Scaler
from headway.report.console import print_table
from headway.report.parts import Section
from headway.simulator.answers import Answer
from headway.simulator.changes import WhatIf
from headway.simulator.clients import BEGAN_NS, Clients
from headway.simulator.deployed import Deployed, deploy
from headway.simulator.fleet import Failure, Fleet, Replica, Scaling
from headway.simulator.members import Deploy, Kind, Member, about_kinds, members, named, price_of_all
from headway.simulator.metrics import metrics_of
from headway.simulator.options import SimulateOptions
from headway.simulator.prompts import SketchSource
from headway.simulator.replicas import fewest_replicas, replicas_table
from headway.simulator.server import Server
from headway.simulator.trace import write_trace
from headway.simulator.traffic import Arrival
from headway.simulator.what_if import COUNTERFACTUALS, tail_table

SHOWN_EVERY = 500
Show = Callable[[int], None]


def run_simulation(options: SimulateOptions) -> int:
    """Simulate what was asked for, print what was found, write the results.

    Returns:
        The exit code: 0; 1 where of a run nothing or too little was answered; 130 when it was interrupted.

    Raises:
        ValueError: bad input; one line.
    """
    if options.find_replicas and not has_objectives(options.claims, options.workload):
        raise ValueError("--find-replicas needs objectives; give --goodput, such as --goodput ttft:200 tpot:50")
    check_places(options.output)
    if options.trace_output is not None:
        check_place("--trace-output", options.trace_output)
    simulation = Simulation(options, Console(), Console(stderr=True))
    try:
        if options.what_ifs:
            return simulation.compare(options.what_ifs)
        if options.explain_tail:
            return simulation.explain_tail()
        if options.find_replicas:
            return simulation.find_replicas()
        return asyncio.run(carry_out(simulation))
    except Interrupted:
        simulation.progress.print("Stopped: nothing was simulated.")
        return INTERRUPTED


def _asked(options: SimulateOptions) -> BenchOptions:
    """The same load as options of the load generator. Raises BenchError if the arrivals make no sense."""
    asked = BenchOptions(
        Target(),
        options.arrivals,
        options.workload,
        options.max_concurrency,
        find_max_rate=options.find_max_rate,
        sweep=options.sweep,
        max_search_seconds=options.max_search_seconds,
        stall_s=0.0,
        claims=options.claims,
        output=options.output,
    )
    return with_arrivals(asked)


class Simulation(Runner):
    """Runs loads on simulated servers, each on one that nothing has come to."""

    keeps_probes = False

    def __init__(self, options: SimulateOptions, out: Console, progress: Console) -> None:
        super().__init__(_asked(options), asyncio.Event(), out, progress)
        self.simulated = options
        self._tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        servers = self._members(deploy, one_of_each=True)
        self.title = f"headway simulate: {named(servers)}"
        asked, about = options.server, servers[0].deployed.about
        said = names_taken(asked.model, about["model"], asked.hardware, about["hardware"])
        if said and options.fleet is None:  # a fleet's file may name other hardware
            progress.print(Text(said), soft_wrap=True)

    def _members(self, how: Deploy, replicas: int | None = None, one_of_each: bool = False) -> list[Member]:
        """The servers that were asked for, or so many, each deployed like this; or one of each kind."""
        asked = self.simulated
        kinds = asked.fleet.kinds if asked.fleet is not None else (Kind(replicas or asked.replicas),)
        return members(kinds, how, asked.server, asked.scheduling, one_of_each)

    async def run(self, load: Load, label: str = "") -> Run:
        """Do what Runner.run() promises. Nothing in this waits."""
        return self.run_on(deploy, load, label)

    def run_on(self, how: Deploy, load: Load, label: str = "", replicas: int | None = None) -> Run:
        """One run on servers that are deployed like this; None is as many as were asked for."""
        servers, asked = self._members(how, replicas), self.simulated
        with self.progress.status("Making prompts ...") as status, self.stoppable():
            context = min(each.deployed.scheduler.config.max_model_len for each in servers)
            workload = build_workload(load.spec, SketchSource(self._tokenizer), chat=False, context=context)
            _check_tenants(workload, servers[0].deployed)
            total, named = len(workload.requests), f" {label}" if label else ""

            def show(ended: int) -> None:
                status.update(f"Simulating{named} ... {ended:,} of {total:,}")

            show(0)
            rule, scaling = asked.scaling_rule(), None
            if rule is not None:
                startup_ns, timing = round(asked.startup_s * 1e9), servers[0].deployed.timing
                make = servers[0].make
                scaling = Scaling(Scaler(rule), lambda: replace(make(), timing=timing).server(), startup_ns)
            result, fleet = simulated_run(asked, servers, load, workload, show, scaling)
            if asked.trace_output is not None:
                write_trace(asked.trace_output, fleet)
                self.out.print(Text(f"Trace: {asked.trace_output}", style="dim"), soft_wrap=True)
        return result, self.summarise(result, workload.notes, result.server["price_per_hour"])

    def compare(self, what_ifs: list[WhatIf]) -> int:
        """The workload as asked, and with each change, in one table."""
        load = load_of(self.options.workload, self.options.max_concurrency)
        servers: dict[str, Deploy] = {"as asked": deploy} | {each.text: each.deploy for each in what_ifs}
        for how in servers.values():
            self._members(how, one_of_each=True)  # what cannot be is said before the first run
        runs = []
        for number, (name, how) in enumerate(servers.items(), start=1):
            runs.append(self.run_on(how, load, name))
            self.save(runs[-1], number)
        letters = [letter(place) for place in range(len(runs))]
        legend = tuple(f"{each}  {name}" for each, name in zip(letters, servers, strict=True))
        table = sweep_table(runs, "", self.claims, intervals=False, names=letters)
        for line in legend:
            self.out.print(Text(line), soft_wrap=True)
        print_table(self.out, table)
        self.report(runs[:1], extra=[Section("What if", paragraphs=legend, tables=(table,))])
        return self.exit_code(runs[:1])

    def explain_tail(self) -> int:
        """The workload as asked, and what its slowest requests would have been without each cause."""
        load = load_of(self.options.workload, self.options.max_concurrency)
        run = self.run_on(deploy, load)
        others = {title: self.run_on(how, load, title)[0].records for title, how in COUNTERFACTUALS.items()}
        table = tail_table(run[0].records, others)
        self.print(run)
        print_table(self.out, table)
        self.save(run)
        self.report([run], extra=[Section("The tail", tables=(table,))])
        return self.exit_code([run])

    def find_replicas(self) -> int:
        """Look for the fewest replicas that hold the objectives, each number with several seeds."""
        runs: list[Run] = []

        def probe(replicas: int, seed: int) -> ProbeOutcome:
            spec = replace(self.options.workload, seed=self.options.workload.seed + seed)
            load = load_of(spec, self.options.max_concurrency)
            runs.append(self.run_on(deploy, load, f"{replicas} replicas", replicas))
            return outcome_of(runs[-1][0], 0.0)

        found = fewest_replicas(probe, self.claims.attainment)
        at_once = isinstance(load_of(self.options.workload, self.options.max_concurrency).spec.arrival, AllAtOnce)
        table = replicas_table(found, self.simulated.claims.price_per_hour, at_once)
        print_table(self.out, table)
        of_fewest = [run for run in runs if run[0].server["replicas"] == found.fewest]
        chosen = (of_fewest or runs)[-1:]
        self.save(chosen[0])
        self.report(chosen, extra=[Section("Replicas", tables=(table,))])
        return self.exit_code([]) if found.fewest is not None else NOT_VALID


def simulated_run(
    options: SimulateOptions,
    servers: Sequence[Member],
    load: Load,
    workload: Workload,
    show: Show | None = None,
    scaling: Scaling | None = None,
) -> tuple[RunResult, Fleet]:
    """One run of a workload, with all that is kept of it, and the servers when it is over.

    Args:
        show: is told now and then how many requests have ended.
    """
    about, file = servers[0].deployed.about, options.fleet
    failures = file.failures_of(BEGAN_NS, options.startup_s, load.spec.seed) if file is not None else ()
    replicas = [each.replica() for each in servers]
    result, fleet, clients = answer(replicas, load, workload, show, options.routing, scaling, failures)
    happened = {
        "never_due": len(workload.requests) - len(result.records),
        "waited_for_place": clients.waited_for_place,
        "longest_wait_ms": round(clients.longest_wait_ns / 1e6, 3),
    }
    result.settings = {
        "backend": "simulate",
        "model": about["model"],
        **settings_of_load(load.spec, workload, load.max_concurrency, options.claims, options.output),
        **{name: value for name, value in happened.items() if value},
    }
    hours = [each.lasted_ns(result.began_ns, result.ended_ns) / 3600e9 for each in fleet.replicas]
    of_fleet = {
        "replicas": len(fleet.replicas),
        "replica_hours": sum(hours),
        "routing": options.routing,
        "routed": [replica.routed for replica in fleet.replicas],
        "failures": [replica.failures for replica in fleet.replicas],
        "price_per_hour": price_of_all(servers, hours, result.duration_s, options.claims.price_per_hour),
        "kinds": about_kinds(servers),
    }
    result.server = about | of_fleet | {"metrics": metrics_of(fleet)}
    return result, fleet


def answer(
    servers: Sequence[Server | Replica],
    load: Load,
    workload: Workload,
    show: Show | None = None,
    routing: str = "round-robin",
    scaling: Scaling | None = None,
    failures: Iterable[Failure] = (),
) -> tuple[RunResult, Fleet, Clients]:
    """Let servers answer a workload: what the load generator would have seen, what they did, and who asked."""
    first = servers[0]
    classes = (first.server if isinstance(first, Replica) else first).scheduler.config.classes
    seconds = load.spec.duration_s
    clients = Clients(workload, classes, load.mode, load.max_concurrency, seconds)
    ended = 0

    def after(answers: list[Answer]) -> list[Arrival]:
        nonlocal ended
        ended += 1
        if show is not None and ended % SHOWN_EVERY == 0:
            show(ended)
        return clients.after(answers)

    fleet = Fleet(servers, router_of(routing, classes), after, clients.sends, scaling, failures)
    with collector_off():
        fleet.run(clients.arrivals())
    clients.give_up_waiting()
    records = sorted(clients.records, key=lambda record: record.index)
    ended_ns = max([BEGAN_NS, *(record.end_ns for record in records)])
    return RunResult({"seed": load.spec.seed}, records, BEGAN_NS, ended_ns, ClientHealth()), fleet, clients


def _check_tenants(workload: Workload, server: Deployed) -> None:
    """Raises ValueError where a request is of a tenant that the server's file does not have."""
    known = (server.quotas.meters.keys() if server.quotas is not None else set()) - {TOTAL}
    for name in sorted({request.tenant for request in workload.requests} - known - {""}) if known else ():
        raise ValueError(
            f"the workload has requests of tenant {name!r}, but --tenants only has {', '.join(sorted(known))}"
        )
