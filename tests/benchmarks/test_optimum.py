"""The policy `slo` is close to what somebody who knows everything before could do."""

from __future__ import annotations

import random

import pytest

from benchmarks.optimum import MACHINES, Asked, Clairvoyant, Machine, bound, found, good, instance, measure
from headway.policy.objectives.service_class import ServiceClass

MACHINE = Machine(fixed=10.0, token=1.0, decode=1.0)


def asked(at: float, prompt: int, output: int = 1, ttft_ms: float = 100.0, tpot_ms: float = 20.0) -> Asked:
    return Asked(at, ServiceClass(name="chat", ttft_ms=ttft_ms, tpot_ms=tpot_ms), prompt, output)


def test_no_more_than_fit_in_a_span_can_be_good() -> None:
    assert bound([asked(0, 90)], MACHINE) == 1
    assert bound([asked(0, 91)], MACHINE) == 0
    assert bound([asked(0, 50), asked(0, 41)], MACHINE) == 1
    assert bound([asked(0, 50), asked(20, 41)], MACHINE) == 2
    assert bound([asked(0, 10, 5, tpot_ms=10)], MACHINE) == 1, "its prompt could have been early"
    assert bound([asked(0, 80, 20, tpot_ms=10)], MACHINE) == 0


def test_what_is_served_is_timed_token_by_token() -> None:
    way = Clairvoyant(MACHINE, saves=False, together=False, stops=False)
    assert way.keeps([asked(0, 90, 3, tpot_ms=11)])
    assert not way.keeps([asked(0, 91)])
    assert not way.keeps([asked(0, 90, 3, tpot_ms=10.9)])
    assert not way.keeps([asked(0, 20, 30, tpot_ms=11.5), asked(1, 10, 1)]), "nothing is left beside the first's tokens"
    assert way.keeps([asked(0, 20, 30, tpot_ms=13.5), asked(1, 10, 1)])


@pytest.mark.parametrize("name", MACHINES)
def test_the_policy_is_close_to_the_optimum(name: str) -> None:
    row = measure(MACHINES[name], load=1.0, instances=12, seed=1)
    assert row["found"] <= row["bound"] <= row["requests"]
    assert row["slo"] >= 0.9 and row["slo"] > row["fcfs"] and row["slo"] > row["best_budget"]


def test_nobody_is_better_than_the_bound() -> None:
    rng = random.Random(4)
    for machine in MACHINES.values():
        for _ in range(8):
            requests = instance(rng, machine, load=2.0)
            most = bound(requests, machine)
            assert found(requests, machine, most) <= most and good(requests, machine, "slo") <= most
