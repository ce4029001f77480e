"""The rule that divides a step, the model that it stands on, and the ledger's closing."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.step.accounting import Accounting, StepTimes
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.plan import ScheduledSequence, work_of
from headway.policy.step.request import Sequence, Status
from headway.policy.step.step_time import StepTimeModel, StepWork, pairs
from tests.policy.simulation import check_ledger, make_sequence


def test_a_ledger_closes_whatever_the_clock_does() -> None:
    ledger = Ledger(100)
    ledger.mark(Phase.RECEIVE, 130)
    ledger.mark(Phase.TOKENIZE, 130)
    ledger.mark(Phase.TRANSPORT, 120)  # a clock that seems to run backwards adds nothing
    ledger.mark(Phase.SEND, 200)
    assert ledger.phases_ns == {Phase.RECEIVE: 30, Phase.SEND: 70}
    assert ledger.total_ns == 100


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.integers(0, 10**12)), max_size=30))
def test_phases_sum_to_the_last_mark(marks: list[tuple[Phase, int]]) -> None:
    ledger = Ledger(5)
    for phase, now in marks:
        ledger.mark(phase, now)
    assert sum(ledger.phases_ns.values()) == ledger.last_ns - 5


def test_a_clock_gives_each_ledger_what_passed_since_it_joined() -> None:
    clock, ledger = Ledger(), Ledger(40)
    clock.mark(Phase.QUEUE_BLOCKS, 40)
    since = dict(clock.phases_ns)
    clock.mark(Phase.QUEUE_BLOCKS, 55)
    clock.mark(Phase.QUEUE_CAPACITY, 60)
    ledger.mark_parts(clock.phases_ns, since)
    assert ledger.phases_ns == {Phase.QUEUE_BLOCKS: 15, Phase.QUEUE_CAPACITY: 5}
    assert ledger.last_ns == 60


def linear_time(work: StepWork) -> int:
    """Nanoseconds of a step on a machine that obeys the model exactly."""
    return (
        4_000_000
        + 50_000 * work.prefill_tokens
        + 100_000 * work.decode_tokens
        + 20 * work.prefill_pairs
        + 300 * work.decode_context
        + 200_000 * work.logit_rows
    )


def random_work(rng: random.Random) -> StepWork:
    prefill = rng.choice([0, rng.randrange(1, 512)])
    decode = rng.choice([0, rng.randrange(1, 32)])
    if not prefill and not decode:
        decode = 1
    rows = rng.choice([0, 0, 0, prefill])
    return StepWork(prefill, decode, prefill * rng.randrange(1, 2000), decode * rng.randrange(1, 2000), rows)


def learnt() -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel()
    for _ in range(400):
        work = random_work(rng)
        model.observe(work, int(linear_time(work) * rng.uniform(0.95, 1.05)))
    return model


LEARNT = learnt()


def test_the_step_time_model_learns_a_linear_machine() -> None:
    rng = random.Random(2)
    for _ in range(50):
        work = random_work(rng)
        assert LEARNT.predict_ns(work) == pytest.approx(linear_time(work), rel=0.1)


def test_decodes_that_happen_to_get_faster_do_not_promise_that_full_steps_take_no_time() -> None:
    """An engine's first stream: its context grows while the machine warms up, so context seems to save time."""
    model = StepTimeModel()
    for number in range(200):
        model.observe(StepWork(0, 1, 0, 10 + number), 3_000_000 - 2_000 * number)
    full = StepWork(2_048, 256, 10_000_000, 256 * 1_024)
    assert model.predict_ns(full) == 0.0
    assert 3_000_000 < model.most_ns(full) < 1e9


def test_the_step_time_model_follows_a_machine_that_slows_down() -> None:
    rng, model = random.Random(2), StepTimeModel()
    for factor in (1, 2):
        for _ in range(2500):
            work = random_work(rng)
            model.observe(work, factor * linear_time(work))
    work = StepWork(256, 8, 65536, 8192)
    assert model.predict_ns(work) == pytest.approx(2 * linear_time(work), rel=0.1)


