"""The options of `headway simulate` and `headway simulate verify`. Without numpy, so that `--help` is quick."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from headway.bench.options import Claims, Output, Sweep
from headway.engine.config import ModelOptions
from headway.flags import Flag
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.spec import WorkloadSpec
from headway.policy.fleet.routing import SCORERS, routing
from headway.policy.fleet.scaling import ScalingRule
from headway.policy.step.options import SchedulingOptions
from headway.simulator.changes import WhatIf, parse_what_ifs
from headway.simulator.deployed import ServerOptions
from headway.simulator.fleet_file import FleetFile, read_fleet_file

CHARACTERS = 4  # per token, without a tokenizer
MOST_REPLICAS = 1_000
SCALE_DOWN_S = 300.0
_workload, _load = functools.partial(Flag, panel="Workload"), functools.partial(Flag, panel="Load")
_fleet = functools.partial(Flag, panel="Fleet")
_other = functools.partial(Flag, panel="What if")
MaxConcurrency = Annotated[
    int | None, _load("Without a rate: clients of a closed loop. With a rate: limit of requests in flight.", min=1)
]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """All options of `headway simulate`."""

    server: ServerOptions
    scheduling: SchedulingOptions
    arrivals: ArrivalFlags
    workload: WorkloadSpec
    tokenizer: Annotated[
        str | None,
        _workload(f"Tokenizer that measures texts. Default: {CHARACTERS} characters per token."),
    ] = None
    max_concurrency: MaxConcurrency = None
    find_max_rate: Annotated[bool, _load("Find the highest rate that meets --goodput.", "--find-max-rate")] = False
    max_search_seconds: Annotated[float, _load("Seconds after which --find-max-rate starts no further run.", min=1)] = (
        3600.0
    )
    sweep: Annotated[
        Sweep | None, _load("Simulate several loads: rate:1,2,4 (requests/s) or concurrency:1,8,64.", parse=Sweep.parse)
    ] = None
    replicas: Annotated[int, _fleet("Number of equal servers behind a router.", min=1, max=MOST_REPLICAS)] = 1
    routing: Annotated[
        str,
        _fleet(
            f"How the router chooses a server for each request: {', '.join(SCORERS)}, module:Class, or several with "
            "weights, such as prefix-hits=2,least-loaded.",
            parse=routing,
            default="least-loaded",
            metavar="SCORERS",
        ),
    ] = "least-loaded"
    max_replicas: Annotated[
        int | None, _fleet("Add replicas on demand, from --replicas up to this number.", min=1, max=MOST_REPLICAS)
    ] = None
    scale_at: Annotated[
        int | None,
        _fleet(
            "With --max-replicas: requests per replica (times n) to aim for. Default: half of --max-num-seqs.", min=1
        ),
    ] = None
    startup_s: Annotated[
        float,
        _fleet("Seconds until a started or restarted replica takes requests.", "--startup-seconds", min=0),
    ] = 60.0
    scale_down_s: Annotated[
        float | None,
        _fleet(
            f"With --max-replicas: stop a replica after this many idle seconds. Default: {SCALE_DOWN_S:g}.",
            "--scale-down-seconds",
            min=0,
        ),
    ] = None
    fleet: Annotated[
        FleetFile | None,
        _fleet(
            "TOML file with several kinds of replicas, which may fail or only compute prompts.",
            parse=read_fleet_file,
            metavar="FILE",
        ),
    ] = None
    find_replicas: Annotated[
        bool, _fleet("Find the smallest number of replicas that meets --goodput.", "--find-replicas")
    ] = False
    what_ifs: Annotated[
        list[WhatIf],
        _other(
            "Also simulate with other flags, such as max-num-seqs=64 or hardware=H200; may be repeated.",
            "--what-if",
            parse=parse_what_ifs,
            repeated=True,
            metavar="FLAG=VALUE,...",
        ),
    ] = field(default_factory=list)
    explain_tail: Annotated[
        bool,
        _other("Show how long the slowest requests take without each cause of slowness.", "--explain-tail"),
    ] = False
    trace_output: Annotated[
        Path | None, _other("Write a trace of the simulated server for Perfetto.", metavar="FILE")
    ] = None
    claims: Claims = field(default_factory=Claims)
    output: Output = field(default_factory=Output)

    def __post_init__(self) -> None:
        several = [
            self.find_max_rate,
            self.find_replicas,
            self.sweep is not None,
            bool(self.what_ifs),
            self.explain_tail,
        ]
        if sum(several) > 1:
            raise ValueError(
                "--find-max-rate, --find-replicas, --sweep, --what-if and --explain-tail exclude each other; give one"
            )
        if self.find_replicas and (self.replicas > 1 or self.max_replicas is not None):
            raise ValueError("--find-replicas searches the number of replicas; leave out --replicas and --max-replicas")
        if self.fleet is not None and (self.replicas > 1 or self.max_replicas is not None or self.find_replicas):
            raise ValueError("--fleet defines the replicas; leave out --replicas, --max-replicas and --find-replicas")
        for flag, value in (("--scale-at", self.scale_at), ("--scale-down-seconds", self.scale_down_s)):
            if value is not None and self.max_replicas is None:
                raise ValueError(f"{flag} needs --max-replicas")
        if self.explain_tail and self.server.scheduler_profile == "static":
            raise ValueError("--explain-tail changes a scheduler, which --scheduler-profile static has none of")
        self.scaling_rule()
        if self.trace_output is not None and any(several):
            raise ValueError("--trace-output needs a single run; leave out --sweep, --find-max-rate and the like")

    def scaling_rule(self) -> ScalingRule | None:
        """None where the replicas stay as they are. Raises ValueError where the flags make no sense."""
        if self.max_replicas is None:
            return None
        at = self.scale_at or max(1, self.scheduling.max_num_seqs // 2)
        down_s = SCALE_DOWN_S if self.scale_down_s is None else self.scale_down_s
        return ScalingRule(self.replicas, self.max_replicas, at, down_s)


@dataclass(slots=True)
class VerifyOptions:
    """All options of `headway simulate verify`."""

    model_options: ModelOptions
    scheduling: SchedulingOptions
    arrivals: ArrivalFlags
    workload: WorkloadSpec
    model: Annotated[
        str | None,
        Flag("Folder of a checkpoint, or a Hugging Face id; default: the bundled model.", positional=True),
    ] = None
    max_concurrency: MaxConcurrency = None
    rounds: Annotated[
        int,
        _load("Measured runs. Each lies between two runs to learn from; more rounds make intervals smaller.", min=1),
    ] = 1
    ready_timeout_s: Annotated[
        float, Flag("Seconds for the model to load.", "--ready-timeout", panel="Deployment", min=1)
    ] = 900.0
    output: Annotated[Path | None, Flag("Write the comparison as JSON.", panel="Results", metavar="FILE")] = None
