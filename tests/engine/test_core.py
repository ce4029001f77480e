"""What an engine says of its steps, on a virtual clock: each takes 10 ms, and a prompt's token 1 ms more."""

from __future__ import annotations

from dataclasses import dataclass

from headway.engine.core import EngineCore
from headway.engine.executor import StepOutcome
from headway.engine.messages import AddRequest, EngineOutputs
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


def engine() -> tuple[EngineCore, Clock]:
    """One that has learnt how long its steps take."""
    clock = Clock()
    scheduler = Scheduler(SchedulerConfig(8, 64, 256, policy="slo", classes=CLASSES), KVBlocks(256, 4, False))
    core = EngineCore(scheduler, clock, clock)
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
    assert refused.error is not None and "than the objective of 90 ms" in refused.error
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
