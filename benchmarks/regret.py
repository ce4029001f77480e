"""How far from the best settings a search ends, by how many runs it has had: `headway tune` beside others.

    python -m benchmarks.regret [--worlds chat] [--repeats 3] [--output FILE]

Nothing is live: a world is a server on the simulator's clock, whose steps take as long as the cost model says of its
hardware, off by a tenth here and there and with noise. `tune` ranks by a simulation that is off by another tenth and is
not told so. All others see the results of runs alone: random search, Optuna's TPE (pip install optuna; left out without
it), and a sweep of sequences by tokens as vLLM's auto_tune script makes it. Regret is how much larger the loss of what
was chosen is than the smallest of the whole grid, without noise; the loss is a logarithm, so 0.05 is 5 % of a latency.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import RESULTS, heading, save
from headway.advisor.tuning.candidates import BUDGETS, POLICIES, STALLS_MS
from headway.advisor.tuning.options import TuneOptions
from headway.advisor.tuning.race import distances, loss
from headway.advisor.tuning.subjects import LEARN_SEEDS, Records, Subject
from headway.advisor.tuning.tune import Tuned, Tuner
from headway.bench.journal import Journal
from headway.bench.options import Claims
from headway.bench.runs import load_of
from headway.changes import applied
from headway.cost.efficiency import Efficiency
from headway.engine.config import ModelOptions
from headway.load.workload.arrival_flags import ArrivalFlags
from headway.load.workload.arrivals import make_arrival
from headway.load.workload.build import build_workload
from headway.load.workload.spec import WorkloadSpec
from headway.policy.step.accounting import StepTimes
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.step_time import StepWork
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.prompts import SketchSource
from headway.simulator.run import answer
from headway.simulator.timing import Predicted

SEQS = (8, 16, 32, 64, 128, 256, 512, 1024)
SWEPT = tuple(itertools.product((128, 256), (512, 1024, 2048, 4096)))
OFF, NOISE = 0.1, 0.05  # standard deviations of logarithms: of what the cost model is off by, and of a step
EVALUATED = (7_000_003, 7_000_033)  # seeds for the loss without noise
RUNS = (4, 8, 16, 32, 64)
_GIVEN = frozenset({"max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "max_prefill_stall_ms"})


@dataclass(frozen=True)
class World:
    """A server under a load, with settings to begin with.

    Args:
        rate: requests/s, by Poisson.
        objectives: milliseconds.
    """

    model: str
    hardware: str
    devices: int
    lengths: tuple[int, int]
    rate: float
    objectives: dict[str, float]
    seqs: int = 16
    budget: int = 512
    prompts: int = 64


WORLDS = {
    "chat": World("llama-3.1-8b", "H100-SXM", 1, (512, 128), 16.0, {"ttft": 200.0, "tpot": 15.0}),
    "long prompts": World("llama-3.1-8b", "H100-SXM", 1, (6000, 64), 3.0, {"ttft": 1000.0, "tpot": 25.0}, 256, 8192),
    "large model": World("llama-3.1-70b", "H100-SXM", 4, (1024, 128), 6.0, {"ttft": 500.0, "tpot": 30.0}, 8, 2048),
    "small GPU": World("qwen2.5-7b", "L4", 1, (512, 64), 4.0, {"ttft": 1000.0, "tpot": 80.0}, 512, 512),
}


@dataclass(slots=True)
class Jittered:
    """Another timing, in which the forward pass of each step takes a little more or less."""

    timing: Predicted
    chance: random.Random

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return self._noisy(self.timing.times(plan, now))

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self._noisy(self.timing.decode_times(work, contexts, now))

    def _noisy(self, exact: StepTimes) -> StepTimes:
        more_ns = round((exact.computed_ns - exact.launched_ns) * math.expm1(self.chance.gauss(0.0, NOISE)))
        return StepTimes(exact.launched_ns, exact.computed_ns + more_ns, exact.sampled_ns + more_ns)


class Simulated(Subject):
    """What it measures is the truth with noise, and what it simulates is off.

    Args:
        number: of the repeat; it decides what the cost model is off by.
    """

    def __init__(self, world: World, number: int) -> None:
        self.device, self.world, self.runs = "cuda", world, 0
        self.tunable: frozenset[str] | None = None
        chance = random.Random(f"{world} {number}")
        self._truth, self._belief = _off(chance), _off(chance)
        self._losses: dict[str, float] = {}
        self._simulated: dict[tuple[str, int], Records] = {}
        self._load = load_of(
            WorkloadSpec(
                num_prompts=world.prompts,
                random_input_len=world.lengths[0],
                random_output_len=world.lengths[1],
                random_range_ratio=0.5,
                arrival=make_arrival(ArrivalFlags(request_rate=world.rate), "random"),
            ),
            None,
        )

    async def learn(self) -> list[Records]:
        return await self.measured(start(self.world), LEARN_SEEDS)

    async def measured(self, scheduling: SchedulingOptions, seeds: Sequence[int]) -> list[Records]:
        self.runs += len(seeds)
        noise = [random.Random(f"{self.runs} {seed}") for seed in seeds]
        return [self._run(scheduling, seed, self._truth, each) for seed, each in zip(seeds, noise, strict=True)]

    async def simulated(self, scheduling: SchedulingOptions, seed: int) -> Records | None:
        key = repr(scheduling), seed
        if key not in self._simulated:
            self._simulated[key] = self._run(scheduling, seed, self._both)
        return self._simulated[key]

    def loss(self, records: Records) -> float:
        return loss(distances(records, self.world.objectives))

    def true_loss(self, scheduling: SchedulingOptions) -> float:
        """The loss without noise."""
        key = repr(scheduling)
        if key not in self._losses:
            runs = (self._run(scheduling, seed, self._truth) for seed in EVALUATED)
            self._losses[key] = statistics.fmean(map(self.loss, runs))
        return self._losses[key]

    def _both(self, efficiency: Efficiency) -> Efficiency:
        return self._belief(self._truth(efficiency))

    def _run(
        self,
        scheduling: SchedulingOptions,
        seed: int,
        off: Callable[[Efficiency], Efficiency],
        noise: random.Random | None = None,
    ) -> Records:
        options = ServerOptions(
            model=self.world.model,
            hardware=self.world.hardware,
            tensor_parallel_size=self.world.devices,
            given=_GIVEN,
        )
        deployed = deploy(options, scheduling)
        assert deployed.deployment is not None
        timing = Predicted(replace(deployed.deployment, efficiency=off(deployed.deployment.efficiency)))
        server = replace(deployed, timing=timing if noise is None else Jittered(timing, noise)).server()
        load = replace(self._load, spec=replace(self._load.spec, seed=seed))
        workload = build_workload(load.spec, SketchSource(None), chat=False, context=deployed.about["max_model_len"])
        return answer([server], load, workload)[0].records


def _off(chance: random.Random) -> Callable[[Efficiency], Efficiency]:
    """What makes a cost model wrong in some of its figures."""
    times = {name: math.exp(chance.gauss(0.0, OFF)) for name in ("matmul_bytes", "kv_bytes", "step_s", "sequence_s")}
    flops = math.exp(chance.gauss(0.0, OFF))

    def made(efficiency: Efficiency) -> Efficiency:
        values: dict[str, Any] = {name: getattr(efficiency, name) * factor for name, factor in times.items()}
        values["matmul_flops"] = {name: share * flops for name, share in efficiency.matmul_flops.items()}
        return replace(efficiency, **values)

    return made


def start(world: World) -> SchedulingOptions:
    """The settings to begin with."""
    return SchedulingOptions(max_num_seqs=world.seqs, max_num_batched_tokens=world.budget)


def grid(world: World) -> Iterator[SchedulingOptions]:
    """All settings that are compared; a stall is kept by the policy of objectives alone."""
    for policy in POLICIES:
        for seqs, budget in itertools.product(SEQS, BUDGETS):
            for stall in STALLS_MS if policy == "slo" else STALLS_MS[:1]:
                if budget >= seqs:
                    yield settings(world, seqs, budget, policy, stall)


def settings(world: World, seqs: int, budget: int, policy: str, stall: float) -> SchedulingOptions:
    return replace(
        start(world),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        max_prefill_stall_ms=stall,
    )


@dataclass
class Choices:
    """What a search had chosen, after how many runs."""

    chosen: list[tuple[int, SchedulingOptions]] = field(default_factory=list)

    def after(self, runs: int) -> SchedulingOptions:
        return [scheduling for count, scheduling in self.chosen if count <= runs or count == self.chosen[0][0]][-1]


def tuned(subject: Simulated) -> tuple[Choices, Tuned]:
    """`headway tune`, with as many runs as it likes."""
    began, world = start(subject.world), subject.world
    with tempfile.TemporaryDirectory(prefix="headway-regret-") as folder:
        options = TuneOptions(
            ModelOptions(),
            began,
            ArrivalFlags(),
            WorkloadSpec(),
            Claims(objectives=world.objectives),
            budget_s=math.inf,
        )
        journal, stop = Journal(Path(folder) / "journal.jsonl", {}), asyncio.Event()
        found = asyncio.run(Tuner(options, subject, journal, Console(file=io.StringIO()), stop).run())
    path, now, runs = Choices([(0, began)]), began, len(LEARN_SEEDS)
    for trial in found.trials:
        runs += 2 * len(trial.race.gains)
        if trial.kept:
            now = applied(now, [trial.prediction.change])
            path.chosen.append((runs, now))
    return path, found


def searched(subject: Simulated, proposals: Iterator[SchedulingOptions], tell: Callable[[float], None]) -> Choices:
    """A search that takes what was best in one run each."""
    path, best = Choices([(0, start(subject.world))]), math.inf
    for number, scheduling in zip(range(1, max(RUNS) + 1), proposals, strict=False):
        (records,) = asyncio.run(subject.measured(scheduling, [number]))
        tell(seen := subject.loss(records))
        if seen < best:
            best = seen
            path.chosen.append((number, scheduling))
    return path


def randomly(world: World, number: int) -> Iterator[SchedulingOptions]:
    everything, chance = list(grid(world)), random.Random(number)
    while True:
        yield chance.choice(everything)


def swept(world: World) -> Iterator[SchedulingOptions]:
    for seqs, budget in SWEPT:
        yield replace(start(world), max_num_seqs=seqs, max_num_batched_tokens=budget)


def by_tpe(subject: Simulated, number: int) -> Choices | None:
    """Optuna's TPE; None without it."""
    try:
        import optuna
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=number))
    asked: list[Any] = []

    def proposals() -> Iterator[SchedulingOptions]:
        while True:
            trial = study.ask()
            asked.append(trial)
            seqs = trial.suggest_categorical("seqs", SEQS)
            budget = trial.suggest_categorical("budget", BUDGETS)
            policy = trial.suggest_categorical("policy", POLICIES)
            stall = trial.suggest_categorical("stall", STALLS_MS)
            yield settings(subject.world, seqs, max(seqs, budget), policy, stall)

    return searched(subject, proposals(), lambda seen: study.tell(asked[-1], seen))


