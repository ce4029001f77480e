"""Prompts in a step: how many tokens of them, so that nobody else in it waits too long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.step import step_time
from headway.policy.step.ledger import Phase
from headway.policy.step.request import Status
from headway.policy.step.step_budget import TOKENS_UNTIL_LEARNT, StepBudget
from headway.policy.step.step_time import StepTimeModel, StepWork, pairs
from tests.policy.exact import MS, Exact
from tests.policy.simulation import Simulation

FIXED_NS, TOKEN_NS, DECODE_NS, PAIR_NS, ROW_NS = 11e6, 2e6, 1e6, 100.0, 4e6


def cost(work: StepWork) -> int:
    """Nanoseconds of a step on a machine that obeys the model."""
    ns = FIXED_NS + TOKEN_NS * work.prefill_tokens + DECODE_NS * work.decode_tokens + PAIR_NS * work.prefill_pairs
    return int(ns + ROW_NS * work.logit_rows)


def learnt(with_logits: bool = False) -> StepTimeModel:
    model = StepTimeModel()
    for number in range(200):
        prompt, start, decodes = number * 7 % 50, number % 5 * 1000, number * 3 % 20
        work = StepWork(prompt, decodes, pairs(start, prompt), logit_rows=prompt * (with_logits and number % 4 == 0))
        model.observe(work, cost(work))
    return model


LEARNT, LEARNT_WITH_LOGITS = learnt(), learnt(with_logits=True)


def test_without_a_bound_only_tokens_count() -> None:
    budget = StepBudget(100, LEARNT)
    budget.share_with(StepWork(decode_tokens=4))
    assert budget.fit(0, 500) == 100
    budget.spend(0, 60)
    assert budget.fit(0, 500) == 40 and not budget.is_spent
    budget.spend(0, 40)
    assert budget.is_spent


def test_prompts_hold_decodes_up_for_no_longer_than_they_may() -> None:
    budget = StepBudget(1000, LEARNT, max_stall_ns=51e6)
    budget.share_with(StepWork(decode_tokens=4))  # 15 ms alone
    assert budget.fit(0, 500) == 25  # 2 ms each, and a little for attention
    budget.spend(0, 20)
    assert budget.fit(0, 500) == 5
    assert budget.fit(20_000, 500) == 2, "a token far into a prompt reads more keys"
    budget.spend(0, 5)
    assert budget.fit(0, 500) == 0 and budget.is_spent


def test_one_that_goes_on_from_the_cache_costs_what_a_decode_costs() -> None:
    budget = StepBudget(1000, Exact(token=1.0, decode=3.0), max_stall_ns=20 * MS)
    budget.share_with(StepWork(decode_tokens=1), slack_ns=23 * MS)  # 13 ms alone
    budget.spend(100, 1, decodes=True)
    assert budget.fit(0, 500) == 7
    budget.spend(0, 5)
    assert budget.fit(0, 1) == 1 and budget.fit(100, 1, decodes=True) == 0


def test_where_decodes_take_longer_prompts_may_take_as_long() -> None:
    budget = StepBudget(1000, LEARNT, max_stall_ns=51e6)
    budget.share_with(StepWork(decode_tokens=90))  # 101 ms alone
    assert budget.fit(0, 500) == 50


def test_the_first_prompt_beside_decodes_gets_its_least() -> None:
    budget = StepBudget(1000, LEARNT, max_stall_ns=0, least=16)
    budget.share_with(StepWork(decode_tokens=2))  # 13 ms alone
    assert budget.fit(0, 500) == 16
    budget.spend(0, 16)
    assert budget.is_spent, "and no other does"


def test_alone_a_prompt_is_held_up_by_nobody_and_holds_up_the_first() -> None:
    budget = StepBudget(512, LEARNT, max_stall_ns=51e6)
    assert budget.fit(0, 500) == 500
    budget.spend(0, 40)  # 91 ms alone
    assert budget.fit(0, 500) == 45
    small = StepBudget(512, LEARNT, max_stall_ns=51e6)
    small.spend(0, 4)  # 19 ms alone
    assert small.fit(0, 500) == 25


def test_until_steps_are_measured_tokens_are_counted() -> None:
    budget = StepBudget(512, StepTimeModel(), max_stall_ns=51e6)
    budget.share_with(StepWork(decode_tokens=4))
    assert budget.fit(0, 500) == TOKENS_UNTIL_LEARNT
    budget.spend(0, TOKENS_UNTIL_LEARNT)
    assert budget.is_spent


def test_tokens_that_want_logits_cost_more() -> None:
    budget = StepBudget(1000, LEARNT_WITH_LOGITS, max_stall_ns=51e6)
    budget.share_with(StepWork(decode_tokens=4))  # 15 ms alone
    assert budget.fit(0, 500) == 25
    assert budget.fit(0, 500, with_logits=True) == 8  # 6 ms each
    budget.spend(0, 6, logit_rows=6)
    assert budget.fit(0, 500) == 7


def test_until_logits_are_measured_few_tokens_are_taken_that_want_them() -> None:
    budget = StepBudget(1000, LEARNT, max_stall_ns=500e6)
    budget.share_with(StepWork(decode_tokens=4))
    assert budget.fit(0, 500) > 200
    assert budget.fit(0, 500, with_logits=True) == TOKENS_UNTIL_LEARNT
    alone = StepBudget(1000, LEARNT, max_stall_ns=500e6)
    assert alone.fit(0, 500, with_logits=True) == 500, "nobody waits"
    unbounded = StepBudget(1000, LEARNT)
    unbounded.share_with(StepWork(decode_tokens=4))
    assert unbounded.fit(0, 500, with_logits=True) == 500


def test_what_a_step_has_none_of_is_not_forgotten_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = learnt(with_logits=True)
    monkeypatch.setattr(step_time, "_PRIOR", "what was known of all costs is given up")
    for number in range(10_000):
        decodes = number % 20
        work = StepWork(decode_tokens=decodes, decode_context=decodes * (number % 7) * 100)
        model.observe(work, cost(work))
    slower = model.prefill_ns(10, 0, with_logits=True) - model.prefill_ns(10, 0)
    assert slower == pytest.approx(10 * ROW_NS, rel=0.01)


@given(duration=st.floats(0, 1e9), start=st.integers(0, 100_000))
def test_tokens_within_a_time_are_all_that_fit(duration: float, start: int) -> None:
    count = LEARNT.prefill_tokens_within(duration, start)
    assert LEARNT.prefill_ns(count, start) <= duration * (1 + 1e-9)
    assert LEARNT.prefill_ns(count + 1, start) > duration * (1 - 1e-9)


def test_tokens_that_cost_nothing_fit_without_end() -> None:
    assert StepTimeModel().prefill_tokens_within(1.0, 0) > 2**30


@pytest.mark.parametrize(
    ("stall_ms", "prompt_logprobs"), [(5.0, None), (50.0, None), (math.inf, None), (5.0, 5), (50.0, 5)]
)
def test_the_gap_between_tokens_is_bounded_while_prompts_come_in(stall_ms: float, prompt_logprobs: int | None) -> None:
    sim = Simulation(
        num_blocks=900,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        max_model_len=1024,
        caching=False,
        max_prefill_stall_ms=stall_ms,
    )
    sim.duration = cost  # type: ignore[method-assign]
    for length in (300, 40, 7, 128):  # of which it learns
        sim.submit(list(range(length)), 30, prompt_logprobs=prompt_logprobs)
        sim.run_until_done()
    readers = [sim.submit([1, 2, 3], 260) for _ in range(8)]
    while any(reader.output_len == 0 for reader in readers):
        sim.step()
    prompts = [sim.submit(list(range(300)), 4, prompt_logprobs=prompt_logprobs) for _ in range(3)]
    longest = 0
    while any(prompt.output_len == 0 for prompt in prompts):
        before = sim.now
        sim.step()
        longest = max(longest, sim.now - before)
    alone_ms = cost(StepWork(decode_tokens=11)) / 1e6
    if math.isinf(stall_ms):
        assert longest > 500e6
    else:
        assert longest < (alone_ms + max(alone_ms, stall_ms)) * 1.1e6
    assert all(reader.status is Status.RUNNING for reader in readers)
    stalls = sim.scheduler.accounting.take_stalls()
    assert (stalls.get(Phase.DECODE_STALL_LOGPROBS, 0) > stalls[Phase.DECODE_STALL_PREFILL]) == (
        prompt_logprobs is not None
    )
    sim.run_until_done()
    sim.check_all_closed()
