"""Who yields, what a step has to heed and who has room, against closed forms and all that could be decided."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.objectives.promises import (
    DECODE_SHARE,
    LEAST_MARGIN,
    MOST_LEFT_OUT_NS,
    URGENT_SHARE,
    Outlook,
    Promises,
    Yield,
)
from headway.policy.step.accounting import StepTimes
from headway.policy.step.request import Sequence
from headway.policy.step.step_time import StepWork
from tests.policy.exact import MS, Exact, decoding, waiting

# Nothing beside prompts takes time: their pace is the whole machine's.
ALONE = Exact(fixed=0.0, decode=0.0)


def promises(step_time: Exact = ALONE) -> Promises:
    return Promises(step_time, 512, lambda sequence: 0)


def yields(prompts: list[Sequence], now_ms: float = 0.0) -> list[Yield]:
    in_order = sorted(prompts, key=lambda sequence: (sequence.due_ns, sequence.seq_id))
    return promises().yielding(in_order, [], int(now_ms * MS))[0]


def work_ms(prompt: Sequence) -> float:
    return LEAST_MARGIN * prompt.prompt_len


def all_in_time(prompts: tuple[Sequence, ...]) -> bool:
    done = 0.0
    for prompt in sorted(prompts, key=lambda sequence: sequence.due_ns):
        done += work_ms(prompt)
        if done * MS > prompt.due_ns:
            return False
    return True


def most_in_time(prompts: list[Sequence]) -> int:
    return max(
        count
        for count in range(len(prompts) + 1)
        if any(all_in_time(kept) for kept in itertools.combinations(prompts, count))
    )


PROMPTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), max_size=7)


@given(PROMPTS)
def test_the_fewest_prompts_of_one_class_yield(sizes: list[tuple[int, int]]) -> None:
    prompts = [waiting(length, due) for length, due in sizes]
    gone = [each.sequence for each in yields(prompts)]
    kept = tuple(prompt for prompt in prompts if prompt not in gone)
    assert all_in_time(kept) and len(kept) == most_in_time(prompts)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200), st.integers(0, 2)), max_size=7))
def test_nobody_yields_where_a_worse_class_could_have(sizes: list[tuple[int, int, int]]) -> None:
    prompts = [waiting(length, due, rank) for length, due, rank in sizes]
    gone = [each.sequence for each in yields(prompts)]
    kept = tuple(prompt for prompt in prompts if prompt not in gone)
    assert all_in_time(kept)
    first_class = [prompt for prompt in prompts if prompt.rank == 0]
    assert sum(prompt.rank == 0 for prompt in kept) == most_in_time(first_class)
    for prompt in gone:
        for other in kept:
            if other.rank > prompt.rank and other.prompt_len >= prompt.prompt_len:
                instead = tuple(each for each in kept if each is not other)
                assert not all_in_time((*instead, prompt))


def test_no_more_yield_than_the_better_class_makes_needed() -> None:
    """Giving up the small one of the worse class is not enough; then it need not go."""
    small, long, last = waiting(5, 190, rank=1), waiting(100, 200), waiting(95, 201)
    assert [each.sequence for each in yields([small, long, last])] == [long]


def test_why_a_prompt_yields_is_told() -> None:
    oversized, late = waiting(200, 100), waiting(60, 100)
    (first,) = yields([oversized])
    (second,) = yields([late], now_ms=50)
    shorter, longer = waiting(50, 100), waiting(60, 101)
    (third,) = yields([shorter, longer])
    assert [first.reason, second.reason, third.reason] == ["oversized", "late", "overload"]
    assert third.sequence is longer and third.backlog_ns == pytest.approx(110 * LEAST_MARGIN * MS)


def test_a_prompt_is_urgent_once_it_would_take_its_share_of_the_time() -> None:
    for queued, is_urgent in ((40, False), (60, True)):
        first, second = waiting(queued, 100), waiting(1, 101)
        urgent = promises().yielding([first, second], [], 0)[1]
        assert (urgent is first) == is_urgent == (work_ms(first) > URGENT_SHARE * 100)


def test_decoding_with_a_promise_leaves_prompts_what_is_left_of_its_time() -> None:
    """Decoding takes 21 of each 42 ms, so that prompts take twice as long."""
    beside = [decoding(42.0 + 1e-6) for _ in range(10)]
    prompt = waiting(50, 100)
    assert [each.sequence for each in promises(Exact()).yielding([prompt], beside, 0)[0]] == [prompt]
    prompt = waiting(47, 100)
    assert promises(Exact()).yielding([prompt], beside, 0)[0] == []


def test_further_choices_yield_with_the_first() -> None:
    first = waiting(200, 100)
    further = waiting(200, 100, parent=first)
    assert [each.sequence for each in yields([first, further])] == [first, further]


def test_nobody_yields_until_steps_are_known() -> None:
    assert promises(Exact(is_trained=False)).yielding([waiting(200, 100)], [], 0) == ([], None)


DECODES = st.lists(st.tuples(st.sampled_from([None, 15.0, 20.0, 40.0]), st.integers(0, 39)), min_size=1, max_size=7)


def outlook_of(
    heeding: Promises, running: list[Sequence], prompts: list[Sequence], urgent: Sequence | None, now: int
) -> Outlook:
    heeding.yielding([], running, now)
    return heeding.outlook(running, prompts, urgent, now)


@given(DECODES, st.booleans())
def test_decode_slack_is_kept_whenever_anything_keeps_it(states: list[tuple[float | None, int]], hurry: bool) -> None:
    """Whatever could be left out is tried."""
    now = 40 * MS
    running = [decoding(tpot, last) for tpot, last in states]
    promised = [sequence for sequence in running if sequence.tpot_ns < MOST_LEFT_OUT_NS]
    others = [sequence for sequence in running if sequence not in promised]
    heeding = promises(Exact())
    outlook = outlook_of(heeding, running, [], waiting(1, 1) if hurry else None, now)
    attainable = [s for s in promised if heeding.step_ns(len(promised), 0) <= s.tpot_ns]
    allowed = min([s.last_token_ns + s.tpot_ns - now for s in attainable], default=math.inf)
    assert outlook.slack_ns * LEAST_MARGIN == pytest.approx(allowed)
    kept = [sequence for sequence in others if sequence not in outlook.left_out]
    feasible = [n for n in range(len(others) + 1) if heeding.step_ns(len(promised) + n, 0) <= allowed]
    if hurry:
        assert kept == []
    else:
        assert len(kept) == max(feasible, default=0)
    assert all(stays.last_token_ns <= left.last_token_ns for stays in kept for left in outlook.left_out)


@given(st.integers(0, 6), st.integers(0, 6), st.sampled_from([20.0, 40.0]), st.integers(0, 39))
def test_answers_that_were_late_go_on_beside_an_urgent_prompt(
    others: int, late: int, tpot_ms: float, last: int
) -> None:
    now, heeding = 40 * MS, promises(Exact())
    lates = [decoding(tpot_ms, last, yielded="late") for _ in range(late)]
    running = [decoding(tpot_ms, 39), *lates, *(decoding(None, number) for number in range(others))]
    outlook = outlook_of(heeding, running, [], waiting(1, 1), now)
    assert [sequence for sequence in running if sequence not in outlook.left_out] == running[: 1 + late]


@given(PROMPTS, st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=1, max_size=4))
def test_what_is_late_already_never_makes_a_promise_late(
    sizes: list[tuple[int, int]], late_sizes: list[tuple[int, int]]
) -> None:
    prompts = [waiting(*size) for size in sizes]
    late = [waiting(length, 1, yielded="late", renewed_ns=due * MS) for length, due in late_sizes]
    in_order = sorted([*prompts, *late], key=lambda sequence: (sequence.planned_ns, sequence.seq_id))
    gone = [each.sequence for each in promises().yielding(in_order, [], 0)[0]]
    without = [each.sequence for each in yields(prompts)]
    assert len([each for each in gone if each in prompts]) == len(without)


def test_one_that_was_left_out_for_long_gets_a_token_and_no_other_with_it() -> None:
    now = 10_000 * MS
    promised = decoding(12.0, 9_999)
    others = [decoding(None, 7_000 - number) for number in range(3)]
    outlook = outlook_of(promises(Exact()), [promised, *others], [], None, now)
    assert outlook.left_out == [others[1], others[0]]
    starved = decoding(None, 9_990, has_starved=True)
    outlook = outlook_of(promises(Exact()), [promised, *others, starved], [], None, now)
    assert outlook.left_out == [others[1], others[0]]


def test_a_promise_that_can_t_be_kept_binds_nobody() -> None:
    impossible, other = decoding(5.0), decoding(40.0)
    heeding = promises(Exact())
    outlook = outlook_of(heeding, [impossible, other], [], None, 0)
    assert outlook.tightest is other
    assert heeding.has_room_for(waiting(10, 100, tpot_ns=40 * MS))
    assert heeding.has_room_for(waiting(10, 100, tpot_ns=5 * MS))


def test_newcomers_have_room_up_to_a_share_of_the_tightest_time() -> None:
    heeding = promises(Exact())
    most = int(DECODE_SHARE * 40 / LEAST_MARGIN - 10)
    for running in range(most + 1):
        outlook_of(heeding, [decoding(40.0) for _ in range(running)], [], None, 0)
        assert heeding.has_room_for(waiting(10, 100, tpot_ns=40 * MS)) == (running < most)
        assert heeding.has_room_for(waiting(10, None)), "it can be left out"


def test_time_between_steps_is_followed() -> None:
    heeding = promises()
    for start in range(0, 10_000, 100):
        heeding.heed(start * MS, [StepTimes(start * MS + MS, (start + 50) * MS, (start + 52) * MS)])
    assert heeding.between_steps_ns == pytest.approx(3 * MS, rel=1e-3)
    for start in range(10_000, 20_000, 55):  # planned 3 ms after the last was sampled
        heeding.heed(start * MS, [StepTimes(start * MS + MS, (start + 50) * MS, (start + 52) * MS)])
    assert heeding.between_steps_ns == pytest.approx(6 * MS, rel=1e-2)
    assert heeding.step_ns(0, 0) == pytest.approx(
        heeding.between_steps_ns + LEAST_MARGIN * ALONE.predict_ns(StepWork())
    )


def test_drafts_take_no_more_than_the_slack() -> None:
    heeding, decodes = promises(Exact()), StepWork(decode_tokens=4)
    assert heeding.drafts_within(decodes, 20.5 * MS) == 6
    assert heeding.drafts_within(decodes, 14 * MS) == heeding.drafts_within(decodes, 3 * MS) == 0
    assert heeding.drafts_within(decodes, math.inf) == 512
    assert promises(Exact(decode=0.0)).drafts_within(decodes, 20 * MS) == 512
