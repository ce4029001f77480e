"""A prefix is known up to a checkpoint, sequences go on from the state of their own tokens, and no slot is lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.policy.cache.checkpoints import Checkpoints
from tests.policy.simulation import Simulation
from tests.policy.test_drafts import Drafting

SYSTEM = list(range(100, 121))


def simulation(**options: object) -> Simulation:
    return Simulation(**{"num_blocks": 64, "num_checkpoints": 4, "max_num_batched_tokens": 64, **options})  # type: ignore[arg-type]


@given(seed=st.integers(0, 1 << 20), slots=st.integers(0, 6), blocks=st.integers(17, 60), caching=st.booleans())
def test_states_are_those_of_the_tokens_before(seed: int, slots: int, blocks: int, caching: bool) -> None:
    """The executor looks; with shared beginnings, choices, chunks, preemptions, failures and aborts."""
    rng = random.Random(seed)
    budget, chunked = (rng.choice([3, 8, 16]), True) if rng.random() < 0.7 else (64, False)
    sim = Drafting(
        most_drafts=rng.choice([0, 3, 9]),
        num_blocks=blocks,
        num_checkpoints=slots,
        caching=caching,
        max_num_batched_tokens=budget,
        max_num_seqs=3,
        chunked=chunked,
        policy=rng.choice(["fcfs", "priority", "slo"]),
        rng=rng,
    )
    beginnings = [[], SYSTEM[:9], SYSTEM]
    sim.fails = lambda sequence: rng.random() < 0.02  # type: ignore[method-assign]
    for number in range(rng.randrange(4, 14)):
        prompt = rng.choice(beginnings) + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 20))]
        if sim.sequences and rng.random() < 0.4:  # the next turn of a conversation, or one that another began too
            prompt = (rng.choice(sim.sequences).tokens + prompt)[:48]
        sim.submit_choices(prompt, rng.randrange(1, 16), n=rng.choice([1, 1, 2]))
        for _ in range(rng.randrange(0, 5)):
            sim.step()
        if number % 5 == 4:
            sim.scheduler.abort(rng.choice(sim.sequences), sim.now)
    sim.run_until_done()
    sim.check_all_closed()


def cached(sim: Simulation, prompt: list[int]) -> int:
    sequence = sim.submit(prompt, 3)
    sim.run_until_done()
    return sequence.cached_tokens


def test_a_prompt_is_known_up_to_its_last_whole_block_and_a_beginning_once_two_had_it() -> None:
    sim = simulation()
    assert cached(sim, SYSTEM + [1, 2, 3, 4, 5]) == 0
    assert cached(sim, SYSTEM + [1, 2, 3, 4, 5]) == 24
    assert cached(sim, SYSTEM + [7] * 5) == 0  # 20 tokens are in blocks that are known, but no state is behind them
    assert cached(sim, SYSTEM + [8] * 5) == 20
    assert cached(sim, SYSTEM + [8] * 5) == 24


def test_the_next_turn_goes_on_near_the_end_of_the_answer() -> None:
    """A state is kept at every second block of four tokens; the last one is that of token 56, 5 before the end."""
    sim = simulation()
    first = sim.submit(SYSTEM, 40)
    sim.run_until_done()
    assert cached(sim, first.tokens[:61]) == 56
    assert cached(sim, [*first.tokens[:40], 1]) == 20, "the states before are given up"


def test_decoding_takes_one_slot_each_and_half_of_all_at_most() -> None:
    sim = simulation(num_checkpoints=4, max_num_seqs=3, num_blocks=64)
    checkpoints = sim.scheduler.blocks.checkpoints
    assert checkpoints is not None
    prompts = [[number] * 6 for number in range(3)]
    sequences = [sim.submit(prompt, 50) for prompt in prompts]
    while any(sequence.output_len < 45 for sequence in sequences):
        sim.step()
    rolling = [sequence for sequence in sequences if sequence.rolling]
    assert len(rolling) == 2 and len(checkpoints) == 4 and checkpoints.made > 12
    sim.run_until_done()
    assert [cached(sim, sequence.tokens) for sequence in rolling] == [48, 48]


def test_who_is_preempted_computes_little_again() -> None:
    sim = simulation(policy="priority", max_num_seqs=1)
    first, computed = sim.submit(SYSTEM, 40, priority=1), 0
    while first.output_len < 39:
        sim.step()
    sim.submit([1], 2, priority=-9)
    while sim.scheduler.has_work:
        computed += sum(item.num_tokens for item in sim.step() if sim.sequence_of(item) is first)
    assert first.preemptions == 1 and computed == 61 - 56 - 1


def test_a_chunk_keeps_each_state_that_is_wanted() -> None:
    """The states are those where the prompt leaves what was known, and at its end."""
    sim = simulation()
    prompts = [SYSTEM + [number] * 17 for number in range(2)]
    assert [cached(sim, prompt) for prompt in prompts] == [0, 0]
    assert cached(sim, prompts[1]) == 36
    assert cached(sim, [*SYSTEM, 5]) == 20


def test_without_slots_no_prefix_is_known() -> None:
    sim = simulation(num_checkpoints=0)
    assert [cached(sim, SYSTEM) for _ in range(3)] == [0, 0, 0]


def test_the_slot_that_was_not_used_for_longest_is_given_up() -> None:
    sim = simulation(num_checkpoints=2)
    first, second, third = ([number] * 9 for number in (1, 2, 3))
    assert [cached(sim, prompt) for prompt in (first, second, first, third)] == [0, 0, 8, 0]
    assert [cached(sim, prompt) for prompt in (first, second)] == [8, 0]


def test_a_checkpoint_is_gone_with_its_block() -> None:
    sim = simulation(num_blocks=17)
    checkpoints = sim.scheduler.blocks.checkpoints
    assert checkpoints is not None
    cached(sim, SYSTEM)
    assert len(checkpoints) == 1
    cached(sim, [5] * 60)
    assert len(checkpoints) == 1 and cached(sim, SYSTEM) == 0


def test_drafts_end_where_a_state_is_to_be_kept() -> None:
    """Behind every eighth token, of which the prompt and the first draft's newest token are 22."""
    sim = simulation()
    sequence = sim.submit(SYSTEM, 20)
    sim.step()
    sim.scheduler.propose(sequence.seq_id, [1] * 7)
    assert [(item.start, item.num_tokens) for item in sim.step()] == [(21, 3)]


