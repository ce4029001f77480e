"""How good the decisions of the policy `slo` are: the requests that keep their objectives, beside the most that could.

    python -m benchmarks.optimum --instances 400

Instances are small and random, on a machine whose steps take exactly as long as predicted, on a virtual clock. The most
that any scheduler could do lies between two numbers. Somebody who knows all arrivals and lengths before tries all
subsets of the requests, serves only those, the earliest deadline first, in several ways (`Clairvoyant`), and takes the
largest subset of which each keeps its objectives. And no subset can that has in any span of time more work than fits
(`bound`). Work counts in a span only where all of it must be done there: a prompt between its arrival and the time at
which its first token is due, the further tokens up to when the last one is due.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, about, own_file, save
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.step_time import StepTimeModel, StepWork
from headway.simulator.answers import Answer
from headway.simulator.server import simulate
from headway.simulator.traffic import arrival

MS = 1_000_000
BUDGETS = (32, 64, 128, 256, 512)
SEATS, MOST_REQUESTS = 8, 8


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step: its own, and for each token of a prompt and each sequence that decodes."""

    fixed: float
    token: float
    decode: float

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """The times of a step, by the three constants."""
        computed = now + self.step_ns(plan.work)
        return StepTimes(now, computed, computed)

    def step_ns(self, work: StepWork) -> int:
        return round(MS * (self.fixed + self.token * work.prefill_tokens + self.decode * work.decode_tokens))

    def learnt(self) -> StepTimeModel:
        """A step-time model that has learnt these constants."""
        model = StepTimeModel()
        for number in range(200):
            work = StepWork(number * 7 % 50, number * 3 % 20)
            model.observe(work, self.step_ns(work))
        return model


MACHINES = {"processor": Machine(50.0, 1.6, 3.0), "accelerator": Machine(8.0, 0.02, 0.01)}


@dataclass(frozen=True)
class Asked:
    """A request: when it comes, in milliseconds, of which class, and its tokens."""

    at: float
    service: ServiceClass
    prompt: int
    output: int

    @property
    def first_due(self) -> float:
        return self.at + self.service.ttft_ms

    @property
    def last_due(self) -> float:
        return self.first_due + (self.output - 1) * self.service.tpot_ms


def instance(rng: random.Random, machine: Machine, load: float) -> list[Asked]:
    """Requests of two classes, in order, that have work for `load` times the time in which they come."""
    chat = ServiceClass(name="chat", ttft_ms=10 * machine.fixed, tpot_ms=3 * machine.fixed)
    report = ServiceClass(name="report", ttft_ms=40 * machine.fixed, tpot_ms=6 * machine.fixed)
    step = machine.fixed / machine.token  # tokens of a prompt that take as long as a step's own time
    drawn = []
    for _ in range(rng.randrange(3, MOST_REQUESTS + 1)):
        long = rng.random() < 0.3
        prompt = int(step * (rng.uniform(3, 12) if long else rng.uniform(0.5, 4)))
        drawn.append((report if long else chat, max(1, prompt), rng.randrange(2, 12)))
    work = sum(prompt * machine.token + machine.fixed for _, prompt, _ in drawn)
    asked = [Asked(rng.uniform(0, work / load), *each) for each in drawn]
    return sorted(asked, key=lambda each: each.at)


def classes_of(asked: list[Asked]) -> ClassTable:
    found = {each.service.name: each.service for each in asked}
    return ClassTable(tuple(found[name] for name in sorted(found)))


def good(asked: list[Asked], machine: Machine, policy: str, budget: int = 4096) -> int:
    """Requests that keep both objectives with a scheduling policy, without a bound on stalls but its own."""
    config = SchedulerConfig(SEATS, budget, 16_384, policy=policy, classes=classes_of(asked))
    scheduler = Scheduler(config, KVBlocks(8192, 16), machine.learnt())
    arrivals = [
        arrival(number, round(each.at * MS), each.prompt, each.output, service_class=each.service.name)
        for number, each in enumerate(asked)
    ]
    answers = simulate(scheduler, arrivals, machine).answers
    return sum(_is_good(answer, each) for answer, each in zip(answers, asked, strict=True))


def _is_good(answer: Answer, asked: Asked) -> bool:
    first, last = answer.token_ns[0] - answer.arrived_ns, answer.token_ns[-1] - answer.token_ns[0]
    tpot_ns = last / max(1, len(answer.token_ns) - 1)
    return first <= asked.service.ttft_ms * MS and tpot_ns <= asked.service.tpot_ms * MS


