"""A simulated server against queueing theory, conservation laws, and the rules of the live one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.sizing import PoolSize
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.recording import Record, RecordedEngine, RecordedScheduler, Step
from headway.policy.step.request import FinishReason
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator import engine
from headway.simulator.answers import Answer, Stuck
from headway.simulator.engine import Host
from headway.simulator.recording import Recording
from headway.simulator.replay import replay
from headway.simulator.server import Simulated, simulate
from headway.simulator.timing import Fixed
from headway.simulator.traffic import Arrival, arrival, made_prompt

MS = 1_000_000


def scheduler(num_blocks: int = 200, max_model_len: int = 512, **options: object) -> Scheduler:
    return SchedulingOptions(**options).scheduler("cpu", PoolSize(num_blocks, max_model_len))  # type: ignore[arg-type]


def poisson(rng: random.Random, count: int, mean_ns: float) -> Iterator[Arrival]:
    """Requests of one token that are answered by one."""
    now = 0.0
    for number in range(count):
        now += rng.expovariate(1 / mean_ns)
        yield arrival(number, round(now), 1, 1)


@dataclass
class Noted:
    """Keeps the plans."""

    timing: Fixed
    plans: list[StepPlan] = field(default_factory=list)

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        self.plans.append(plan)
        return self.timing.times(plan, now)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass
class Exponential:
    """Steps whose length has no memory."""

    mean_ns: float
    rng: random.Random

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        end = now + round(self.rng.expovariate(1 / self.mean_ns))
        return StepTimes(now, end, end)


# --- queueing theory ------------------------------------------------------------------------------------


def test_one_at_a_time_with_fixed_steps_waits_as_m_d_1() -> None:
    """Pollaczek and Khinchine: the mean wait is load / (2 (1 - load)) of a service."""
    load, service = 0.5, MS
    ran = simulate(
        scheduler(max_num_seqs=1, scheduling_policy="fcfs"),
        poisson(random.Random(2), 6000, service / load),
        Fixed(service),
    )
    waits = [answer.ended_ns - answer.arrived_ns - service for answer in ran.answers]
    assert mean(waits) / service == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    for (before, wait), after in zip(zip(ran.answers, waits, strict=True), ran.answers[1:], strict=False):
        expected = max(0, wait + service - (after.arrived_ns - before.arrived_ns))  # Lindley's recursion
        assert after.ended_ns - after.arrived_ns - service == expected
    busy = sum(ran.steps.sampled_ns) - sum(ran.steps.planned_ns)
    assert busy == 6000 * service  # the utilisation law
    assert busy / ran.ended_ns == pytest.approx(load, rel=0.03)


def test_one_at_a_time_with_steps_without_memory_waits_as_m_m_1() -> None:
    load, rng = 0.4, random.Random(3)
    ran = simulate(
        scheduler(max_num_seqs=1, scheduling_policy="fcfs"), poisson(rng, 6000, MS / load), Exponential(MS, rng)
    )
    times = sorted(answer.ended_ns - answer.arrived_ns for answer in ran.answers)
    assert mean(times) / MS == pytest.approx(1 / (1 - load), rel=0.08)
    # The time in the system is exponential: its percentiles are known too.
    assert times[len(times) // 2] / MS == pytest.approx(0.6931 / (1 - load), rel=0.08)
    assert times[len(times) * 99 // 100] / MS == pytest.approx(4.605 / (1 - load), rel=0.15)


# --- conservation ---------------------------------------------------------------------------------------


def mixed(seed: int, count: int = 150) -> list[Arrival]:
    """Requests of all kinds: shared beginnings, several choices, priorities, early ends, clients that go away."""
    rng = random.Random(seed)
    now, found = 0, []
    for number in range(count):
        now += round(rng.expovariate(1 / (8 * MS)))
        length = rng.randrange(1, 200)
        shared = [(rng.randrange(4), 48)] if rng.random() < 0.5 else []
        found.append(
            arrival(
                number,
                now,
                made_prompt(number, length, shared),
                rng.randrange(1, 60),
                output_len=rng.choice([None, rng.randrange(1, 60)]),
                cancel_ns=now + rng.randrange(400 * MS) if rng.random() < 0.15 else None,
                sampling={"n": rng.choice([1, 1, 1, 2])},
                priority=rng.randrange(3),
            )
        )
    return found


@dataclass
class Checked:
    """Steps that take longer for more tokens; the pool is checked at each."""

    scheduler: Scheduler
    plans: list[StepPlan] = field(default_factory=list)

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        self.scheduler.check()
        self.plans.append(plan)
        return StepTimes(now + 1000, now + MS + 10_000 * plan.num_tokens, now + MS + 11_000 * plan.num_tokens)


def run_mixed(seed: int, policy: str = "fcfs", num_blocks: int = 60) -> tuple[Simulated, Checked]:
    made = scheduler(num_blocks, max_num_seqs=8, scheduling_policy=policy, max_queue_time=2.0)
    timing = Checked(made)
    limits, host = QueueLimits(choices=16, tokens=3000), Host(request_ns=500_000, token_ns=2000.0, message_ns=20_000)
    ran = simulate(made, mixed(seed), timing, limits, host)
    assert not made.has_work and made.blocks.num_free == made.blocks.num_blocks
    made.check()
    return ran, timing


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_ledger_closes_and_no_block_is_left(policy: str) -> None:
    ends: set[FinishReason | str] = set()
    preempted = cached = 0
    for seed in range(3):
        ran, _ = run_mixed(seed, policy)
        for answer in ran.answers:
            ledger = answer.ledger
            assert sum(ledger.phases_ns.values()) == ledger.total_ns == answer.ended_ns - answer.arrived_ns
            assert list(answer.token_ns) == sorted(answer.token_ns)
            assert not answer.token_ns or answer.token_ns[-1] <= answer.ended_ns
            assert (answer.finish_reason is None) == bool(answer.refused)
            ends.add(answer.finish_reason or "refused")
        preempted += sum(answer.preemptions for answer in ran.answers)
        cached += sum(answer.cached_tokens for answer in ran.answers)
        assert sum(ran.steps.preempted) == sum(answer.preemptions for answer in ran.answers)
    assert {"stop", "length", "abort", "refused"} <= {str(end) for end in ends}
    assert preempted and cached


def told(answer: Answer) -> tuple[object, ...]:
    return answer.request_id, answer.index, answer.token_ns, answer.finish_reason, answer.ledger.phases_ns


def test_the_same_arrivals_come_to_the_same() -> None:
    (first, _), (again, _), (other, _) = run_mixed(0), run_mixed(0), run_mixed(1)
    assert [told(answer) for answer in first.answers] == [told(answer) for answer in again.answers]
    assert first.steps == again.steps != other.steps


def test_tokens_and_time_are_conserved() -> None:
    """Each token but an answer's last is computed once, and everybody in the batch is there for all of a step."""
    made = scheduler(400, max_num_seqs=16)
    ran = simulate(made, [each for each in mixed(5) if each.cancel_ns is None], Checked(made))
    answers = ran.answers
    computed = sum(answer.prompt_len - answer.cached_tokens + len(answer.token_ns) - 1 for answer in answers)
    assert sum(ran.steps.preempted) == 0
    assert sum(ran.steps.tokens) == computed
    # Little's law of the batch: sequences times time, by steps and by requests.
    waiting = {Phase.QUEUE_CAPACITY, Phase.QUEUE_BLOCKS, Phase.QUEUE_POLICY, Phase.TRANSPORT}
    in_batch = sum(ns for answer in answers for phase, ns in answer.ledger.phases_ns.items() if phase not in waiting)
    steps = zip(ran.steps.planned_ns, ran.steps.sampled_ns, ran.steps.sequences, strict=True)
    assert in_batch == sum((end - begin) * sequences for begin, end, sequences in steps)


