"""What `headway simulate verify` learns from recorded steps, and what it says of a prediction."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from headway.bench.client.load import LoadMode
from headway.bench.runs import Load
from headway.bundled import STORY
from headway.engine.config import ModelOptions
from headway.load.record import RunResult
from headway.load.workload.arrivals import Poisson
from headway.load.workload.build import build_workload
from headway.load.workload.spec import WorkloadSpec
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.sizing import PoolSize
from headway.policy.step.accounting import StepTimes
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.recording import Record, RecordedEngine, RecordedScheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.step_time import StepWork
from headway.simulator.clients import BEGAN_NS
from headway.simulator.deployed import Deployed
from headway.simulator.engine import Host
from headway.simulator.learnt import Learnt, RecordedStep, TooFewSteps, steps_of
from headway.simulator.options import VerifyOptions
from headway.simulator.prompts import SketchSource
from headway.simulator.recording import Recording
from headway.simulator.run import answer
from headway.simulator.verify import Measured, Round, Verification, print_verification, serve_flags, verify

MS = 1_000_000


@dataclass
class Machine:
    """Takes 3 ms for a step, 20 µs for a token of a prompt and 0.2 ms for one of an answer, more or less."""

    rng: random.Random
    slower: float = 1.0

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        work = plan.work
        forward = 3 * MS + 20_000 * work.prefill_tokens + 200_000 * work.decode_tokens
        launched = now + 100_000 + 5_000 * len(plan.scheduled)
        computed = launched + round(forward * self.slower * self.rng.uniform(0.95, 1.05))
        return StepTimes(launched, computed, computed + 50_000)


def run_recorded(speeds: list[float], request_ms: int) -> tuple[Recording, list[Measured]]:
    """Loads one after the other on a machine, recorded as a live engine does, and what the clients saw."""
    records: list[Record] = []
    runs: list[Measured] = []
    spec = WorkloadSpec(num_prompts=250, random_input_len=200, random_output_len=20, arrival=Poisson(25.0))
    pool, options = PoolSize(600, 1000), SchedulingOptions(max_num_seqs=16)
    engine: list[RecordedEngine] = []

    for seed, slower in enumerate(speeds):
        later = seed * 1000 * 1000 * MS  # every run begins at BEGAN_NS of its own clock

        def recorded(config: SchedulerConfig, blocks: KVBlocks, later: int = later) -> RecordedScheduler:
            def record(each: Record, idle: bool) -> None:
                times = getattr(each, "times", None)
                shifted = {} if times is None else {"times": tuple(at + later for at in times)}
                records.append(msgspec.structs.replace(each, now=each.now + later, **shifted))

            fields = msgspec.to_builtins(config)
            engine.append(RecordedEngine(1, "0", str(STORY), "cpu", "bf16", {}, fields, 600, 16, True, 0, 0.0))
            return RecordedScheduler(config, blocks, record)

        load = Load(replace(spec, seed=seed), LoadMode.OPEN, None)
        scheduler = options.scheduler("cpu", pool, recorded)
        host = Host(request_ms * MS)
        deployed = Deployed(scheduler, Machine(random.Random(seed), slower), QueueLimits(), host, {})
        result = answer([deployed.server()], load, build_workload(load.spec, SketchSource(), chat=False))[0]
        shifted = replace(result, began_ns=result.began_ns + later, ended_ns=result.ended_ns + later)
        runs.append(Measured(load, shifted))
    return Recording(engine[0], records), runs  # type: ignore[arg-type]


def test_what_was_learnt_from_runs_predicts_those_between() -> None:
    recording, runs = run_recorded([1, 1, 1, 1, 1], request_ms=4)
    found = verify([Round.of(recording, *runs[:3]), Round.of(recording, *runs[2:])])
    assert found.holds, found
    assert {(each.metric, each.statistic) for each in found.differences} >= {("ttft_ms", "p90"), ("itl_ms", "p99")}
    assert found.throughput[1] == pytest.approx(found.throughput[0], rel=0.05)
    assert all(distance < 0.1 for name, distance in found.distances.items() if name != "itl_ms")
    assert found.slower == pytest.approx([1, 1], abs=0.02)
    said = shown(found)
    assert "TTFT P50" in said and "equivalent" in said and "Holds: medians within 10 %." in said


def test_a_machine_that_was_slower_meanwhile_is_told_from_a_wrong_simulator() -> None:
    """Medians that too few requests have are named."""
    recording, runs = run_recorded([1, 2, 1], request_ms=4)
    found = verify([Round.of(recording, *runs)])
    assert not found.holds
    assert found.slower == pytest.approx([2], rel=0.1)
    assert found.by_own_steps["tpot_ms"]["median"] == pytest.approx(1, abs=0.05)
    said = shown(found)
    assert (
        "different" in said
        and "Not shown: that all medians are within 10 %." in said
        and "speed changed between runs" in said
    )
    few = replace(found, differences=tuple(replace(each, ratio=None) for each in found.differences))
    assert "Too few requests for TTFT P50, TPOT P50, ITL P50, E2EL P50; raise" in shown(few)
    assert "Too few" not in said


def shown(found: Verification) -> str:
    console = Console(width=160)
    with console.capture() as said:
        print_verification(console, found)
    return said.get()


def test_a_step_s_time_is_found_again() -> None:
    rng = np.random.default_rng(0)
    steps = []
    for _ in range(200):
        prompt, decodes = int(rng.integers(0, 2) * rng.integers(1, 300)), int(rng.integers(1, 20))
        forward = 3 * MS + 20_000 * prompt + 200_000 * decodes
        work = StepWork(prompt, decodes, 0, 0)
        steps.append(
            RecordedStep(work, decodes + 1, 1000 + 100 * (decodes + 1), round(forward * rng.uniform(0.9, 1.1)), 7)
        )
    learnt = Learnt.of(steps)
    predicted = learnt.forward @ StepWork(100, 10, 0, 0).features()
    assert predicted == pytest.approx(7 * MS, rel=0.03)
    assert learnt.between @ (1, 5) == pytest.approx(1500, rel=0.01)
    assert (learnt.forward >= 0).all()
    assert all(0.85 < each[:, 1].min() < 1 < each[:, 1].max() < 1.15 for each in learnt.ratios)
    with pytest.raises(TooFewSteps, match="3 steps are too few"):
        Learnt.of(steps[:3])


def test_time_in_which_there_was_nothing_to_do_is_no_part_of_a_step() -> None:
    recording, (learning, _) = run_recorded([1, 1], request_ms=0)
    result: RunResult = learning.result
    steps = steps_of(recording, result.began_ns, result.ended_ns)
    assert 100_000 < min(step.between_ns for step in steps) <= max(step.between_ns for step in steps) < MS
    assert len(steps_of(recording, BEGAN_NS, result.ended_ns)) == len(steps) > len(steps_of(recording, 0, 3 * BEGAN_NS))
    assert sum(step.work.prefill_tokens for step in steps) > 0 < sum(step.work.decode_tokens for step in steps)


def test_the_server_is_started_with_what_was_asked_for() -> None:
    def options(model: dict[str, Any], scheduling: dict[str, Any]) -> VerifyOptions:
        parts = ModelOptions(**model), SchedulingOptions(**scheduling)
        return VerifyOptions(*parts, arrivals=None, workload=None)  # type: ignore[arg-type]

    assert serve_flags(options({}, {}).model_options, options({}, {}).scheduling) == []
    given = options(
        {"kv_cache_memory": 1 << 20, "dtype": "float32"}, {"enable_prefix_caching": False, "max_num_seqs": 4}
    )
    assert serve_flags(given.model_options, given.scheduling) == [
        "--dtype", "float32", "--kv-cache-memory", "1048576", "--max-num-seqs", "4", "--no-enable-prefix-caching",
    ]  # fmt: skip
