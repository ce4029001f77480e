"""Micro-batches do what the step does, and a step is divided where that is measured to be worth it."""

from __future__ import annotations

import random

from headway.policy.cache.checkpoints import Checkpoint
from headway.policy.step.micro_batches import ROWS, MicroBatches, divided
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.step_time import StepWork


def prompt(seq_id: int, tokens: int, start: int = 0, **more: object) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, list(range(start, start + tokens)), False, 1, **more)  # type: ignore[arg-type]


def plan_of(*scheduled: ScheduledSequence, pools: bool = False) -> StepPlan:
    return StepPlan([*scheduled], work=work_of([*scheduled]), pools=pools)


def test_parts_have_every_token_once_in_order() -> None:
    draw = random.Random(1)
    for _ in range(300):
        items = [
            prompt(n, draw.randint(1, 200), draw.randint(0, 50))
            if draw.random() < 0.4
            else ScheduledSequence(n, draw.randint(1, 90), [7] * (drafts := draw.randint(1, 4)), True, drafts)
            for n in range(draw.randint(1, 60))
        ]
        plan = plan_of(*items)
        count = draw.randint(2, 8)
        parts = divided(plan, count)
        assert 1 <= len(parts) <= count and all(part.scheduled for part in parts)
        assert sum((part.work for part in parts), StepWork()) == plan.work
        for item in items:
            own = [each for part in parts for each in part.scheduled if each.seq_id == item.seq_id]
            assert [token for each in own for token in each.token_ids] == item.token_ids
            assert [each.start for each in own] == [
                item.start + sum(e.num_tokens for e in own[:n]) for n in range(len(own))
            ]
            assert [each.samples for each in own] == [0] * (len(own) - 1) + [item.samples]
            assert len(own) == 1 or not item.decoding
        sizes = [part.num_tokens for part in parts]
        assert max(sizes) < -(-plan.num_tokens // count) + ROWS + 4


def test_what_comes_before_a_step_comes_before_its_first_part() -> None:
    plan = plan_of(prompt(1, 100))
    plan.copies, plan.preempted = [(1, 2)], [5]
    first, second = divided(plan, 2)
    assert (first.copies, first.preempted) == ([(1, 2)], [5])
    assert not (second.copies or second.preempted or second.new or second.tables)


def test_states_are_kept_in_the_part_that_comes_to_them() -> None:
    keeps = (Checkpoint(80, 1), Checkpoint(98, 2), Checkpoint(100, 3))
    parts = divided(plan_of(prompt(1, 64, 50, keeps=keeps)), 2)
    assert [part.scheduled[0].keeps for part in parts] == [keeps[:1], keeps[1:]]


def test_prompts_whose_tokens_have_results_are_not_cut() -> None:
    with_logits, alone = prompt(1, 100, logit_rows=99), prompt(2, 100)
    assert [part.scheduled for part in divided(plan_of(with_logits), 2)] == [[with_logits]]
    assert [part.scheduled for part in divided(plan_of(with_logits, alone, pools=True), 2)] == [[with_logits], [alone]]


def learnt(stages: int, fixed_ms: float, token_ms: float) -> MicroBatches:
    """What has seen a machine on which a turn takes so long."""
    batches = MicroBatches(stages)
    for number in range(60):
        plan = plan_of(prompt(1, 256)) if number % 6 == 0 else plan_of(ScheduledSequence(1, number + 1, [7], True, 1))
        count = len(batches.divide(plan))
        turn_ms = fixed_ms + token_ms * plan.num_tokens / count
        turns = count + stages - 1
        batches.observe(plan.work, count, turns, round(1e6 * turn_ms * turns))
    return batches


def test_a_step_is_divided_where_parts_are_quicker_together() -> None:
    """With t = fixed + T / count * token, (count + 1) t is least for count = sqrt(T token / fixed) (two stages)."""
    batches = learnt(2, fixed_ms=20.0, token_ms=0.5)
    assert [len(batches.divide(plan_of(prompt(1, tokens)))) for tokens in (40, 640)] == [1, 4]
    decoding = plan_of(*(ScheduledSequence(n, 9, [7], True, 1) for n in range(16)))
    assert batches.divide(decoding) == [decoding]


def test_what_is_followed_is_divided_among_the_stages_where_its_parts_are_shorter() -> None:
    batches = learnt(2, fixed_ms=20.0, token_ms=0.5)
    decoding = [plan_of(*(ScheduledSequence(n, 9, [7], True, 1) for n in range(size))) for size in (16, 48, 256)]
    assert [len(batches.divide(plan, is_followed=True)) for plan in decoding] == [1, 2, 2]


def test_a_step_is_not_divided_without_stages_or_before_anything_is_known() -> None:
    plan = plan_of(prompt(1, 640))
    assert learnt(1, 20.0, 0.5).divide(plan) == [plan]
    assert MicroBatches(2).divide(plan) == [plan]