@pytest.mark.parametrize(
    "swap", [NO_SWAP, SwapSpace(40, fixed_ns=1000.0, block_ns=20_000.0)], ids=["recompute", "swap"]
)
def test_a_simulation_decides_as_its_recording_does(swap: SwapSpace) -> None:
    """What is told of a simulation is what a live engine would record, and leads the scheduler to the same steps."""
    records: list[Record] = []

    def recorded(config: SchedulerConfig, blocks: KVBlocks) -> RecordedScheduler:
        return RecordedScheduler(config, blocks, lambda record, idle: records.append(record))

    options = SchedulingOptions(max_num_seqs=8, max_num_batched_tokens=64, max_prefill_stall_ms=1.0)
    made = options.scheduler("cpu", PoolSize(60, 512), recorded, swap)
    timing = Checked(made)
    ran = simulate(made, mixed(7), timing)
    engine = RecordedEngine(1, "0", "model", "cpu", "int8", {}, msgspec.to_builtins(made.config), 60, 16, True, 0, 0.0)
    steps = [record for record in records if isinstance(record, Step) and record.items]
    told = [record for record in records if not isinstance(record, RecordedEngine)]
    assert replay(Recording(engine, told)) >= len(steps) == len(ran.steps)
    assert sum(ran.steps.preempted) and any(answer.cached_tokens for answer in ran.answers)
    assert made.host is None or made.host.counts["swap"]