def test_predictions_follow_a_change_of_pace_within_a_few_steps_and_no_single_step() -> None:
    rng, model = random.Random(3), deepcopy(LEARNT)
    work = StepWork(64, 8, 4_000, 1_600)
    alone = linear_time(work)
    for factor in (1.0, 0.4, 3.0):
        for _ in range(4):
            some = random_work(rng)
            model.observe(some, int(factor * linear_time(some)))
        assert model.predict_ns(work) == pytest.approx(factor * alone, rel=0.15)
        added = model.prefill_ns(64, 0)
        assert model.prefill_tokens_within(added, 0) in (63, 64)
        assert added == pytest.approx(factor * (alone - linear_time(StepWork(0, 8, 0, 1_600))), rel=0.25)
        model.observe(work, int(3 * factor * alone))
        assert model.predict_ns(work) == pytest.approx(factor * alone, rel=0.15)
        model = deepcopy(LEARNT)


def test_the_step_time_model_survives_steps_that_are_all_alike() -> None:
    model = StepTimeModel()
    for _ in range(20_000):
        model.observe(StepWork(decode_tokens=1, decode_context=100), 5_000_000)
    assert model.predict_ns(StepWork(decode_tokens=1, decode_context=100)) == pytest.approx(5e6, rel=0.01)


def test_the_step_time_model_is_right_about_the_sum_of_what_always_comes_together() -> None:
    rng, model = random.Random(4), StepTimeModel()
    for _ in range(300):
        decodes = rng.randrange(8, 16)
        work = StepWork(rng.choice([0, 24]), decodes, 1_500, decodes * rng.randrange(140, 180))
        model.observe(work, int((20e6 + 2e6 * work.prefill_tokens + 2e6 * decodes) * rng.uniform(0.7, 1.3)))
    alone = StepWork(0, 12, 1_500, 12 * 160)
    assert model.predict_ns(alone) == pytest.approx(44e6, rel=0.15)


def test_until_it_has_seen_enough_steps_tokens_divide() -> None:
    work = StepWork(prefill_tokens=30, decode_tokens=10)
    assert StepTimeModel().share_without(work, StepWork(decode_tokens=10)) == 0.25


def test_every_part_of_a_step_takes_time_also_where_equally_full_steps_do_not_tell_them_apart() -> None:
    """One step in ten is slow for another reason, and in some of these runs decodes then seem to take none."""
    contradictions = 0
    for seed in (35, 55, 92, 113, 146):
        rng, model = random.Random(seed), StepTimeModel()
        for _ in range(60):
            decodes = rng.randrange(1, 9)
            prompt = 16 - decodes
            work = StepWork(prompt, decodes, prompt * rng.randrange(1, 60), decodes * rng.randrange(10, 80))
            model.observe(work, 30_000_000 if rng.random() < 0.1 else 1_000_000)
            decoding = StepWork(decode_tokens=decodes, decode_context=work.decode_context)
            assert model.share_without(work, decoding) > 0
            if model.is_trained and model.predict_ns(decoding) == 0:
                contradictions += 1
                assert model.share_without(work, decoding) == decodes / 16
    assert contradictions > 0


def divided(chunks: list[int], logit_rows: list[int], drafts: int = 0) -> tuple[Accounting, list[Sequence], int]:
    """A step of a machine that is known, with a decoding sequence and a chunk of each of some prompts."""
    accounting = Accounting(deepcopy(LEARNT))
    decoder = make_sequence("d", [1] * 100, 50)
    decoder.tokens.append(7)
    decoder.num_computed = 100
    sequences = [decoder, *(make_sequence(str(i), [1] * 400, 5) for i in range(len(chunks)))]
    for sequence in sequences:
        sequence.status = Status.RUNNING
    accounting.record_step([], StepWork(), [], StepTimes(0, 0, 0))
    accounting.join_decode_clock(decoder)
    scheduled = [ScheduledSequence(0, 100, [7] * (1 + drafts), True, 1 + drafts)]
    for number, (chunk, rows) in enumerate(zip(chunks, logit_rows, strict=True), 1):
        scheduled.append(ScheduledSequence(number, 0, [1] * chunk, False, 0, logit_rows=rows))
    work = work_of(scheduled)
    whole = linear_time(work)
    parts = list(zip(sequences, scheduled, strict=True))
    accounting.record_step(parts, work, [], StepTimes(10, 10 + whole, 10 + whole + 5))
    accounting.leave(decoder, 10 + whole + 5)
    for sequence in sequences:
        assert sequence.ledger.last_ns == 10 + whole + 5
        check_ledger(sequence)
    return accounting, sequences, whole


