"""What an engine says of its steps, on a virtual clock: each takes 10 ms, and a prompt's token 1 ms more."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import pytest

from headway.engine.build import build_engine
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.executor import StepOutcome
from headway.engine.explaining import explanation
from headway.engine.marks import StepMarks
from headway.engine.messages import AddRequest, EngineOutputs, Explain, SequenceTimings
from headway.engine.prepare import EngineError
from headway.engine.roofline import StepRoofline
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig

MS = 1_000_000
CLASSES = ClassTable(
    (
        ServiceClass(name="chat", ttft_ms=100, tpot_ms=50, window_ms=(0, 40), when_late="refuse"),
        ServiceClass(name="offline"),
    )
)


@dataclass
class Clock:
    now: int = MS

    vocab_size = 1000
    generates = True

    def __call__(self) -> int:
        return self.now

    def run(self, plan: StepPlan) -> StepOutcome:
        launched = self.now
        self.now += (10 + plan.work.prefill_tokens) * MS
        times = StepTimes(launched, self.now, self.now)
        return StepOutcome(times, {item.seq_id: [5] for item in plan.scheduled if item.samples})

    def forget(self, seq_id: int) -> None:
        pass

    def recover(self) -> None:
        pass


def ask(core: EngineCore, clock: Clock, name: str, prompt: int, max_tokens: int, service_class: str = "chat") -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    ids = [int(name) * 7 % 900 + 3] * prompt
    core.add(AddRequest(name, ids, params, [], arrival_ns=clock.now, sent_ns=clock.now, service_class=service_class))


def engine(most: int = 8, blocks: int = 256, roofline: StepRoofline | None = None) -> tuple[EngineCore, Clock]:
    """One that has learnt how long its steps take, and runs so many sequences at once."""
    clock = Clock()
    config = SchedulerConfig(most, 8 * most, 256, policy="slo", classes=CLASSES)
    scheduler = Scheduler(config, KVBlocks(blocks, 4, False))
    core = EngineCore(scheduler, clock, clock, roofline=roofline)
    for number in range(20):
        ask(core, clock, str(number), 1 + number % 7, 3, "offline")
        while core.has_work:
            core.step()
    clock.now += 1000 * MS
    return core, clock


def run(core: EngineCore, clock: Clock) -> list[EngineOutputs]:
    said = []
    while core.has_work:
        clock.now += core.waits_ms * MS
        said.append(core.step())
    return said


def test_what_was_promised_and_predicted_is_told_with_each_step() -> None:
    core, clock = engine()
    ask(core, clock, "100", 8, 5)
    ask(core, clock, "101", 8, 5, "offline")
    steps = [each.stats for each in run(core, clock)]
    assert all(abs(step.predicted_ns / step.forward_ns - 1) < 0.25 for step in steps)
    promised = [step.slack_ns for step in steps if step.slack_ns]
    assert len(promised) == 4 and all(20 * MS < slack < 50 * MS for slack in promised)


def test_who_can_not_be_in_time_is_refused_at_once_with_the_time_to_come_again() -> None:
    core, clock = engine()
    ask(core, clock, "100", 200, 5)
    (refused,) = core.step().outputs
    assert (refused.finish_reason, refused.token_ids) == ("late", [])
    assert refused.error is not None and "than the 90 ms that the engine has of its objective" in refused.error
    assert "its prompt alone takes longer" in refused.error
    assert refused.retry_after_s >= 1 and refused.timings is not None and refused.timings.yielded == "oversized"
    assert not core.has_work


def test_an_idle_engine_waits_for_company_where_requests_come_close_together() -> None:
    core, clock = engine()
    policy = core.scheduler.policy
    assert isinstance(policy, SloPolicy)
    for _ in range(100):
        policy.window.arrived(clock.now)
        clock.now += MS // 2
    ask(core, clock, "100", 1, 1)
    assert core.step().stats.windows == 1
    assert 1 <= core.waits_ms <= 40
    ask(core, clock, "101", 1, 1)
    clock.now += 40 * MS
    assert core.waits_ms == 0
    assert core.step().stats.scheduled_sequences == 2


def test_who_looks_sees_each_ledger_as_it_stands_and_changes_nothing() -> None:
    looked: list[SequenceTimings] = []
    blind: list[SequenceTimings] = []
    for told in (looked, blind):
        core, clock = engine()
        for name, prompt in (("100", 8), ("101", 20), ("102", 200)):
            ask(core, clock, name, prompt, 6, "offline")
        sent = clock.now
        while core.has_work:
            told += [output.timings for output in core.step().outputs if output.timings]
            if told is looked:
                explained = explanation(core.scheduler, Explain(4, 0, 8), clock())
                assert len(explained.steps) == 4 and explained.steps[-1].took_ns >= 10 * MS
                for each in explained.sequences:
                    assert sum(each.phases_ns.values()) == clock.now - sent
                    assert each.phase == ("decode_compute" if each.tokens else "prefill_compute")
                    assert each.blocks >= each.computed // 4 and each.slack_ns is None
    assert [each.phases_ns for each in looked] == [each.phases_ns for each in blind]


def test_who_looks_is_told_what_is_new_and_how_much_time_is_left() -> None:
    core, clock = engine()
    before = explanation(core.scheduler, Explain(100), clock()).steps[-1].planned_ns
    for number in range(12):
        ask(core, clock, str(100 + number), 3, 9)
    core.step()
    core.step()
    explained = explanation(core.scheduler, Explain(100, before, 100), clock())
    assert len(explained.steps) == 2 and explained.steps[-1].decoding == 8
    running, waiting = explained.sequences[:8], explained.sequences[8:]
    assert [each.phase for each in running] == ["decode_compute"] * 8
    assert all(each.slack_ns is not None and 0 < each.slack_ns <= 50 * MS for each in running)
    assert [each.phase for each in waiting] == ["queue_capacity"] * 4
    assert all(each.slack_ns == 90 * MS - (clock.now - each.arrival_ns) for each in waiting)
    assert len(explanation(core.scheduler, Explain(1, 0, 3), clock()).sequences) == 3
    assert explanation(core.scheduler, Explain(1, clock.now), clock()).steps == []
    (silent,) = explanation(core.scheduler, Explain(1, with_words=False), clock()).steps
    assert silent.words == "" and silent.decoding == 8


def test_looking_costs_the_engine_less_than_a_hundredth_of_a_core() -> None:
    """Twice a second, with as many sequences and steps as a look has at most."""
    core, clock = engine(64, 4096)
    for number in range(64):
        ask(core, clock, str(1000 + number), 3, 100, "offline")
    for _ in range(70):
        core.step()
    encoder, took = msgspec.msgpack.Encoder(), []
    for _ in range(20):
        began = time.process_time()
        encoded = encoder.encode(explanation(core.scheduler, Explain(64, 0, 64, with_words=False), clock()))
        took.append(time.process_time() - began)
    assert len(encoded) > 64 * 50
    assert min(took) < 0.005, f"{1e3 * min(took):.1f} ms"


def test_steps_are_ranges_for_profilers_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[str] = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", ranges.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: ranges.append("end"))
    core, clock = engine()
    core.hooks.append(StepMarks())
    ask(core, clock, "100", 20, 3)
    ask(core, clock, "101", 8, 3)
    run(core, clock)
    assert ranges[1::2] == ["end"] * (len(ranges) // 2)
    assert ranges[0] == "step: 28 tokens of 2 prompts, 0 decoding" and "step: 2 decoding" in ranges
    with pytest.raises(EngineError, match="nvtx is set, but the device is cpu"):
        build_engine(EngineConfig(device="cpu", nvtx=True))
