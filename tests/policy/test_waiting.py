"""Who waits, for whom, and how long: better priorities, ageing, expiry, and a prefix that is not looked up twice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.policy.cache.prefix_index import PrefixIndex
from headway.policy.objectives import orders
from headway.policy.objectives.orders import AGEING_NS, PRIORITY
from headway.policy.objectives.priority import PriorityPolicy
from headway.policy.objectives.service_class import ClassTable, ServiceClass
from headway.policy.step.ledger import Phase
from headway.policy.step.request import FinishReason, Sequence, Status
from tests.policy.simulation import Simulation

SECOND = 10**9


def busy(policy: str = "priority", **options: Any) -> tuple[Simulation, list[Sequence]]:
    """A simulation whose two seats are taken by long answers of priority 5."""
    sim = Simulation(max_num_seqs=2, policy=policy, **options)
    running = [sim.submit([1, 2, 3], 40, priority=5) for _ in range(2)]
    sim.step()
    assert all(sequence.output_len == 1 for sequence in running)
    return sim, running


# --- a better priority ----------------------------------------------------------------------------


def test_a_better_priority_takes_the_seat_of_the_last_and_answers_at_once() -> None:
    sim, (first, last) = busy()
    urgent = sim.submit([7, 8], 3, priority=0)
    sim.step()
    assert urgent.output_len == 1
    assert (first.status, last.status) == (Status.RUNNING, Status.WAITING)
    assert (last.displacements, last.preemptions) == (1, 1)
    sim.run_until_done()
    assert (first.output_len, last.output_len) == (40, 40)
    assert last.ledger.phases_ns[Phase.DECODE_STALL_PREEMPTED] > 0
    sim.check_all_closed()


def test_an_equal_priority_and_another_policy_take_no_seat() -> None:
    for policy, priority in (("priority", 5), ("fcfs", 0)):
        sim, running = busy(policy)
        waits = sim.submit([7, 8], 3, priority=priority)
        sim.step()
        assert waits.status is Status.WAITING
        sim.run_until_done()
        assert all(sequence.preemptions == 0 for sequence in running)
        assert Phase.QUEUE_POLICY not in waits.ledger.phases_ns


def test_a_better_priority_takes_blocks_where_seats_are_free() -> None:
    sim = Simulation(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=64, policy="priority", caching=False)
    holders = [sim.submit(list(range(20)), 8, priority=5) for _ in range(2)]
    sim.step()
    assert sim.scheduler.blocks.num_free == 6
    urgent = sim.submit(list(range(30, 54)), 2, priority=0)
    sim.step()
    assert urgent.status is Status.RUNNING and [s.displacements for s in holders] == [0, 1]
    sim.run_until_done()
    sim.check_all_closed()


def test_nobody_goes_when_all_that_may_go_would_not_be_enough() -> None:
    sim = Simulation(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=64, policy="priority", caching=False)
    equal = sim.submit(list(range(32)), 8, priority=0)
    worse = sim.submit([1, 2], 8, priority=5)
    sim.step()
    large = sim.submit(list(range(40)), 2, priority=0)
    sim.step()
    assert (equal.status, worse.status, large.status) == (Status.RUNNING, Status.RUNNING, Status.WAITING)
    sim.run_until_done()
    assert worse.displacements == 0


def test_a_better_priority_does_not_wait_for_a_long_prompt_under_way() -> None:
    sim = Simulation(num_blocks=64, max_num_batched_tokens=8, max_model_len=128, policy="priority")
    long = sim.submit(list(range(80)), 2, priority=5)
    sim.step()
    urgent = sim.submit([1, 2, 3], 2, priority=0)
    sim.step()
    assert urgent.output_len == 1 and long.output_len == 0
    sim.run_until_done()
    sim.check_all_closed()


def test_who_was_displaced_often_keeps_its_seat() -> None:
    sim = Simulation(max_num_seqs=1, policy="priority")
    patient = sim.submit([1, 2, 3], 30, priority=5)
    for _ in range(int(PRIORITY.displaces)):
        sim.step()
        assert patient.status is Status.RUNNING
        urgent = sim.submit([7, 8], 2, priority=0)
        while urgent.status is not Status.FINISHED:
            sim.step()
    sim.step()
    waits = sim.submit([7, 8], 2, priority=0)
    while patient.status is not Status.FINISHED:
        sim.step()
        assert waits.status is Status.WAITING
    assert patient.displacements == PRIORITY.displaces and patient.output_len == 30
    sim.run_until_done()
    sim.check_all_closed()


def test_a_wait_for_a_better_priority_that_came_later_is_the_policys() -> None:
    sim = Simulation(max_num_seqs=1, policy="priority")
    sim.submit([1], 5, priority=-5)
    sim.step()
    waits = sim.submit([1], 3, priority=5)
    sim.step()
    assert waits.ledger.phases_ns.get(Phase.QUEUE_POLICY, 0) == 0
    sim.submit([1], 5, priority=0)
    sim.run_until_done()
    assert waits.ledger.phases_ns[Phase.QUEUE_CAPACITY] > 0  # for the one that came before it
    assert waits.ledger.phases_ns[Phase.QUEUE_POLICY] > 0  # for the one that came after it
    sim.check_all_closed()


def test_steps_in_which_nobody_comes_or_goes_compare_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the policy would cost time in every step in which many run and many wait."""
    keys: list[Sequence] = []
    counting = replace(PRIORITY, admission=lambda s: (keys.append(s), orders.priority(s))[1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(PriorityPolicy, "orders", counting)
    sim, _ = busy()
    for number in range(50):
        sim.submit([1, 2], 3, priority=5 + number % 3)
    sim.step()
    compared = len(keys)
    for _ in range(20):
        sim.step()
    assert len(keys) == compared
    sim.run_until_done()


def test_waiting_ages_so_that_an_endless_stream_of_better_priorities_starves_nobody() -> None:
    sim = Simulation(max_num_seqs=1, policy="priority", longest_step_ns=SECOND)
    low = sim.submit([1], 4, priority=3)
    began = sim.now
    while low.status is not Status.FINISHED:
        if sum(s.status is Status.WAITING for s in sim.sequences) < 3:
            sim.submit([1, 2], 3, priority=0)
        sim.step()
        assert sim.now - began < 3 * AGEING_NS + 60 * SECOND
    assert sim.now - began > AGEING_NS, "it did not have to wait: this test shows nothing"
    sim.run_until_done()
    sim.check_all_closed()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    max_num_seqs=st.integers(1, 4),
    num_blocks=st.integers(16, 24),
    longest_step_ns=st.sampled_from([1_000, SECOND, AGEING_NS]),
)
def test_everything_finishes_however_priorities_come(
    seed: int, max_num_seqs: int, num_blocks: int, longest_step_ns: int
) -> None:
    rng = random.Random(seed)
    sim = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        policy="priority",
        longest_step_ns=longest_step_ns,
        rng=rng,
    )
    for _ in range(30):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        choices = 2 if rng.random() < 0.2 else 1
        sim.submit_choices(prompt, rng.randrange(1, 20), n=choices, priority=rng.randrange(-3, 4))
        for _ in range(rng.randrange(4)):
            sim.step()
    sim.run_until_done()
    sim.check_all_closed()
    assert all(s.finish_reason is FinishReason.LENGTH for s in sim.sequences)


