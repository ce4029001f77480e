"""Tenants that take turns, on a virtual clock: within the bound at every moment, and a flood is not felt by others."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.optimum import MACHINES, Machine
from headway.policy.admission.quota import Quotas
from headway.policy.admission.tenants import Tenant, TenantTable
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.fairness import FairSequences
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator.server import Answer, simulate
from headway.simulator.traffic import Arrival, arrival

MACHINE = MACHINES["accelerator"]
# Nobody starves in these tests: one that does takes a quarter of the prompt tokens of each step, whoever it is.
CLASSES = ClassTable((ServiceClass(name="chat", ttft_ms=1000, tpot_ms=100), ServiceClass(name="offline")))
POLICIES = ("fcfs", "priority", "slo")


def scheduler(
    policy: str,
    weights: dict[str, float],
    seats: int = 64,
    blocks: int = 32_768,
    length: int = 8192,
    machine: Machine = MACHINE,
) -> Scheduler:
    config = SchedulerConfig(seats, 512, length, policy=policy, classes=CLASSES, weights=weights)
    return Scheduler(config, KVBlocks(blocks, 16, enable_prefix_caching=False), machine.learnt())


def traffic(tenant: str, rate: float, seconds: float, first: int, seed: int = 1, **options: object) -> list[Arrival]:
    """Requests of all lengths, as they come to a chat: 600 tokens in the median, and 40 of output in the mean."""
    rng, at, found = random.Random(f"{tenant} {seed}"), 0.0, list[Arrival]()
    while (at := at + rng.expovariate(rate)) < seconds:
        prompt = min(7000, max(20, int(rng.lognormvariate(math.log(600), 1.0))))
        output = max(1, min(120, int(rng.expovariate(1 / 40))))
        found.append(
            arrival(first + len(found), round(at * 1e9), prompt, 120, output_len=output, tenant=tenant, **options)
        )
    return found


@dataclass
class Watched:
    """A machine that looks at the scheduler in each step."""

    scheduler: Scheduler
    machine: Machine = MACHINE
    served: Counter[str] = field(default_factory=Counter)  # tokens that were computed of each tenant
    since: dict[str, float] = field(default_factory=dict)  # the least and most that a was ahead of b, while both wait
    apart: float = 0.0  # the most that this changed by
    together: int = 0  # steps in which both waited

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        fair = self.scheduler.waiting
        assert isinstance(fair, FairSequences) and fair.lead <= fair.bound
        for item in plan.scheduled:
            self.served[self.scheduler.sequences[item.seq_id].tenant] += len(item.token_ids)
        waiting = {sequence.tenant for sequence in self.scheduler.waiting}
        if {"a", "b"} <= waiting:
            ahead = self.served["a"] / fair.weights["a"] - self.served["b"] / fair.weights["b"]
            self.since = {
                "least": min(self.since.get("least", ahead), ahead),
                "most": max(self.since.get("most", ahead), ahead),
            }
            self.apart = max(self.apart, self.since["most"] - self.since["least"])
            self.together += 1
        else:
            self.since.clear()
        return self.machine.times(plan, now)


@settings(max_examples=settings.default.max_examples // 8)
@given(
    policy=st.sampled_from(["fcfs", "priority", "slo"]),
    service=st.sampled_from(["chat", "offline"]),
    weight=st.sampled_from([1.0, 3.0]),
    rates=st.tuples(st.integers(1, 60), st.integers(20, 80)),
    seats=st.sampled_from([4, 32]),
    seed=st.integers(0, 1000),
)
def test_nobody_is_further_ahead_than_the_bound(
    policy: str, service: str, weight: float, rates: tuple[int, int], seats: int, seed: int
) -> None:
    """At each step, of counters; and of tokens that were computed, over any time in which both waited: twice that, and
    what is charged at admission and computed later."""
    weights = {"a": weight, "b": 1.0}
    sched = scheduler(policy, weights, seats, blocks=seats * 512)
    watched = Watched(sched)
    alike = {"service_class": service}
    both = traffic("a", rates[0], 2, 0, seed, **alike) + traffic("b", rates[1], 2, 10_000, seed, **alike)
    simulate(sched, sorted(both, key=lambda each: each.at_ns), watched)
    assert isinstance(sched.waiting, FairSequences)
    assert sched.waiting.bound <= 8192 + seats * (7000 + 120), "credit, and whole requests on all seats"
    assert watched.apart <= 2 * (sched.waiting.bound + 7000)


def test_who_weighs_more_is_served_more_and_all_are_served() -> None:
    sched = scheduler("fcfs", {"a": 3.0, "b": 1.0})
    half: Counter[str] = Counter()
    watched = Watched(sched)
    both = traffic("a", 100, 4, 0) + traffic("b", 100, 4, 10_000)
    found = simulate(sched, sorted(both, key=lambda each: each.at_ns), watched)
    assert watched.together > 200 and sched.waiting.lead > 0
    for answer in found.answers:
        assert answer.finish_reason == "stop" or answer.finish_reason == "length"
        if answer.ended_ns < found.ended_ns / 2:
            half["a" if int(answer.request_id) < 10_000 else "b"] += answer.prompt_len + len(answer.token_ns)
    assert half["a"] / half["b"] == pytest.approx(3.0, rel=0.2)


def p99_ttft_ms(answers: list[Answer]) -> float:
    """The P99 of the quiet tenant's TTFT."""
    times = sorted(each.ttft_ns / 1e6 for each in answers if int(each.request_id) < 10_000 and each.ttft_ns is not None)
    return times[int(0.99 * len(times))]


