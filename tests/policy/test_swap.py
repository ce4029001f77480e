"""KV of preempted sequences on the host: copied where that is cheaper, exactly as it was, and nothing is lost of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.cache.swap import HostPool, SwapSpace
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence, Status
from headway.policy.step.step_time import StepTimeModel, StepWork
from tests.policy.simulation import Simulation, check_ledger

FREE = SwapSpace(64)  # copying takes no time


def trained() -> StepTimeModel:
    """A trained model in which a token of a prompt takes 0.1 ms, and a step 5 ms besides."""
    model = StepTimeModel()
    for at in range(40):
        tokens = 1 + 16 * (at % 9)
        model.observe(StepWork(prefill_tokens=tokens, decode_tokens=at % 3), 5_000_000 + 100_000 * tokens)
    return model


def preempt(sim: Simulation, sequence: Sequence) -> None:
    """Preempt a sequence before the next step, as the scheduler does."""
    plan = StepPlan()
    sim.scheduler.sequences.preempt(sequence, plan, sim.now)
    sim.executor.run(plan)


def begun(sim: Simulation, prompt: int, output: int) -> Sequence:
    """A sequence that has so many tokens of output, and may have 20."""
    sequence = sim.submit(list(range(prompt)), 20)
    while sequence.output_len < output:
        sim.step()
    return sequence


@pytest.mark.parametrize("caching", [False, True])
def test_a_victim_decodes_on_where_it_was(caching: bool) -> None:
    sim = Simulation(num_blocks=10, max_model_len=32, caching=caching, swap=FREE)
    early, late = sim.submit(list(range(12)), 16), sim.submit(list(range(20, 32)), 16)
    sim.run_until_done()
    assert late.preemptions >= 1 and early.output_len == late.output_len == 16
    assert late.ledger.phases_ns[Phase.DECODE_STALL_PREEMPTED] > 0
    assert Phase.DECODE_STALL_RECOMPUTE not in late.ledger.phases_ns
    assert sim.scheduler.host is not None
    counts = sim.scheduler.host.counts
    assert counts["swap"] == sim.scheduler.sequences.num_preemptions and not counts["recompute"] + counts["full"]
    assert 0 < counts["in"] <= counts["out"]
    assert caching == (counts["in"] < counts["out"]), "what is still in the cache is not copied back"
    sim.check_all_closed()


def test_a_prompt_under_way_goes_on_after_its_last_chunk() -> None:
    sim = Simulation(max_num_batched_tokens=6, caching=False, swap=FREE)
    sequence = sim.submit(list(range(20)), 2)
    sim.step()
    preempt(sim, sequence)
    assert [(item.start, item.num_tokens) for item in sim.step()] == [(6, 6)]
    sim.run_until_done()
    sim.check_all_closed()


def test_the_cheaper_way_is_taken_as_predicted() -> None:
    pool = HostPool(SwapSpace(100, fixed_ns=500_000, block_ns=1_000_000), trained())
    long, short = pool.swap_out(list(range(10)), 0, 0, 160), pool.swap_out([1], 0, 0, 10)
    assert long is not None and short is None
    assert pool.counts["recompute_ns"] == pytest.approx(17e6, rel=0.1) and pool.counts["copy_ns"] == 12e6
    assert pool.swap_out([1, 2], 8, 128, 160) is not None, "of a shared prefix nothing would be computed again"
    untrained = HostPool(SwapSpace(100, block_ns=1.0), StepTimeModel())
    assert untrained.swap_out([1], 0, 0, 16) is None, "nothing can be predicted yet"


def test_what_the_host_has_no_room_for_is_computed_again() -> None:
    sim = Simulation(caching=False, swap=SwapSpace(3))
    first, second = begun(sim, 10, 1), begun(sim, 5, 1)
    preempt(sim, first)
    preempt(sim, second)
    assert first.swapped is not None and second.swapped is None and sim.scheduler.host is not None
    assert sim.scheduler.host.counts["full"] == 1
    sim.run_until_done()
    assert Phase.DECODE_STALL_RECOMPUTE in second.ledger.phases_ns
    sim.check_all_closed()


def test_who_is_aborted_on_the_host_leaves_nothing_there() -> None:
    sim = Simulation(swap=FREE)
    sequence = begun(sim, 10, 3)
    preempt(sim, sequence)
    sim.scheduler.abort(sequence, sim.now)
    sim.check_all_closed()
    assert not sim.scheduler.schedule(sim.now).swaps, "a plan in which nothing is scheduled is not run"
    assert sim.scheduler.host is not None and sim.scheduler.host.swaps, "what is decided is copied before all later"
    other = sim.submit([1, 2, 3], 4)
    sim.run_until_done()
    assert other.output_len == 4


def test_what_others_use_stays_in_the_pool_and_is_computed_again_when_they_lose_it() -> None:
    sim = Simulation(num_blocks=40, swap=FREE)
    for evicted in (False, True):
        sharing = [begun(sim, 16, 3) for _ in range(2)]
        preempt(sim, sharing[1])
        swapped = sharing[1].swapped
        assert swapped is not None and swapped.first == 3, "the block of the last token of the prompt is its own"
        if evicted:
            sim.scheduler.abort(sharing[0], sim.now)
            sim.scheduler.blocks.reset_prefix_cache()
        assert sim.scheduler.block_manager.known_tokens(sharing[1]) == (0 if evicted else swapped.computed)
        sim.run_until_done()
        assert (Phase.DECODE_STALL_RECOMPUTE in sharing[1].ledger.phases_ns) == evicted
        assert sharing[1].output_len == 20
    sim.check_all_closed()


def test_without_a_prefix_cache_what_choices_share_is_swapped_too() -> None:
    sim = Simulation(caching=False, swap=FREE)
    choices = sim.submit_choices(list(range(10)), 20, n=2)
    while not choices[1].output_len:
        sim.step()
    preempt(sim, choices[1])
    assert choices[1].swapped is not None and choices[1].swapped.first == 0
    sim.run_until_done()
    assert Phase.DECODE_STALL_RECOMPUTE not in choices[1].ledger.phases_ns
    sim.check_all_closed()


def test_a_prompt_whose_logits_are_wanted_is_computed_again() -> None:
    sim = Simulation(max_num_batched_tokens=6, swap=FREE)
    sequence = sim.submit(list(range(20)), 2, prompt_logprobs=1)
    sim.step()
    preempt(sim, sequence)
    assert sequence.swapped is None
    sim.run_until_done()
    sim.check_all_closed()


def test_a_step_says_what_is_swapped() -> None:
    sim = Simulation(num_blocks=10, max_model_len=32, swap=FREE)
    sim.submit(list(range(12)), 16)
    sim.submit(list(range(20, 32)), 16)
    sim.run_until_done()
    words = " ".join(decision.in_words() for decision in sim.scheduler.decisions)
    assert "blocks of 1 swapped out" in words and "swapped in;" in words


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(16, 40),
    host_blocks=st.integers(1, 40),
    caching=st.booleans(),
    block_ns=st.sampled_from([0.0, 200.0]),
)
def test_whoever_is_preempted_whenever_the_books_are_straight(
    seed: int, num_blocks: int, host_blocks: int, caching: bool, block_ns: float
) -> None:
    rng = random.Random(seed)
    sim = Simulation(
        num_blocks=num_blocks,
        caching=caching,
        policy=rng.choice(["fcfs", "slo"]),
        swap=SwapSpace(host_blocks, block_ns=block_ns),
        rng=rng,
    )
    host = sim.scheduler.host
    assert host is not None
    for _ in range(rng.randrange(10, 40)):
        if rng.random() < 0.5:
            prompt = [7] * rng.randrange(16) + [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
            sim.submit_choices(prompt, rng.randrange(1, 20), n=rng.choice([1, 1, 3]))
        sim.step()
        for sequence in sim.sequences:
            if sequence.status is Status.RUNNING and rng.random() < 0.15:
                preempt(sim, sequence)
            elif rng.random() < 0.03:
                sim.scheduler.abort(sequence, sim.now)
            check_ledger(sequence)
        sim.scheduler.check()
        held = [s.swapped for s in sim.scheduler.waiting if s.swapped is not None]
        assert host.num_used == sum(len(each.host_blocks) for each in held) <= host_blocks
    sim.run_until_done()
    sim.check_all_closed()
    assert host.counts["in"] <= host.counts["out"]
