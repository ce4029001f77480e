"""A step that is planned while the one before runs: who has a part in it, with which blocks."""

from __future__ import annotations

import pytest

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ahead import Lookahead
from headway.policy.step.plan import UNKNOWN, StepPlan
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from tests.policy.simulation import make_sequence

BLOCK, STOP = 4, 99


def decoding(blocks: int = 64, seats: int = 3, waiting: int = 0) -> tuple[Scheduler, dict[int, list[int]]]:
    """Three sequences that decode, others that wait, and the block tables that plans have told of."""
    scheduler, tables = Scheduler(SchedulerConfig(seats, 64, 64), KVBlocks(blocks, BLOCK)), dict[int, list[int]]()
    for number in range(3 + waiting):
        sequence = make_sequence(str(number), [number + 1] * (5 + number), 20)
        sequence.stop_ids = frozenset({STOP})
        scheduler.add(sequence, 0)
    plan = scheduler.schedule(1)
    tell(tables, plan)
    end(scheduler, plan, 5, 2)
    return scheduler, tables


def tell(tables: dict[int, list[int]], plan: StepPlan) -> None:
    tables |= {state.seq_id: state.block_table for state in plan.new}
    for change in plan.tables:
        tables[change.seq_id][change.start :] = change.blocks


def end(scheduler: Scheduler, plan: StepPlan, token: int, now: int, stopped: int = -1) -> None:
    drawn: dict[int, list[int] | None] = {
        item.seq_id: [STOP if item.seq_id == stopped else token] for item in plan.scheduled if item.samples
    }
    scheduler.complete(plan, drawn, StepTimes(now, now, now))


@pytest.mark.parametrize("last", range(1, 9))
def test_plans_ahead_are_those_of_a_scheduler_that_knows_the_tokens(last: int) -> None:
    """One sequence ends by a token after so many steps, and may be about to get a block; others end by length."""
    (scheduler, tables), (plain, _) = decoding(), decoding()
    lookahead, plan, now = Lookahead(scheduler), scheduler.schedule(3), 3
    while plan.scheduled:
        tell(tables, plan)
        expected = plain.schedule(now)
        work = [(item.seq_id, item.start, item.token_ids, item.samples) for item in plan.scheduled]
        assert work == [(item.seq_id, item.start, item.token_ids, item.samples) for item in expected.scheduled]
        assert plan.work == expected.work
        for sequence in scheduler.running:
            assert tables[sequence.seq_id] == sequence.tables[0].blocks
        ahead = lookahead.behind(plan) if lookahead.may_follow(plan) else None
        assert (ahead is None) == all(sequence.max_len == len(sequence.tokens) + 1 for sequence in scheduler.running)
        if ahead is not None:
            assert all(item.token_ids == [UNKNOWN] for item in ahead.scheduled)
        now += 1
        for each, planned in ((scheduler, plan), (plain, expected)):
            end(each, planned, now, now, 1 if now == 3 + last else -1)
        if ahead is None:
            break
        lookahead.begin(ahead, now)
        assert {change.seq_id for change in ahead.tables} <= set(scheduler.sequences)
        assert scheduler.decisions[-1].decoding == len(ahead.scheduled)
        plan = ahead
    assert not scheduler.sequences and not plain.sequences
    scheduler.check()


def test_somebody_who_waits_is_not_passed_over() -> None:
    """While all seats are taken nobody can be admitted; when one is given back by length, somebody is."""
    scheduler, _ = decoding(waiting=1)
    lookahead = Lookahead(scheduler)
    for now in range(3, 40):
        plan = scheduler.schedule(now)
        ahead = lookahead.behind(plan) if lookahead.may_follow(plan) else None
        ends = any(sequence.max_len == len(sequence.tokens) + 1 for sequence in scheduler.running)
        assert (ahead is None) == ends
        end(scheduler, plan, 5, now)
        if ends:
            break
    assert len(scheduler.running) < 3 and len(scheduler.waiting) == 1
    assert not lookahead.may_follow(plan)


def test_without_blocks_for_all_nothing_is_taken() -> None:
    scheduler, _ = decoding(blocks=16)
    lookahead, blocks = Lookahead(scheduler), scheduler.blocks
    for now in range(3, 9):
        plan = scheduler.schedule(now)
        taken = blocks.allocate(blocks.num_free, "")
        before = [list(sequence.tables[0].blocks) for sequence in scheduler.running]
        growing = any(sequence.room <= sequence.num_computed + 1 for sequence in scheduler.running)
        assert lookahead.may_follow(plan)
        assert (lookahead.behind(plan) is None) == growing
        assert before == [sequence.tables[0].blocks for sequence in scheduler.running]
        blocks.release(taken)
        end(scheduler, plan, 5, now)
