"""Shares of the KV pool: lent while idle, given back on demand, and never taken."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.plan import ScheduledSequence, StepPlan
from headway.policy.step.request import Sequence, Status
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.sequences import Step
from tests.policy.simulation import Simulation, check_ledger


def classes(
    chat: float = 0.0, report: float = 0.0, offline: float = 0.0, starvation_s: float = 1e6, most: float = 1.0
) -> ClassTable:
    """Three classes with these shares of blocks; `most` is the bound of those without a share."""
    given_ = {"chat": chat, "report": report, "offline": offline}
    ttft_ms = {"chat": {"ttft_ms": 1000.0}, "report": {"ttft_ms": 60_000.0}}
    return ClassTable(
        tuple(
            ServiceClass(
                name=name,
                kv=share,
                max_kv=most if share < most else 1.0,
                starvation_s=starvation_s,
                **ttft_ms.get(name, {}),
            )
            for name, share in given_.items()
        )
    )


class Shared(Simulation):
    """Holds that nobody is preempted whose class has no more than its share, and that a share is there when wanted."""

    def make_scheduler(self, config: SchedulerConfig, blocks: Any) -> Scheduler:
        scheduler = super().make_scheduler(config, blocks)
        slo, preempt = scheduler.policy, scheduler.sequences.preempt
        assert isinstance(slo, SloPolicy)
        prepare, self.slo = slo.prepare, slo
        self.lost: list[str] = []

        def checked(victim: Sequence, plan: StepPlan, now: int) -> None:
            name = victim.service.name
            growth = sum(scheduler.block_manager.growth(s) for s in scheduler.running if s.service.name == name)
            is_bound = not slo.shares.may_use(name, growth)
            is_bound |= any(sequence.has_starved for sequence in scheduler.sequences.values())
            assert is_bound or slo.shares.is_over(name, growth), f"{name} has lost blocks of its share"
            self.lost.append(name)
            preempt(victim, plan, now)

        def prepared(step: Step) -> None:
            prepare(step)
            if not step.plan.wait_until_ns:
                self.check_shares()

        scheduler.sequences.preempt = checked  # type: ignore[method-assign]
        slo.prepare = prepared  # type: ignore[method-assign]
        return scheduler

    def check_plan(self, items: list[ScheduledSequence], ran_before: set[Sequence]) -> None:
        super().check_plan(items, ran_before)
        for name, most in self.slo.shares.most.items():
            assert self.scheduler.blocks.used[name] <= most, f"{name} uses more than its bound"

    def check_shares(self) -> None:
        """Check that there are blocks for the first of each class that fits in its share."""
        scheduler, slo = self.scheduler, self.slo
        if any(sequence.has_starved for sequence in scheduler.sequences.values()) or scheduler.blocks.used[""]:
            return
        head = scheduler.sequences.candidates() if len(scheduler.running) < self.max_num_seqs else []
        for name in slo.shares.blocks:
            first = next((sequence for sequence in head if sequence.service.name == name), None)
            if first is None or not slo.may_start(first, len(scheduler.running)):
                continue
            wanted = scheduler.block_manager.wanted(first)
            if slo.shares.has_blocks_left(name, wanted):
                assert wanted + slo.shares.blocks_kept_from(name) <= scheduler.blocks.num_free


def shared(table: ClassTable, **options: Any) -> Shared:
    options = {"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, "message_ns": 0} | options
    return Shared(policy="slo", classes=table, **options)


def test_an_idle_share_is_lent_and_given_back_when_its_class_comes() -> None:
    sim = shared(classes(chat=0.5))
    offline = [sim.submit([number] * 30, 12, service_class="offline") for number in range(3, 7)]
    for _ in range(4):
        sim.step()
    used = sim.scheduler.blocks.used
    assert used["offline"] >= 32, "most of the pool, half of which is lent"
    chat = sim.submit([9] * 60, 4, service_class="chat")
    sim.step()
    assert chat.status is Status.RUNNING and sim.lost == ["offline"] * len(sim.lost) != []
    words = sim.scheduler.decisions[-1].in_words()
    assert f"{offline[-1].request_id} gives blocks back to chat" in words and "of offline (age)" in words
    sim.run_until_done()
    assert all(sequence.output_len == 12 for sequence in offline)
    sim.check_all_closed()


def test_while_its_class_waits_a_share_is_lent_no_further() -> None:
    sim = shared(classes(chat=0.5), max_num_seqs=3)
    offline = [sim.submit([number] * 50, 4, service_class="offline") for number in range(3, 6)]
    chat = [sim.submit([10 + number] * 30, 20, service_class="chat") for number in range(4)]
    for _ in range(40):
        sim.step()
        waiting = any(sequence.status is Status.WAITING for sequence in chat)
        assert not waiting or sim.scheduler.blocks.used["offline"] <= 20
    sim.run_until_done()
    assert {sequence.output_len for sequence in offline} == {4}


def test_a_share_of_the_last_class_is_its_own_whoever_is_urgent() -> None:
    sim = shared(classes(offline=0.4), max_num_seqs=8)
    offline = sim.submit([3] * 50, 14, service_class="offline")
    for _ in range(3):
        sim.step()
    for number in range(30):
        sim.submit([10 + number] * 40, 10, service_class="chat", ttft_ms=0.0001)
    while offline.status is not Status.FINISHED:
        sim.step()
    assert offline.preemptions == 0


def test_one_that_fits_in_its_share_passes_one_that_lets_nobody_by() -> None:
    sim = shared(classes(offline=0.4), max_bypasses=0)
    sim.submit([3] * 55, 5, service_class="chat")
    sim.step()
    large = sim.submit([4] * 60, 4, service_class="chat", ttft_ms=500.0)
    small = sim.submit([5] * 20, 4, service_class="chat")
    offline = sim.submit([6] * 20, 4, service_class="offline")
    sim.step()
    assert (large.status, small.status, offline.status) == (Status.WAITING, Status.WAITING, Status.RUNNING)
    sim.run_until_done()


def test_a_class_uses_no_more_than_its_bound_though_the_rest_is_idle() -> None:
    sim = shared(classes(most=0.5), max_model_len=40)
    offline = [sim.submit([number] * 24, 16, service_class="offline") for number in range(3, 8)]
    peaks = []
    while any(sequence.status is not Status.FINISHED for sequence in offline):
        sim.step()
        peaks.append(sim.scheduler.blocks.used["offline"])
        assert sim.scheduler.blocks.num_free >= 20
    assert max(peaks) >= 18 and sim.lost == ["offline"] * len(sim.lost)
    long = sim.submit([9] * 36, 4, service_class="offline")
    sim.run_until_done()
    assert long.output_len == 4


def test_one_that_has_starved_is_not_overtaken_within_the_bound_of_its_class() -> None:
    """Below the bound there is always room for short requests, and never for the long one."""
    sim = shared(classes(most=0.5, starvation_s=1e-6), max_model_len=40)

    def two_short_ones(number: int) -> None:
        for each in (2 * number, 2 * number + 1):
            sim.submit([each % 60 + 2, each] * 3, 5 + each % 4, service_class="offline")

    for number in range(4):
        two_short_ones(number)
    sim.step()
    long = sim.submit([90] * 36, 4, service_class="offline")
    for number in range(4, 20):
        two_short_ones(number)
        sim.step()
    assert long.status is Status.FINISHED
    sim.run_until_done()


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(16, 48), max_num_seqs=st.integers(1, 8), mixed=st.booleans())
def test_shares_hold_at_every_step_and_nobody_starves(
    seed: int, num_blocks: int, max_num_seqs: int, mixed: bool
) -> None:
    rng = random.Random(seed)
    names = ("chat", "report", "offline")
    kept = {name: rng.choice([0.0, 0.2, 0.3]) for name in names}
    sim = shared(
        classes(**kept, starvation_s=rng.choice([1e-6, 1e6]), most=rng.choice([0.4, 0.7, 1.0])),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randrange(30),
        max_bypasses=rng.randrange(4),
        rng=rng,
    )
    for _ in range(rng.randrange(5, 30)):
        name = rng.choice(names)
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        salt = "" if mixed else name
        sim.submit_choices(prompt, rng.randrange(1, 20), n=rng.choice([1, 1, 3]), service_class=name, salt=salt)
        for _ in range(rng.randrange(4)):
            sim.step()
        if rng.random() < 0.2:
            sim.scheduler.abort(rng.choice(sim.sequences), sim.now)
        if rng.random() < 0.1:
            sim.scheduler.set_classes(classes(**{name: rng.choice([0.0, 0.3]) for name in names}), {})
    sim.run_until_done()
    sim.check_all_closed()
    for sequence in sim.sequences:
        check_ledger(sequence)