def study(name: str, number: int) -> dict[str, Any]:
    """One repeat in one world: the regret of each search by its runs, and what `tune` predicted of its trials."""
    subject = Simulated(WORLDS[name], number)
    losses = [subject.true_loss(each) for each in grid(subject.world)]
    least = min(losses)
    path, found = tuned(subject)
    paths = {"tune": path, "random": searched(subject, randomly(subject.world, number), lambda seen: None)}
    paths["sweep"] = searched(subject, swept(subject.world), lambda seen: None)
    if (other := by_tpe(subject, number)) is not None:
        paths["TPE"] = other
    last = subject.true_loss(path.chosen[-1][1])
    return {
        "world": name,
        "repeat": number,
        "start": subject.true_loss(start(subject.world)) - least,
        "best": least,
        "settings": len(losses),
        "regret": {
            who: {str(runs): max(0.0, subject.true_loss(each.after(runs)) - least) for runs in RUNS}
            for who, each in paths.items()
        },
        "tune": {
            "regret": last - least,
            "runs": len(LEARN_SEEDS) + sum(2 * len(trial.race.gains) for trial in found.trials),
            "last_change_after": path.chosen[-1][0],
        },
        "trials": [
            {
                "change": trial.prediction.change.typed,
                "predicted": [trial.prediction.low, trial.prediction.times, trial.prediction.high],
                "measured": trial.race.times,
                "verdict": trial.race.verdict,
            }
            for trial in found.trials
        ],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Median regret over the repeats, and how often a measured gain was inside its predicted bar."""
    lines = [f"| world | search | at the start | {' | '.join(f'{runs} runs' for runs in RUNS)} |"]
    lines.append("|---|---|" + "---:|" * (len(RUNS) + 1))
    for world in dict.fromkeys(each["world"] for each in found):
        of = [each for each in found if each["world"] == world]
        for who in of[0]["regret"]:
            cells = [f"{statistics.median(each['regret'][who][str(runs)] for each in of):.3f}" for runs in RUNS]
            began = statistics.median(each["start"] for each in of)
            lines.append(f"| {world} | {who} | {began:.3f} | {' | '.join(cells)} |")
    trials = [trial for each in found for trial in each["trials"]]
    inside = sum(low <= trial["measured"] <= high for trial in trials for low, _, high in [trial["predicted"]])
    ends = [each["tune"]["runs"] for each in found]
    lines.append("")
    lines.append(
        f"Of {len(trials)} trials, {inside} measured gains lay inside their 80 % bars. tune ended by itself after "
        f"{min(ends)} to {max(ends)} runs."
    )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=__doc__)
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "regret.json")
    arguments = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for number, name in itertools.product(range(arguments.repeats), arguments.worlds):
        found.append(study(name, number))
        print(json.dumps(found[-1]["tune"] | {"world": name, "repeat": number}), file=sys.stderr)
        save(heading(arguments) | {"studies": found}, arguments.output)
    print(table(found))


if __name__ == "__main__":
    main()