@dataclass(frozen=True)
class Clairvoyant:
    """Serves requests that it has chosen, all that decode in every step and prompts in what is left of it.

    Args:
        saves: a token may come later by what those before it came earlier.
        together: where nobody decodes, prompts share a step.
        stops: such a step ends when the next request comes.
    """

    machine: Machine
    saves: bool
    together: bool
    stops: bool

    def keeps(self, chosen: Sequence[Asked]) -> bool:
        """Whether all of them keep their objectives."""
        now, left = 0.0, [each.prompt for each in chosen]
        first, last, had = [0.0] * len(chosen), [0.0] * len(chosen), [0] * len(chosen)
        while any(count < each.output for count, each in zip(had, chosen, strict=True)):
            decoding = [i for i, each in enumerate(chosen) if 0 < had[i] < each.output]
            prompts = sorted((i for i in range(len(chosen)) if left[i] and chosen[i].at <= now), key=self._due(chosen))
            coming = min((each.at for each in chosen if each.at > now), default=math.inf)
            if not decoding and not prompts:
                now = coming
                continue
            dues = [
                (first[i] + had[i] * chosen[i].service.tpot_ms, last[i] + chosen[i].service.tpot_ms) for i in decoding
            ]
            until = min((saved if self.saves else strict for saved, strict in dues), default=math.inf)
            if self.stops and not decoding and coming - now > self.machine.fixed + self.machine.token:
                until = coming
            took = self.machine.fixed + self.machine.decode * len(decoding)
            room = (until - now - took) / self.machine.token
            for i in prompts if decoding or self.together else prompts[:1]:
                count = min(left[i], max(0, math.floor(min(room, 1e9))))
                left[i], room, took = left[i] - count, room - count, took + count * self.machine.token
            now += took
            for i in (*decoding, *(i for i in prompts if not left[i])):
                had[i], last[i], first[i] = had[i] + 1, now, first[i] or now
                if now > (chosen[i].first_due if had[i] == 1 else first[i] + chosen[i].service.tpot_ms * (had[i] - 1)):
                    return False
        return True

    def _due(self, chosen: Sequence[Asked]) -> Callable[[int], float]:
        return lambda number: chosen[number].first_due


def found(asked: list[Asked], machine: Machine, most: int) -> int:
    """Requests that somebody who knows all before can serve in time, at most so many."""
    ways = [Clairvoyant(machine, *each) for each in itertools.product((True, False), repeat=3)]
    for count in range(most, 0, -1):
        if any(way.keeps(chosen) for chosen in itertools.combinations(asked, count) for way in ways):
            return count
    return 0


def bound(asked: list[Asked], machine: Machine) -> int:
    """No more of them can keep their objectives, whoever schedules."""
    for count in range(len(asked), 0, -1):
        if any(_may_all_be_good(chosen, machine) for chosen in itertools.combinations(asked, count)):
            return count
    return 0


def _may_all_be_good(chosen: tuple[Asked, ...], machine: Machine) -> bool:
    ends = sorted({each.first_due for each in chosen} | {each.last_due for each in chosen if each.last_due < math.inf})
    return all(
        _work(chosen, machine, begin, end) <= end - begin + 1e-6
        for begin in {each.at for each in chosen}
        for end in ends
        if end > begin
    )


def _work(chosen: tuple[Asked, ...], machine: Machine, begin: float, end: float) -> float:
    """Milliseconds of steps that must be in a span. Steps are shared: there are as many as one of them needs."""
    tokens = decodes = steps = 0
    for each in chosen:
        if each.at >= begin and each.first_due <= end:
            tokens, steps = tokens + each.prompt, max(steps, 1)
            if each.last_due <= end:
                decodes, steps = decodes + each.output - 1, max(steps, each.output)
    return machine.fixed * steps + machine.token * tokens + machine.decode * decodes


def measure(machine: Machine, load: float, instances: int, seed: int) -> dict[str, Any]:
    """Requests that are good with each scheduling, by what the clairvoyant found, with the best static budget."""
    rng = random.Random(seed)
    drawn = [instance(rng, machine, load) for _ in range(instances)]
    bounds = [bound(asked, machine) for asked in drawn]
    most = sum(found(asked, machine, at_most) for asked, at_most in zip(drawn, bounds, strict=True))
    budgets = {size: sum(good(asked, machine, "fcfs", size) for asked in drawn) for size in BUDGETS}
    best = max(budgets, key=lambda size: budgets[size])
    return {
        "load": load,
        "requests": sum(map(len, drawn)),
        "bound": sum(bounds),
        "found": most,
        "slo": sum(good(asked, machine, "slo") for asked in drawn) / most,
        "fcfs": sum(good(asked, machine, "fcfs") for asked in drawn) / most,
        "best_budget": budgets[best] / most,
        "budget": best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=400, help="for each machine and load")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "optimum.json")
    args = parser.parse_args()
    rows = []
    print("| machine | load | requests | bound | found | slo | fcfs | best static budget |")
    print("|---|---|---|---|---|---|---|---|")
    for name, machine in MACHINES.items():
        for load in args.loads:
            row = {"machine": name, **measure(machine, load, args.instances, args.seed)}
            rows.append(row)
            shares = f"{row['slo']:.1%} | {row['fcfs']:.1%} | {row['best_budget']:.1%} ({row['budget']} tokens)"
            print(f"| {name} | {load:g} | {row['requests']} | {row['bound']} | {row['found']} | {shares} |", flush=True)
    save({"machine": about(), "instances": args.instances, "seed": args.seed, "rows": rows}, own_file(args.output))


if __name__ == "__main__":
    main()
