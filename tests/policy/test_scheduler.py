"""The scheduler keeps its promises: order, budget, no leak, nobody starves, preempted sequences return."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.swap import SwapSpace
from headway.policy.objectives.orders import AGEING_NS
from headway.policy.objectives.priority import PriorityPolicy
from headway.policy.step.ledger import Phase
from headway.policy.step.order import Orders
from headway.policy.step.plan import StepPlan
from headway.policy.step.policies import POLICIES
from headway.policy.step.request import FinishReason, Status
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.step_budget import PREFILL_FIRST
from tests.policy.pooled import some_pooling
from tests.policy.simulation import Simulation, check_ledger, random_classes


@pytest.fixture(scope="module", autouse=True)
def mixed_orders() -> Iterator[None]:
    """A policy by the name of "mixed": three orders that have nothing to do with each other."""
    orders = Orders(
        admission=lambda s: (s.prompt_len, s.seq_id),
        running=lambda s: (-s.seq_id,),
        victims=lambda s: (s.priority, s.seq_id),
        displaces=3,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "mixed", type("Mixed", (PriorityPolicy,), {"orders": orders}))
        yield


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    sim = Simulation(num_blocks=64, max_num_batched_tokens=8, max_model_len=128)
    chatting = sim.submit([1, 2, 3], 40)
    sim.step()
    long = sim.submit(list(range(50)), 5)
    while long.output_len == 0:
        items = sim.step()
        assert [item.num_tokens for item in items if item.seq_id == chatting.seq_id] == [1]
        assert sum(item.num_tokens for item in items if item.seq_id == long.seq_id) == min(7, 50 - items[-1].start)
    sim.run_until_done()
    sim.check_all_closed()
    assert long.ledger.phases_ns[Phase.PREFILL_COMPUTE] > 0
    assert chatting.ledger.phases_ns[Phase.DECODE_STALL_PREFILL] > 0


def test_prefill_first_computes_prompts_alone_and_decodes_when_none_can_be() -> None:
    sim = Simulation(num_blocks=64, max_num_batched_tokens=8, max_model_len=128, max_num_seqs=2, sharing=PREFILL_FIRST)
    chatting = sim.submit([1, 2, 3], 40)
    sim.step()
    long, third = sim.submit(list(range(20)), 3), sim.submit([7] * 5, 1)
    seen = [[(sim.sequence_of(item), item.num_tokens) for item in sim.step()] for _ in range(6)]
    assert seen[:3] == [[(long, 8)], [(long, 8)], [(long, 4)]], "nobody decodes, and the third has no seat"
    assert seen[3:5] == [[(chatting, 1), (long, 1)]] * 2
    assert seen[5] == [(third, 5)]
    sim.run_until_done()
    sim.check_all_closed()
    assert chatting.ledger.phases_ns[Phase.DECODE_STALL_POLICY] > 0


@pytest.mark.parametrize("seed", range(20))
def test_prefill_first_starves_nobody_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    sim = Simulation(num_blocks=rng.randrange(20, 40), max_num_seqs=rng.randrange(1, 6), rng=rng, sharing=PREFILL_FIRST)
    for _ in range(15):
        sim.submit([rng.randrange(4) for _ in range(rng.randrange(1, 40))], rng.randrange(1, 20))
        for _ in range(rng.randrange(4)):
            sim.step()
    sim.run_until_done()
    sim.check_all_closed()


def test_a_sequence_alone_never_stalls() -> None:
    sim = Simulation()
    alone = sim.submit(list(range(30)), 20)
    sim.run_until_done()
    stalls = {phase for phase in alone.ledger.phases_ns if "stall" in phase}
    assert not stalls


def test_without_chunked_prefill_a_prompt_is_computed_whole() -> None:
    sim = Simulation(chunked=False, max_num_batched_tokens=64, caching=False)
    for length in (40, 30, 20):
        sim.submit(list(range(length)), 3)
    seen = [item.num_tokens for _ in range(4) for item in sim.step() if item.num_tokens > 1]
    assert sorted(seen) == [20, 30, 40]
    sim.run_until_done()
    sim.check_all_closed()


def test_prefix_is_found_again_and_counted() -> None:
    sim = Simulation(num_blocks=64)
    prompt = list(range(22))
    sim.submit(prompt, 2)
    sim.run_until_done()
    again = sim.submit(prompt, 2)
    items = sim.step()
    assert again.cached_tokens == 20 and items[0].num_tokens == 2
    assert sim.scheduler.blocks.prefix_stats.hits == 20
    assert sim.scheduler.blocks.prefix_stats.queries == 44
    other_tenant = sim.submit(prompt, 2, salt="other")
    sim.run_until_done()
    assert other_tenant.cached_tokens == 0


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    sim = Simulation(num_blocks=64)
    for _ in range(2):
        last = sim.submit(list(range(16)), 2)
        sim.run_until_done()
    assert last.cached_tokens == 12


def test_prompt_logprobs_compute_every_prompt_token() -> None:
    sim = Simulation(num_blocks=64)
    sim.submit(list(range(16)), 2)
    sim.run_until_done()
    wanted = sim.submit(list(range(16)), 2, prompt_logprobs=0)
    assert sim.step()[0].num_tokens == 16
    assert wanted.cached_tokens == 0


def test_prompt_logprobs_are_computed_for_one_of_the_choices() -> None:
    sim = Simulation(num_blocks=64)
    first, other = sim.submit_choices(list(range(14)), 1, n=2, prompt_logprobs=0)
    assert (first.logit_rows(0, 14), first.logit_rows(12, 2), other.logit_rows(0, 14)) == (13, 1, 0)
    assert [(item.seq_id, item.num_tokens) for item in sim.step()] == [(first.seq_id, 14)]
    assert first.finish_reason is FinishReason.LENGTH
    assert [(item.seq_id, item.num_tokens) for item in sim.step()] == [(other.seq_id, 2)], "its prefix is in the cache"
    assert first.logit_rows(0, 14) == 0, "what is computed again after a token needs none"


def test_choices_share_the_prompt_and_copy_the_block_they_write() -> None:
    sim = Simulation(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)
    first, *others = sim.submit_choices(list(range(18)), 6, n=3)
    assert sim.step_sequences() == [first]
    items = sim.step()
    assert sorted(item.num_tokens for item in items) == [1, 1, 1]
    tables = [s.held_blocks for s in (first, *others)]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    assert all(s.cached_tokens == 17 for s in others)
    sim.run_until_done()
    sim.check_all_closed()


def test_the_executor_is_told_of_a_block_that_is_exchanged() -> None:
    sim = Simulation(num_blocks=32)
    sequence = sim.submit([1, 2], 9)
    sim.step()
    (held,) = sequence.held_blocks
    sim.scheduler.blocks.share([held])
    sequence.room = 0  # as the block manager notes where it shares a block
    plan = sim.scheduler.schedule(sim.now)
    assert plan.copies == [(held, sequence.held_blocks[0])]
    assert [(c.seq_id, c.start, c.blocks) for c in plan.tables] == [(sequence.seq_id, 0, sequence.held_blocks)]
    assert len(sequence.held_blocks) == 1


def test_choices_go_on_when_the_first_is_aborted() -> None:
    sim = Simulation()
    first, other = sim.submit_choices(list(range(10)), 4, n=2)
    sim.scheduler.abort(first, sim.now)
    sim.run_until_done()
    assert other.finish_reason is FinishReason.LENGTH
    sim.check_all_closed()


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    sim = Simulation(num_blocks=10, block_size=4, max_model_len=32, caching=False)
    early = sim.submit(list(range(12)), 16)
    late = sim.submit(list(range(12)), 16)
    sim.run_until_done()
    assert early.preemptions == 0 and late.preemptions >= 1
    assert early.output_len == late.output_len == 16
    assert late.ledger.phases_ns[Phase.DECODE_STALL_PREEMPTED] > 0
    assert late.ledger.phases_ns[Phase.DECODE_STALL_RECOMPUTE] > 0
    sim.check_all_closed()


def test_one_that_does_not_fit_lets_smaller_ones_pass_but_not_for_ever() -> None:
    sim = Simulation(num_blocks=16, block_size=4, max_num_seqs=8, max_model_len=64, caching=False, max_bypasses=3)
    holder = sim.submit(list(range(20)), 30)
    sim.step()
    big = sim.submit(list(range(48)), 2)
    passed = [sim.submit([1, 2], 2) for _ in range(2)]
    sim.step()
    assert big.status is Status.WAITING and all(s.status is Status.RUNNING for s in passed)
    while big.status is Status.WAITING:
        sim.submit([1, 2], 40)  # an endless supply of small ones
        sim.step()
        assert big.times_bypassed <= 3
    assert holder.status is Status.FINISHED
    sim.run_until_done()
    sim.check_all_closed()


def test_priority_is_served_first() -> None:
    sim = Simulation(max_num_seqs=1, policy="priority")
    sim.submit([1], 2)
    sim.step()
    low = sim.submit([1], 1, priority=5)
    high = sim.submit([1], 1, priority=-5)
    while high.status is not Status.FINISHED:
        sim.step()
        assert low.status is Status.WAITING
    sim.run_until_done()


def test_the_orders_of_admission_running_and_victims_are_three() -> None:
    sim = Simulation(num_blocks=10, max_num_batched_tokens=64, max_model_len=32, policy="mixed", caching=False)
    long = sim.submit(list(range(8)), 12)
    worst, newest = sim.submit(list(range(6)), 14, priority=9), sim.submit(list(range(7)), 13)
    assert sim.step_sequences() == [worst, newest, long], "the shortest is admitted first"
    assert sim.step_sequences() == [newest, worst, long], "the newest gets its token first"
    while not sim.scheduler.sequences.num_preemptions:
        sim.step()
    assert [s.preemptions for s in (long, worst, newest)] == [0, 1, 0], "of those without a token the worst has to go"
    sim.run_until_done()
    sim.check_all_closed()


def test_who_comes_back_with_all_of_it_cached_is_made_known_when_it_decodes() -> None:
    """It counts as decoding, and the step that admitted it may have had no token left for it."""
    sim = Simulation(block_size=4)
    sequence = sim.submit([1, 2, 3, 4], 20)
    while len(sequence.tokens) < 9:
        sim.step()
    plan = StepPlan()
    sim.scheduler.sequences.preempt(sequence, plan, sim.now)
    sim.executor.run(plan)
    assert sim.scheduler.block_manager.admit(sequence, spare=0)
    sim.scheduler.sequences.start(sequence, sim.now)
    assert sequence.is_decoding and sim.step_sequences() == [sequence]
    sim.run_until_done()
    assert sequence.output_len == 20
    sim.check_all_closed()


def test_queue_reasons_are_told_apart() -> None:
    full = Simulation(max_num_seqs=1)
    full.submit([1], 5)
    full.step()
    waits = full.submit([1], 1)
    full.run_until_done()
    assert waits.ledger.phases_ns[Phase.QUEUE_CAPACITY] > 0
    assert Phase.QUEUE_BLOCKS not in waits.ledger.phases_ns
    tight = Simulation(num_blocks=8, max_model_len=32, caching=False)
    tight.submit(list(range(20)), 8)
    tight.step()
    blocked = tight.submit(list(range(20)), 1)
    tight.run_until_done()
    assert blocked.ledger.phases_ns[Phase.QUEUE_BLOCKS] > 0


def test_a_stop_token_ends_a_sequence_only_after_min_tokens() -> None:
    sim = Simulation()
    stops = sim.submit([1, 2], 50, stop_token_ids=list(range(100)))
    sim.run_until_done()
    assert stops.finish_reason is FinishReason.STOP and stops.output_len == 1
    later = sim.submit([1, 2], 50, stop_token_ids=list(range(100)), min_tokens=7)
    sim.run_until_done()
    assert later.output_len == 8


def test_logits_that_are_not_numbers_end_only_their_own_sequence() -> None:
    sim = Simulation()
    bad, good = sim.submit([1, 2], 3), sim.submit([1, 2, 3], 3)
    sim.draw = lambda sequence: None if sequence is bad else 7  # type: ignore[method-assign]
    sim.step()
    assert bad.finish_reason is FinishReason.ERROR and good.status is Status.RUNNING
    sim.run_until_done()
    sim.check_all_closed()


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 3}, "less than max_num_seqs"),
        ({"max_prefill_stall_ms": -1.0}, "max_prefill_stall_ms is -1; it must be 0 or more"),
        ({"max_queue_time": 0.0}, "max_queue_time is 0; it must be more than 0"),
        ({"policy": "random"}, "'random' is unknown; choose one of fcfs, priority, slo"),
        ({"chunked": False}, "without chunked prefill"),
        ({"num_blocks": 15}, "one sequence of 64 tokens needs"),
    ],
)
def test_contradicting_limits_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Simulation(**settings_)  # type: ignore[arg-type]


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    sim = Simulation()
    with pytest.raises(ValueError, match=r"the prompt has 64 tokens; .* at most 63"):
        sim.submit(list(range(64)), 1)


def test_a_pool_must_hold_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match=r"needs 16 KV blocks, the pool has 4; lower --max-model-len"):
        Scheduler(SchedulerConfig(4, 16, 64), KVBlocks(4, 4))


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    max_num_seqs=st.integers(1, 8),
    extra_budget=st.integers(0, 24),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "mixed", "slo"]),
    max_bypasses=st.integers(0, 4),
    max_prefill_stall_ms=st.sampled_from([0.0, 0.001, 0.01, math.inf]),
    longest_step_ns=st.sampled_from([10_000, AGEING_NS // 4]),
    swap=st.builds(SwapSpace, st.sampled_from([0, 0, 3, 12, 60]), st.just(0.0), st.sampled_from([0.0, 300.0])),
)
def test_random_traffic_leaks_nothing_starves_nobody_and_every_ledger_closes(
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    caching: bool,
    policy: str,
    max_bypasses: int,
    max_prefill_stall_ms: float,
    longest_step_ns: int,
    swap: SwapSpace,
) -> None:
    rng = random.Random(seed)
    sim = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        caching=caching,
        policy=policy,
        max_bypasses=max_bypasses,
        max_prefill_stall_ms=max_prefill_stall_ms,
        longest_step_ns=longest_step_ns,
        classes=random_classes(rng, longest_step_ns),
        swap=swap,
        rng=rng,
    )
    shared_prefix = [rng.randrange(4) for _ in range(20)]
    for _ in range(rng.randrange(5, 25)):
        if rng.random() < 0.7:
            prompt = shared_prefix[: rng.randrange(20)] + [rng.randrange(4) for _ in range(rng.randrange(1, 24))]
            options: dict[str, Any] = {"priority": rng.randrange(-2, 3), "salt": rng.choice(["", "a"])}
            options["service_class"] = rng.choice(["", "chat", "report", "offline"])
            pooling = some_pooling(rng)
            n = rng.choice([1, 1, 1, 2, 4]) if pooling is None else 1
            sim.submit_choices(prompt, rng.randrange(1, 20), n=n, pooling=pooling, **options)
        for _ in range(rng.randrange(3)):
            sim.step()
        if rng.random() < 0.2:
            victim = rng.choice(sim.sequences) if sim.sequences else None
            if victim is not None:
                sim.scheduler.abort(victim, sim.now + rng.randrange(10))
        for sequence in sim.sequences:
            check_ledger(sequence)
    sim.run_until_done()
    sim.check_all_closed()
