"""`headway plan` simulates a server without blocks or a prefix cache; `headway simulate` has both, and agrees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from headway.cost.catalogue import find_hardware
from headway.cost.requests import RequestShape
from headway.planner.engines import find_profile
from headway.policy.step.options import SchedulingOptions
from headway.simulator.answers import Answer
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.server import simulate
from headway.simulator.serving import closed_loop
from headway.simulator.timing import Predicted
from headway.simulator.traffic import Arrival, arrival


@pytest.mark.parametrize(
    ("engine", "clients", "prompt", "output"),
    [
        ("headway", 1, 500, 60),
        ("headway", 16, 1000, 150),
        ("headway", 64, 1000, 100),
        ("headway", 32, 6000, 60),
        ("sglang", 32, 1000, 100),
        ("sglang", 32, 6000, 60),
        ("tensorrt-llm", 32, 6000, 60),
    ],
)
def test_a_closed_loop_is_the_same_planned_and_simulated(engine, clients, prompt, output):
    """Without objectives, which a plan does not know, and without a bound on stalls."""
    scheduling = SchedulingOptions(scheduling_policy="fcfs", max_prefill_stall_ms=math.inf)
    options = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM", engine=engine, max_model_len=8192)
    server = deploy(options, scheduling)
    assert isinstance(server.timing, Predicted)
    workload, prompts = RequestShape(prompt, output, 0, 0.1), 6 * clients
    numbers = iter(range(prompts))

    def send(now: int, count: int) -> Iterable[Arrival]:
        sent = itertools.islice(numbers, count)
        return [arrival(number, now, prompt, workload.output_of(number)) for number in sent]

    def after(answers: list[Answer]) -> Iterable[Arrival]:
        return send(answers[0].ended_ns, 1)

    ran = simulate(server.scheduler, send(0, clients), server.timing, host=server.host, after=after)
    ttft, e2e = ([each.ttft_ns or 0 for each in ran.answers], [each.ended_ns - each.arrived_ns for each in ran.answers])
    lengths = [len(each.token_ns) for each in ran.answers]
    tpot = [(e - t) / (n - 1) for e, t, n in zip(e2e, ttft, lengths, strict=True)]
    limits = find_profile(engine).limits(find_hardware("H100-SXM"))
    limits = replace(limits, prefill_stall_s=math.inf)
    planned = closed_loop(server.timing.deployment, workload, clients, prompts, limits)
    assert planned.ttft_s == pytest.approx(np.mean(ttft) / 1e9, rel=0.05)
    assert planned.ttft_p50_s == pytest.approx(np.median(ttft) / 1e9, rel=0.05)
    assert planned.ttft_p99_s == pytest.approx(np.percentile(ttft, 99) / 1e9, rel=0.05)
    assert planned.tpot_s == pytest.approx(np.mean(tpot) / 1e9, rel=0.01)
    assert planned.e2e_s == pytest.approx(np.mean(e2e) / 1e9, rel=0.01)
    assert planned.requests_per_s == pytest.approx(prompts / (ran.ended_ns / 1e9), rel=0.01)