def test_a_slot_that_is_read_is_not_given_up() -> None:
    checkpoints = Checkpoints(1, 4)
    slot = checkpoints.promise()
    assert slot == 0
    checkpoints.fill(slot, node=7)
    assert checkpoints.known([5, 7, 9]) == 2 and checkpoints.known([5]) == 0
    assert checkpoints.read(7) == 0
    assert checkpoints.promise() is None
    checkpoints.drop(7)
    checkpoints.check(num_readers=1)
    assert checkpoints.promise() is None
    checkpoints.let_go(0)
    assert checkpoints.promise() == 0
    checkpoints.end_step()
    checkpoints.check(num_readers=0)
    with pytest.raises(RuntimeError, match="1 are known"):
        checkpoints.check(num_readers=1)


def test_what_is_pinned_is_kept_until_the_cache_is_reset() -> None:
    sim = simulation(num_checkpoints=1)
    blocks = sim.scheduler.blocks
    assert blocks.checkpoints is not None
    sim.submit(SYSTEM, 1).pins_prompt = True
    sim.run_until_done()
    assert cached(sim, [5] * 30) == 0
    assert cached(sim, SYSTEM) == 20
    sim.scheduler.check()
    blocks.reset_prefix_cache()
    sim.scheduler.check()
    assert cached(sim, SYSTEM) == 0 and len(blocks.checkpoints) == 1


def test_prompts_that_come_together_share_what_they_begin_with() -> None:
    """The others wait until the first has computed that, and its state is kept there."""
    sim = simulation(policy="slo", max_num_batched_tokens=8, max_num_seqs=4)
    sequences = [sim.submit([*SYSTEM, number, number], 2) for number in range(1, 4)]
    sim.run_until_done()
    assert [sequence.cached_tokens for sequence in sequences] == [0, 20, 20]