# --- expiry ---------------------------------------------------------------------------------------


def test_who_waits_too_long_is_ended_without_having_run() -> None:
    sim, running = busy("fcfs", max_queue_time=5.0)
    late = [sim.submit([7, 8], 3) for _ in range(2)]
    sim.now += 5 * SECOND - 100_000
    sim.step()
    assert [s.status for s in late] == [Status.WAITING] * 2
    sim.now += 200_000
    sim.step()
    for sequence in late:
        assert (sequence.finish_reason, sequence.steps) == (FinishReason.TIMEOUT, 0)
        assert set(sequence.ledger.phases_ns) <= {Phase.QUEUE_CAPACITY, Phase.SCHEDULE}
    sim.run_until_done()
    assert all(s.finish_reason is FinishReason.LENGTH for s in running)
    sim.check_all_closed()


def test_each_class_waits_as_long_as_it_may() -> None:
    patient = ServiceClass(name="patient", queue_timeout_s=9.0)
    classes = ClassTable((ServiceClass(name="hasty", queue_timeout_s=2.0), patient, ServiceClass(name="any")))
    sim, _ = busy("fcfs", classes=classes, max_queue_time=5.0)
    began = sim.now
    waiting = [sim.submit([7, 8], 3, service_class=name) for name in ("patient", "any", "hasty", "hasty")]
    ended_after: dict[int, int] = {}
    for second in range(1, 8):
        sim.now = began + second * SECOND + 100
        sim.step()
        for sequence in waiting:
            if sequence.finish_reason is FinishReason.TIMEOUT:
                ended_after.setdefault(sequence.seq_id, second)
    assert [ended_after.get(sequence.seq_id) for sequence in waiting] == [5, 5, 2, 2], "or as --max-queue-time says"
    sim.run_until_done()
    sim.check_all_closed()


def test_who_has_been_served_does_not_expire() -> None:
    sim = Simulation(num_blocks=10, block_size=4, max_model_len=32, caching=False, max_queue_time=1.0)
    early, late = (sim.submit(list(range(12)), 16) for _ in range(2))
    while not late.preemptions:
        sim.step()
    sim.now += 10 * SECOND
    sim.run_until_done()
    assert (early.finish_reason, late.finish_reason) == (FinishReason.LENGTH, FinishReason.LENGTH)


def test_choices_of_a_request_expire_together_or_not_at_all() -> None:
    sim, _ = busy("fcfs", max_queue_time=1.0)
    choices = sim.submit_choices(list(range(10)), 4, n=3)
    sim.now += 2 * SECOND
    sim.step()
    assert {s.finish_reason for s in choices} == {FinishReason.TIMEOUT}
    served = Simulation(max_num_seqs=1, max_queue_time=1.0)
    choices = served.submit_choices(list(range(10)), 4, n=2)
    served.step()
    served.now += 2 * SECOND
    served.run_until_done()
    assert {s.finish_reason for s in choices} == {FinishReason.LENGTH}


# --- a prefix that is known already ---------------------------------------------------------------


def test_a_blocked_candidates_prefix_is_not_matched_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation(num_blocks=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    prompt = list(range(60))
    sim.submit(prompt, 60)
    sim.step()
    blocked = sim.submit([*prompt, *range(64)], 2)  # shares 15 blocks
    lookups = Counter[int | str]()
    child = PrefixIndex.child

    def counted(index: PrefixIndex, parent: int | str, tokens: tuple[int, ...]) -> int | None:
        lookups[parent] += 1
        return child(index, parent, tokens)

    monkeypatch.setattr(PrefixIndex, "child", counted)
    sim.step()
    assert lookups.total() > 0 and blocked.prefix_match is not None and len(blocked.prefix_match.blocks) == 15
    lookups.clear()
    for _ in range(40):  # in which ten blocks are registered, each of which might be the next of the prefix
        sim.step()
    assert blocked.status is Status.WAITING
    assert lookups.total() <= 2 * 10
    sim.run_until_done()
    assert blocked.cached_tokens == 60
    sim.check_all_closed()
