"""What was recorded says so much that the same steps are planned again, whatever was asked of the engine."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import LLM, SamplingParams
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.recording import (
    Arrival,
    End,
    NewClasses,
    Proposal,
    Record,
    RecordedEngine,
    RecordedScheduler,
    Step,
)
from headway.policy.step.request import FinishReason, sequences_of
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig, StepLimits
from headway.simulator import traffic as simulated
from headway.simulator.recording import Recording, read_recordings
from headway.simulator.replay import DifferentStep, replay
from headway.simulator.server import simulate
from tests.engine.models import write_config
from tests.policy.pooled import some_pooling
from tests.policy.simulation import Simulation, make_request, random_classes
from tests.policy.test_drafts import Drafting


@dataclass
class Recorded(Drafting):
    """A simulation that is recorded."""

    records: list[Record] = field(default_factory=list)

    def make_scheduler(self, config: SchedulerConfig, blocks: KVBlocks) -> RecordedScheduler:
        pool = blocks.num_blocks, blocks.block_size, blocks.enable_prefix_caching
        fields = msgspec.to_builtins(config)
        self.records.append(RecordedEngine(1, "0", "model", "cpu", "int8", {}, fields, *pool, 0, 0.0))
        return RecordedScheduler(config, blocks, lambda record, idle: self.records.append(record))

    def recording(self) -> Recording:
        """The recording as it is read from a file."""
        lines = [msgspec.json.encode(record) for record in self.records]
        engine, *records = [msgspec.json.decode(line, type=Record) for line in lines]  # type: ignore[arg-type]
        return Recording(engine, records)


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "slo"]),
    max_prefill_stall_ms=st.sampled_from([0.001, 0.01]),
    most_drafts=st.sampled_from([0, 3]),
    idle_steps=st.sampled_from([0.0, 0.1]),
    max_queue_time=st.sampled_from([1e-5, 1.0]),
    faults=st.dictionaries(
        st.integers(0, 15), st.tuples(st.sampled_from(["nan", "raises"]), st.integers(0, 40)), max_size=3
    ),
)
def test_the_same_steps_are_planned_again(seed: int, faults: dict[int, tuple[str, int]], **options: object) -> None:
    rng = random.Random(seed)
    classes = random_classes(rng, longest_step_ns=10_000)
    sim = Recorded(rng=rng, faults=faults, classes=classes, **options)  # type: ignore[arg-type]
    beginnings = [[rng.randrange(3, 100) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
    for _ in range(12):
        prompt = rng.choice(beginnings) + [rng.randrange(3, 100) for _ in range(rng.randrange(1, 8))]
        sim.submit_choices(
            prompt,
            rng.randrange(1, 20),
            priority=rng.randrange(-2, 3),
            service_class=rng.choice(["", "chat", "report", "offline"]),
            salt=rng.choice(["", "a"]),
            prompt_logprobs=rng.choice([None, None, 1]),
            stop_token_ids=list(range(3, 3 + rng.randrange(20))),
            n=rng.choice([1, 1, 2]),
        )
        sim.submit_choices(prompt, 1, pooling=some_pooling(rng, 1.0))
        if rng.random() < 0.3:  # a conversation goes on with what came of another
            sim.submit([*rng.choice(sim.sequences).tokens, 1, 2][:60], 3)
        for _ in range(rng.randrange(3)):
            sim.step()
        if rng.random() < 0.2:
            sim.scheduler.abort(rng.choice(sim.sequences), sim.now)
    sim.run_until_done()
    recording = sim.recording()
    assert replay(recording) == sum(isinstance(record, Step) for record in sim.records)
    ends = {record.seq_id: record for record in recording.records if isinstance(record, End)}
    assert [(s.finish_reason, len(s.tokens)) for s in sim.sequences] == [
        (ends[s.seq_id].reason, ends[s.seq_id].length) for s in sim.sequences
    ]
    assert all(isinstance(record, Arrival | Proposal | Step | End) for record in recording.records)
    assert replay(Recording(recording.engine, recording.records[: len(recording.records) // 2])) > 0


def test_pinned_prompts_and_shares_are_part_of_a_recording() -> None:
    rng = random.Random(2)
    classes = ClassTable((ServiceClass(name="a", ttft_ms=9.0, kv=0.4), ServiceClass(name="b", max_kv=0.6)))
    sim = Recorded(num_blocks=20, most_drafts=0, max_model_len=40, policy="slo", classes=classes, rng=rng)
    system = [7] * 19
    request = make_request("pinned", system, 1, sim.now)
    request.pins_prompt = True
    (pinned,) = sequences_of(request, 40, classes)
    sim.sequences.append(pinned)
    sim.scheduler.add(pinned, sim.now)
    sim.run_until_done()
    for _ in range(60):
        begins = system[: rng.randrange(20)]
        prompt = [*begins, *(rng.randrange(3, 100) for _ in range(rng.randrange(1, 12)))]
        sim.submit(prompt, rng.randrange(1, 9), service_class=rng.choice(["a", "b"]))
        sim.step()
    sim.run_until_done()
    blocks = sim.scheduler.blocks
    assert len(blocks.pinned) == 4 and blocks.cached.num_evicted
    assert replay(sim.recording()) == sum(isinstance(record, Step) for record in sim.records)


def test_new_classes_are_part_of_a_recording() -> None:
    tables = [ClassTable((ServiceClass(name="a", queue_timeout_s=wait_s),)) for wait_s in (9.0, 1.0)]
    sim = Recorded(num_blocks=64, most_drafts=0, max_num_seqs=1, classes=tables[0])
    sim.submit([1, 2], 9, service_class="a")
    sim.step()
    patient = sim.submit([1, 2], 3, service_class="a")
    sim.classes = tables[1]
    sim.scheduler.set_classes(tables[1], {})
    hasty = sim.submit([1, 2], 3, service_class="a")
    sim.now += 5 * 10**9
    sim.run_until_done()
    assert (patient.finish_reason, hasty.finish_reason) == (FinishReason.LENGTH, FinishReason.TIMEOUT)
    assert replay(sim.recording()) == sum(isinstance(record, Step) for record in sim.records)
    (told,) = (record for record in sim.recording().records if isinstance(record, NewClasses))
    assert told.table() == tables[1]


def test_limits_change_between_steps_and_are_part_of_a_recording() -> None:
    sim = Recorded(num_blocks=64, most_drafts=0, max_num_seqs=4)
    classes = sim.scheduler.config.classes
    for _ in range(4):
        sim.submit([1, 2], 6)
    sim.step()
    sim.scheduler.set_classes(classes, {}, StepLimits(2, max_prefill_stall_ms=math.inf))
    later = [sim.submit([1, 2], 4) for _ in range(3)]
    sim.step()
    assert len(sim.scheduler.running) == 4, "who runs goes on"
    while not any(each.output_len for each in later):
        sim.step()
    assert len(sim.scheduler.running) == 2
    sim.scheduler.set_classes(classes, {}, StepLimits(4))
    sim.step()
    assert len(sim.scheduler.running) == 3
    sim.run_until_done()
    assert replay(sim.recording()) == sum(isinstance(record, Step) for record in sim.records)
    told = [record.step_limits() for record in sim.recording().records if isinstance(record, NewClasses)]
    assert told == [StepLimits(2, max_prefill_stall_ms=math.inf), StepLimits(4)]


def test_another_decision_is_told() -> None:
    sim = Recorded(num_blocks=64, most_drafts=0)
    sim.submit(list(range(30)), 3)
    sim.run_until_done()
    recording = sim.recording()
    recording.engine.scheduler["max_num_batched_tokens"] = 20
    with pytest.raises(DifferentStep, match="step 1 was recorded as Step") as different:
        replay(recording)
    assert different.value.recorded.items[0].tokens == 16
    assert different.value.plan.scheduled[0].num_tokens == 20


def test_blocks_that_are_found_again_have_one_number() -> None:
    sim = Recorded(num_blocks=64, most_drafts=0)
    sim.submit(list(range(10)), 5)
    sim.run_until_done()
    known = sim.sequences[0].tokens
    sim.submit([*known[:12], 1, 2], 2)
    sim.submit(list(range(10)), 2, salt="other")
    first, again, other = (record.blocks for record in sim.records if isinstance(record, Arrival))
    (end,) = (record for record in sim.records if isinstance(record, End))
    assert len(first) == 2 and [*first, *end.blocks] == again
    assert not {*other} & {*again}
    assert isinstance(sim, Simulation) and max(again) < 2**53


def test_a_real_engine_s_steps(tmp_path: Path) -> None:
    """The steps include preemptions, and prompts that are found in the prefix cache."""
    llm = LLM(
        write_config(tmp_path / "model"), skip_tokenizer_init=True, load_format="dummy", num_threads=1,
        kv_cache_memory=150 * 512, max_model_len=100, max_num_seqs=8, max_num_batched_tokens=16,
        max_prefill_stall_ms=1.0, record_steps=str(tmp_path / "steps"),
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 5 for j in range(9 + 5 * i)]} for i in range(12)]
    wanted = [SamplingParams(max_tokens=20, n=1 + number % 2, ignore_eos=True) for number in range(12)]
    cached = 0
    for _ in range(2):
        cached += sum(output.num_cached_tokens for output in llm.generate(prompts, wanted))
    (recording,) = read_recordings(tmp_path / "steps")
    assert recording.engine.settings["max_num_seqs"] == recording.engine.scheduler_config().max_num_seqs == 8
    steps = [record for record in recording.records if isinstance(record, Step)]
    assert replay(recording) == len(steps) > 40
    assert sum(len(step.preempted) for step in steps) > 0 and cached > 0
    assert sum(item.new for step in steps for item in step.items) == 2 * 18 * 20
    assert all(step.times is not None and step.now <= step.times[0] <= step.times[2] for step in steps)
    recorded = RecordedTimes(iter(steps))
    ran = simulate(
        Scheduler(recording.engine.scheduler_config(), recording.engine.kv_blocks()), arrivals_of(recording), recorded
    )
    assert len(ran.steps) == len(steps) and sum(ran.steps.preempted) > 0


def arrivals_of(recording: Recording) -> list[simulated.Arrival]:
    """Requests with the prompts of a recording, none of which had come before, each when the step before it was done.

    In the engine they came before the next step was planned; at which moment makes no difference to that.
    """
    found: dict[int, simulated.Arrival] = {}
    done_ns = 0
    for record in recording.records:
        if isinstance(record, Step) and record.times is not None:
            done_ns = record.times[2]
        elif isinstance(record, Arrival) and record.parent is not None:
            found[record.parent].request.params.n += 1
        elif isinstance(record, Arrival):
            prompt = [number for number in record.blocks for _ in range(recording.engine.block_size)]
            prompt += [2**60 - record.seq_id] * (record.prompt_len - len(prompt))
            answer = record.max_len - record.prompt_len
            found[record.seq_id] = simulated.arrival(record.seq_id, done_ns, prompt, answer)
    return list(found.values())


@dataclass
class RecordedTimes:
    """Steps take as long as those that were recorded, and must be the same."""

    steps: Iterator[Step]

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        step = next(self.steps)
        planned = [(item.seq_id, item.start, item.num_tokens, item.samples) for item in plan.scheduled]
        assert planned == [(item.seq_id, item.start, item.tokens, item.samples) for item in step.items]
        assert plan.preempted == step.preempted and step.times is not None
        return StepTimes(*step.times)