def test_copies_to_the_host_and_back_take_time() -> None:
    made = SchedulingOptions(max_num_seqs=4, enable_prefix_caching=False).scheduler(
        "cpu", PoolSize(10, 160), swap=SwapSpace(20, block_ns=2.0 * MS)
    )
    assert made.host is not None
    made.host.space = SwapSpace(20)  # for its decisions, as if they took none
    plans = Noted(Fixed(MS))
    ran = simulate(made, [arrival(number, 0, 40, 60) for number in range(2)], plans)
    copied = sum(len(swap.blocks) for plan in plans.plans for swap in plan.swaps)
    took = [sampled - planned for planned, sampled in zip(ran.steps.planned_ns, ran.steps.sampled_ns, strict=True)]
    assert copied and all(len(answer.token_ns) == 60 for answer in ran.answers)
    assert sum(took) == MS * (len(took) + copied)


# --- what comes and goes --------------------------------------------------------------------------------


def test_who_is_refused_is_told_why() -> None:
    made = scheduler(num_blocks=8, max_model_len=100, max_num_seqs=2)
    prompts = [(30, 5), (30, 5), (30, 5), (60, 5), (101, 5), (90, 11), (30, 5)]
    coming = [arrival(number, number**9, prompt, tokens) for number, (prompt, tokens) in enumerate(prompts)]
    ran = simulate(made, coming, Fixed(MS), QueueLimits(choices=3, tokens=70))
    why = [(answer.refused, answer.is_final) for answer in ran.answers]
    assert [bool(text) for text, _ in why] == [False, False, True, True, True, True, False]
    assert why[2] == ("the request has 30 prompt tokens, 60 are in the server, and at most 70 may be", False)
    assert not why[3][1] and "101 tokens" in why[4][0] and why[4][1]
    assert why[5][0].startswith("max_tokens is 11 and the prompt has 90 tokens") and why[5][1]
    assert [len(answer.token_ns) for answer in ran.answers] == [5, 5, 0, 0, 0, 0, 5]
    assert all(answer.ledger.total_ns == 0 and answer.ttft_ns is None for answer in ran.answers if answer.refused)


def test_a_client_that_goes_away_frees_its_place_wherever_the_request_is() -> None:
    host = Host(request_ns=MS, token_ns=MS / 10)
    times = {"tokenizing": 2 * MS, "waiting": 6 * MS, "running": 10 * MS, "ended": 90 * MS}
    for where, cancel_ns in times.items():
        made = scheduler(max_num_seqs=1)
        others = [arrival(1, 0, 10, 20), arrival(3, 0, 10, 3)]
        leaving = arrival(2, 0, 30, 20, cancel_ns=cancel_ns)
        coming = [leaving, others[0]] if where in ("running", "ended") else [others[0], leaving, others[1]]
        ran = simulate(made, coming, Fixed(MS), QueueLimits(choices=3), host)
        answer = next(answer for answer in ran.answers if answer.request_id == "2")
        assert (answer.finish_reason == "abort") == (where != "ended")
        assert sum(answer.ledger.phases_ns.values()) == answer.ended_ns
        assert answer.ended_ns == pytest.approx(cancel_ns if where != "ended" else 24 * MS, abs=MS)
        assert (len(answer.token_ns) > 0) == (where in ("running", "ended"))
        assert made.blocks.num_free == made.blocks.num_blocks


def test_a_request_is_taken_up_between_the_tokens_of_those_that_run() -> None:
    coming = [arrival(0, 0, 10, 50), arrival(1, 0, 10, 50), arrival(2, 10 * MS, 10, 2)]
    answers = simulate(scheduler(), coming, Fixed(MS), host=Host(output_ns=3 * MS)).answers
    assert [each.ttft_ns for each in answers] == [MS, MS, 2 * 3 * MS + MS]


def test_an_answer_leads_to_the_next_request() -> None:
    """Two users of a closed loop; each sends again when it has its answer."""
    left = iter(range(2, 20))

    def again(answers: list[Answer]) -> list[Arrival]:
        number = next(left, None)
        return [] if number is None else [arrival(number, answers[0].ended_ns, 10, 5)]

    made = scheduler(max_num_seqs=4)
    ran = simulate(made, [arrival(0, 0, 10, 5), arrival(1, 0, 10, 7)], Fixed(MS), after=again)
    assert len(ran.answers) == 20 and max(ran.steps.sequences) == 2
    assert {answer.finish_reason for answer in ran.answers} == {"length"}


def test_waiting_too_long_ends_a_request() -> None:
    made = scheduler(max_num_seqs=1, max_queue_time=0.01)
    ran = simulate(made, [arrival(0, 0, 10, 20), arrival(1, 0, 10, 20)], Fixed(MS))
    assert [answer.finish_reason for answer in ran.answers] == ["length", "timeout"]
    assert ran.answers[1].ended_ns == pytest.approx(11 * MS, abs=MS)


def test_what_can_never_run_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler()
    monkeypatch.setattr(made, "schedule", lambda now: StepPlan())
    monkeypatch.setattr(engine, "STUCK_NS", 10 * MS)
    with pytest.raises(Stuck, match="1 sequences wait"):
        simulate(made, [arrival(0, 0, 10, 20)], Fixed(MS))