def test_a_mixed_step_is_divided_by_what_it_would_have_taken_without_others_prefill() -> None:
    accounting, (decoder, *prompts), whole = divided([200, 100], [0, 0])
    compute = linear_time(StepWork(0, 1, 0, 101))
    assert decoder.ledger.phases_ns[Phase.DECODE_COMPUTE] == pytest.approx(compute, rel=0.05)
    assert decoder.ledger.phases_ns[Phase.DECODE_STALL_PREFILL] == pytest.approx(whole - compute, rel=0.05)
    for prompt, tokens in zip(prompts, (200, 100), strict=True):
        compute = linear_time(StepWork(tokens, 1, pairs(0, tokens), 101))
        assert prompt.ledger.phases_ns[Phase.PREFILL_COMPUTE] == pytest.approx(compute, rel=0.05)
    stalls = accounting.take_stalls()
    assert stalls[Phase.DECODE_STALL_PREFILL] == decoder.ledger.phases_ns[Phase.DECODE_STALL_PREFILL]
    assert stalls[Phase.PREFILL_STALL] == sum(p.ledger.phases_ns[Phase.PREFILL_STALL] for p in prompts)
    assert accounting.take_stalls() == {}


@pytest.mark.parametrize("chunks", [[], [200]])
def test_what_drafts_add_to_a_step_has_a_name(chunks: list[int]) -> None:
    _, (decoder, *_), whole = divided(chunks, [0] * len(chunks), drafts=30)
    compute, phases = linear_time(StepWork(0, 1, 0, 101)), decoder.ledger.phases_ns
    verify = linear_time(StepWork(0, 31, 0, 31 * 101)) - compute
    assert phases[Phase.DECODE_COMPUTE] == pytest.approx(compute, rel=0.1)
    assert phases[Phase.VERIFY] == pytest.approx(verify, rel=0.15)
    stall = phases.get(Phase.DECODE_STALL_PREFILL, 0)
    assert phases[Phase.DECODE_COMPUTE] + phases[Phase.VERIFY] + stall == whole


def test_the_logits_of_a_prompt_are_its_own_work_and_a_stall_with_a_name_for_others() -> None:
    accounting, (decoder, asking, plain), _ = divided([50, 50], [50, 0])
    logits = 50 * 200_000
    prompts = 2 * linear_time(StepWork(50, 0, pairs(0, 50))) - 2 * linear_time(StepWork())
    assert decoder.ledger.phases_ns[Phase.DECODE_STALL_LOGPROBS] == pytest.approx(logits, rel=0.05)
    assert decoder.ledger.phases_ns[Phase.DECODE_STALL_PREFILL] == pytest.approx(prompts, rel=0.1)
    compute = linear_time(StepWork(50, 1, pairs(0, 50), 101))
    assert asking.ledger.phases_ns[Phase.PREFILL_COMPUTE] == pytest.approx(compute + logits, rel=0.05)
    assert plain.ledger.phases_ns[Phase.PREFILL_COMPUTE] == pytest.approx(compute, rel=0.05)
    stalls = accounting.take_stalls()
    assert stalls[Phase.DECODE_STALL_LOGPROBS] == decoder.ledger.phases_ns[Phase.DECODE_STALL_LOGPROBS]