def quiet_p99_ms(policy: str, times: int, weights: dict[str, float], rate: float, machine: Machine) -> float:
    """The P99 of TTFT of a tenant beside another that sends `times` as much."""
    asked = traffic("quiet", rate, 30, 0) + (traffic("flood", times * rate, 30, 10_000) if times else [])
    sched = scheduler(policy, weights, machine=machine)
    answers = simulate(sched, sorted(asked, key=lambda each: each.at_ns), machine).answers
    if weights and times:
        assert 0 < sched.waiting.lead <= sched.waiting.bound
    return p99_ttft_ms(answers)


TWO = {"quiet": 1.0, "flood": 1.0}
SLUGGISH = Machine(15.0, 0.3, 1.0)


SLOW = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("priority", "slo")]


@pytest.mark.parametrize("policy", ["fcfs", *SLOW])
def test_a_flood_is_not_felt_by_a_quiet_tenant(policy: str) -> None:
    """One sends 20 times as much as the other, three times what the server can do."""
    alone, beside = (quiet_p99_ms(policy, times, TWO, 4.0, MACHINE) for times in (0, 20))
    assert beside <= 1.2 * alone
    if policy == "fcfs":
        assert quiet_p99_ms(policy, 20, {}, 4.0, MACHINE) > 10 * alone, "without turns it would be felt"


def test_who_asks_for_less_than_its_part_does_not_wait_behind_promises() -> None:
    """Long prompts that are late, or could not even be in time alone, would wait until nothing else is promised."""
    alone, beside = (quiet_p99_ms("slo", times, TWO, 0.6, SLUGGISH) for times in (0, 20))
    assert beside <= 2.5 * alone


def test_who_can_never_be_in_time_is_served_its_part_all_the_same() -> None:
    """No prompt of one tenant can be in time beside the other's decoding, and all of the other's can."""
    sched = scheduler("slo", {"long": 1.0, "short": 1.0}, machine=SLUGGISH)
    asked = [arrival(number, number * 10**9, 5000, 20, tenant="long") for number in range(40)]
    asked += [arrival(1000 + number, number * 10**8, 200, 20, tenant="short") for number in range(400)]
    served: Counter[str] = Counter()
    for each in simulate(sched, sorted(asked, key=lambda each: each.at_ns), SLUGGISH).answers:
        served["long" if int(each.request_id) < 1000 else "short"] += each.ended_ns < 40e9 and each.prompt_len + 20
    assert abs(served["short"] - served["long"]) <= 8192 + 2 * 5020, "the credit, and prompts under way"


@pytest.mark.parametrize("policy", POLICIES)
def test_one_tenant_alone_is_served_as_if_there_were_none(policy: str) -> None:
    def run(weights: dict[str, float]) -> list[list[int]]:
        asked = traffic("default", 60, 3, 0, priority=0)
        return [list(each.token_ns) for each in simulate(scheduler(policy, weights, seats=16), asked, MACHINE).answers]

    assert run({}) == run({"other": 2.0})


def test_tenants_can_come_while_others_wait() -> None:
    sched = scheduler("fcfs", {}, seats=1)
    sequences = [
        Sequence(str(i), 0, each.request.params, [1] * 20, 20, 30, frozenset(), 0)
        for i, each in enumerate(traffic("a", 5, 1, 0))
    ]
    for number, sequence in enumerate(sequences):
        sequence.tenant, sequence.arrival_ns = "ab"[number % 2], number
        sched.add(sequence, 0)
    sched.set_classes(CLASSES, {"a": 1.0, "b": 1.0})
    assert isinstance(sched.waiting, FairSequences) and len(sched.waiting) == len(sequences)
    sched.set_classes(CLASSES, {"a": 2.0})
    assert isinstance(sched.waiting, FairSequences) and sched.waiting.weights == {"a": 2.0}
    sched.set_classes(CLASSES, {})
    assert not isinstance(sched.waiting, FairSequences) and list(sched.waiting) == sequences


def test_quotas_on_the_virtual_clock() -> None:
    """The same budgets as of a live server: what is over them is refused, and all that is served is settled."""
    quotas = Quotas(TenantTable((Tenant(name="a", tokens_per_minute=30_000),)), 0)
    asked = traffic("a", 20, 10, 0)
    answers = simulate(scheduler("fcfs", {"a": 1.0}), asked, MACHINE, quotas=quotas).answers
    used = sum(each.prompt_len + len(each.token_ns) for each in answers if not each.refused)
    tokens = quotas.of("a")[1]
    assert any("over the limit of 30000 tokens a minute" in each.refused for each in answers)
    assert tokens.settled == used <= 30_000 * (1 + 10 / 60)
    assert tokens.reserved == tokens.settled + tokens.refunded
