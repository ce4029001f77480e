"""The options of `headway tune`. Without numpy, so that `--help` is quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from headway.bench.options import Claims
from headway.bench.start_command import check_placeholders, placeholders
from headway.engine.config import ModelOptions
from headway.flags import Flag
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.spec import WorkloadSpec
from headway.policy.step.options import SchedulingOptions
from headway.simulator.options import MaxConcurrency

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smh]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
DEFAULT_BUDGET = "20m"
TUNABLE = ("max_num_seqs", "max_num_batched_tokens")  # what the command of another server may have


def duration(text: str) -> float:
    """Seconds, from 90, 90s, 20m or 1.5h. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is not a duration; write one above 0, such as 90s, 20m or 1.5h")
    return float(match[1]) * _SECONDS[match[2]]


@dataclass(slots=True)
class TuneOptions:
    """All options of `headway tune`."""

    model_options: ModelOptions
    scheduling: SchedulingOptions
    arrivals: ArrivalFlags
    workload: WorkloadSpec
    claims: Claims
    model: Annotated[
        str | None, Flag("Folder of a checkpoint, or a Hugging Face id; default: the bundled model.", positional=True)
    ] = None
    max_concurrency: MaxConcurrency = None
    budget_s: Annotated[
        float,
        Flag(
            "Time after which no trial is begun, such as 90s, 20m or 1h. What an interrupted tuning took counts.",
            "--budget",
            panel="Tuning",
            parse=duration,
            default=DEFAULT_BUDGET,
            metavar="TIME",
            common=True,
        ),
    ] = 1200.0
    output: Annotated[
        Path,
        Flag(
            "Folder for config, report and journal. If it has the journal of an interrupted tuning, go on with that.",
            panel="Tuning",
            metavar="DIR",
            common=True,
        ),
    ] = Path("headway-tune")
    start: Annotated[
        str | None,
        Flag(
            "Tune another server with an OpenAI API: the command that starts it, with {port} and, where their values "
            "belong, {max_num_seqs}, {max_num_batched_tokens}.",
            panel="Tuning",
            metavar="COMMAND",
        ),
    ] = None
    ready_timeout_s: Annotated[
        float, Flag("Seconds for the model to load.", "--ready-timeout", panel="Deployment", min=1)
    ] = 900.0

    def __post_init__(self) -> None:
        if not self.claims.objectives:
            raise ValueError("tuning needs objectives; give --goodput, such as --goodput ttft:200 tpot:50")
        if self.start is not None:
            check_start(self.start)
            if self.model is not None:
                raise ValueError(f"the model is {self.model!r}, but --start COMMAND names its own; leave one out")


def check_start(start: str) -> None:
    """Raise ValueError where this is no command that can be tuned; one line."""
    check_placeholders(start, TUNABLE)
    if not placeholders(start) & set(TUNABLE):
        wanted = ", ".join(f"{{{name}}}" for name in TUNABLE)
        raise ValueError(f"--start has no setting to tune; write {wanted} where their values belong")
