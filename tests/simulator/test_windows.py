"""Where batching windows pay, on simulated servers whose steps take 30 ms and half a millisecond a token."""

from __future__ import annotations

import random

import pytest

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator.server import simulate
from headway.simulator.traffic import arrival

MS = 1_000_000


class Machine:
    def times(self, plan: StepPlan, now: int) -> StepTimes:
        computed = now + round(MS * (30 + 0.5 * plan.work.tokens))
        return StepTimes(now, computed, computed)


def served(window_ms: tuple[float, float], times_ms: list[float]) -> tuple[float, int]:
    """The mean time to the first token in milliseconds, and how many windows were opened."""
    classes = ClassTable((ServiceClass(name="chat", window_ms=window_ms),))
    config = SchedulerConfig(32, 1024, 1024, policy="slo", classes=classes)
    scheduler = Scheduler(config, KVBlocks(512, 16))
    arrivals = [arrival(number, round(at * MS), 8, 1) for number, at in enumerate(times_ms)]
    answers = simulate(scheduler, arrivals, Machine()).answers
    waits = [answer.token_ns[0] - answer.arrived_ns for answer in answers]
    return sum(waits) / len(waits) / MS, scheduler.policy.num_windows


def test_a_window_shortens_the_mean_wait_where_requests_come_in_bursts() -> None:
    bursts = [second * 1000.0 + each for second in range(1, 30) for each in range(8)]
    without, none = served((0, 0), bursts)
    adaptive, opened = served((0, 20), bursts)
    assert none == 0 and opened >= 15
    assert adaptive < 0.9 * without


@pytest.mark.parametrize("rate", [2.0, 10.0, 20.0, 40.0])
def test_a_window_costs_hardly_anything_where_requests_come_by_chance(rate: float) -> None:
    rng, now, times_ms = random.Random(3), 0.0, list[float]()
    for _ in range(300):
        now += rng.expovariate(rate / 1000)
        times_ms.append(now)
    assert served((0, 20), times_ms)[0] < 1.03 * served((0, 0), times_ms)[0]


def test_a_minimum_is_kept_where_it_costs() -> None:
    alone = [second * 1000.0 for second in range(1, 30)]
    assert served((5, 20), alone)[0] == pytest.approx(served((0, 20), alone)[0] + 5, abs=0.1)
