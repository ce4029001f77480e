"""Layers with windows: how they are grouped, and that blocks are given up when nobody needs them, and only then."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cost.layers import AttentionSinks
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import (
    MOST_GROUPS,
    decode_blocks,
    group_layers,
    kv_cache_groups,
    most_blocks,
)
from headway.policy.cache.preload import PreloadedPrompt, room_for
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from tests.policy.simulation import Simulation
from tests.policy.test_drafts import Drafting

FREE = SwapSpace(64)
HALF = (8, None)  # as gpt-oss: every other layer
SYSTEM = list(range(100, 121))


def simulation(**options: object) -> Simulation:
    return Simulation(**{"num_blocks": 96, "windows": HALF, "max_num_batched_tokens": 8, **options})  # type: ignore[arg-type]


GEMMA = [1024 if (layer + 1) % 6 else None for layer in range(62)]


@pytest.mark.parametrize(
    ("windows", "layers"),
    [
        ([128, None] * 12, [12, 12]),
        (GEMMA, [10, 10, 10, 10, 10, 10, 2]),
        ([4096 if layer % 4 != 3 else None for layer in range(32)], [8, 8, 8, 8]),
        ([4096] * 32, [32]),
        ([None] * 21 + [32_768] * 7, [7, 7, 7, 7]),
        ([None] + [512] * 31, [1, 5, 5, 5, 5, 5, 5, 1]),
        (list(range(2, 12)), [1] * 10),
    ],
)
def test_layers_of_one_window_share_tables_and_blocks_are_of_one_size(
    windows: list[int | None], layers: list[int]
) -> None:
    groups = group_layers(tuple(windows))
    assert [len(group) for group in groups] == layers
    assert sorted(layer for group in groups for layer in group) == list(range(len(windows)))
    assert all(len({windows[layer] for layer in group}) == 1 for group in groups)
    assert len(groups) <= max(MOST_GROUPS, len(set(windows)))


def test_windows_that_nothing_reaches_are_none() -> None:
    assert kv_cache_groups([4096] * 32, 512, 4096, 16) == ()
    assert kv_cache_groups([None] * 32, 512, 10**6, 16) == ()
    assert [group.window for group in kv_cache_groups([64, 8192], 512, 4096, 16)] == [None, 64]


@given(
    recent=st.integers(1, 70),
    start=st.integers(0, 300),
    count=st.integers(1, 40),
    size=st.integers(1, 17),
    first_blocks=st.integers(0, 3),
)
def test_a_table_holds_what_the_window_sees(recent: int, start: int, count: int, size: int, first_blocks: int) -> None:
    sinks = AttentionSinks(first_blocks * size, first_blocks * size + recent)
    (group,) = kv_cache_groups([sinks.window], 40, 10**6, size, sinks)
    assert (group.window, group.sinks) == (recent, first_blocks)

    def held(computed: int, end: int) -> set[int]:
        first = group.first(computed, size)
        return set(range(first, end)) | set(range(min(end, first_blocks)))

    end = -(-(start + count) // size)
    needed = {position // size for position in range(max(0, start - recent + 1), start + count)}
    needed |= set(range(min(end, first_blocks)))
    assert needed <= held(start, end) and len(held(start, end) - needed) <= (min(needed) > 0 and first_blocks)
    assert end <= group.end(start, size) and len(held(start, end)) <= group.ahead + first_blocks
    at_border = start // size * size  # where a decode gives up blocks and takes one
    most = decode_blocks(sinks.window, start + 1, size, sinks)
    assert len(held(at_border, at_border // size + 1)) <= most <= group.most(10**6)


def random_run(sim: Simulation, rng: random.Random) -> None:
    beginnings = [[], SYSTEM[:9], SYSTEM]
    sim.fails = lambda sequence: rng.random() < 0.01  # type: ignore[method-assign]
    for number in range(rng.randrange(4, 14)):
        prompt = rng.choice(beginnings) + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 30))]
        options = {"prompt_logprobs": 0} if sim.policy != "slo" and rng.random() < 0.1 else {}
        sim.submit_choices(prompt, rng.randrange(1, 24), n=rng.choice([1, 1, 2]), **options)
        for _ in range(rng.randrange(0, 8)):
            sim.step()
        if number % 5 == 4:
            sim.scheduler.abort(rng.choice(sim.sequences), sim.now)
    sim.run_until_done()
    sim.check_all_closed()


@given(
    seed=st.integers(0, 1 << 20),
    windows=st.lists(st.sampled_from([None, 1, 3, 8, 13, 30]), min_size=1, max_size=5),
    spare=st.integers(0, 40),
    caching=st.booleans(),
    swap=st.booleans(),
    sinks=st.sampled_from([None, AttentionSinks(4, 13), AttentionSinks(8, 9), AttentionSinks(12, 30)]),
)
def test_every_position_that_a_window_sees_holds_its_own_tokens(
    seed: int, windows: list[int | None], spare: int, caching: bool, swap: bool, sinks: AttentionSinks | None
) -> None:
    """The executor looks; with shared beginnings, choices, chunks, preemptions, swaps, failures and aborts."""
    rng = random.Random(seed)
    budget, chunked = (rng.choice([3, 8, 16]), True) if rng.random() < 0.7 else (64, False)
    if sinks is not None:
        windows = [*windows, sinks.window]
    groups = kv_cache_groups(windows, budget, 64, 4, sinks)
    sim = simulation(
        windows=tuple(windows),
        sinks=sinks,
        num_blocks=most_blocks(groups, 16) + bool(groups) + spare,
        caching=caching,
        max_num_batched_tokens=budget,
        max_num_seqs=3,
        chunked=chunked,
        policy=rng.choice(["fcfs", "priority", "slo"]),
        swap=FREE if swap else NO_SWAP,
        rng=rng,
    )
    random_run(sim, rng)


@given(seed=st.integers(0, 1 << 20), spare=st.integers(0, 30), caching=st.booleans())
def test_drafts_that_are_refused_take_no_block_that_a_window_sees(seed: int, spare: int, caching: bool) -> None:
    rng = random.Random(seed)
    windows = rng.choice([HALF, (5,), (None, 3, 3)])
    most = most_blocks(kv_cache_groups(windows, 8, 64, 4), 16)
    sim = Drafting(
        num_blocks=most + 1 + spare, windows=windows, caching=caching, max_num_batched_tokens=8, max_num_seqs=3, rng=rng
    )
    random_run(sim, rng)


def cached(sim: Simulation, prompt: list[int], output: int = 3) -> int:
    sequence = sim.submit(prompt, output)
    sim.run_until_done()
    return sequence.cached_tokens


def test_a_sequence_holds_its_windows_and_no_more() -> None:
    sim = simulation(caching=False)
    sequence = sim.submit(SYSTEM, 40)
    while sim.scheduler.has_work:
        sim.step()
        if sequence.tables and sequence.output_len > 8:
            held = len(sequence.tokens) - 1
            assert [len(table.blocks) for table in sequence.tables] == [
                decode_blocks(window, held, 4) for window in (None, 8)
            ]
    assert sim.scheduler.blocks.num_free == sim.scheduler.blocks.num_blocks


def test_a_prompt_is_known_where_it_ended_and_where_another_left_it() -> None:
    """Also when everything else that windows have passed was given up."""
    sim = simulation(num_blocks=75, max_model_len=56)
    assert cached(sim, SYSTEM + [1] * 20) == 0
    assert cached(sim, SYSTEM + [1] * 20) == 40
    assert cached(sim, [9] * 40) == 0
    for number in range(4):
        cached(sim, [50 + number] * 30)
    assert cached(sim, SYSTEM + [7] * 20) == 0
    for number in range(2):
        cached(sim, [60 + number] * 30)
    assert cached(sim, SYSTEM + [8] * 20) == 20
    assert sim.scheduler.blocks.cached.evictions["", "passed"] > 0


def test_where_there_is_room_what_windows_have_passed_is_found_at_once() -> None:
    sim = simulation(num_blocks=300)
    assert cached(sim, SYSTEM + [1] * 20) == 0
    assert cached(sim, SYSTEM + [7] * 20) == 20
    assert cached(sim, SYSTEM[:9] + [7] * 20) == 8


def test_with_windows_alone_a_long_sequence_is_found_by_its_end() -> None:
    sim = simulation(windows=(8,), num_blocks=9, max_model_len=60, max_num_batched_tokens=8)
    talk = sim.submit(SYSTEM, 20)
    sim.run_until_done()
    assert sim.scheduler.blocks.cached.num_evicted > 0
    assert cached(sim, [*talk.tokens, 5, 5, 5]) == 40


def test_a_failed_sequence_leaves_nothing_that_a_window_has_passed() -> None:
    sim = simulation(num_blocks=300)
    sequence = sim.submit(SYSTEM, 30)
    while sequence.output_len < 20:
        sim.step()
    assert sim.scheduler.blocks.cached.num_cached > 0
    sim.fails = lambda failing: failing is sequence  # type: ignore[method-assign]
    sim.run_until_done()
    assert cached(sim, SYSTEM) == 0
    sim.check_all_closed()


def test_what_is_pinned_is_as_much_as_was_counted_and_stays() -> None:
    sim = simulation(num_blocks=200)
    blocks = sim.scheduler.blocks
    prompt = PreloadedPrompt("prompts:1", SYSTEM)
    fitting, _ = room_for([prompt], blocks, 64)
    assert fitting == [prompt]
    sim.submit([*SYSTEM, 1], 1).pins_prompt = True
    sim.run_until_done()
    assert len(blocks.pinned) == 5 + 2  # all blocks of one group, the window's last of the other
    for number in range(40):
        cached(sim, [number] * 30)
    assert cached(sim, SYSTEM) == 20
    room = blocks.most_protected
    _, refused = room_for([PreloadedPrompt("prompts:1", list(range(4 * room)))], blocks, 64)
    assert f"{room + 2} blocks must stay" in refused[0]


def test_a_further_choice_computes_one_token_of_the_prompt() -> None:
    """Also where prefixes are not shared; but not once the first one's window has passed what it would see."""
    for caching in (False, True):
        sim = simulation(caching=caching, windows=(8, None), max_num_seqs=4)
        choices = sim.submit_choices(SYSTEM, 6, n=3)
        sim.run_until_done()
        assert [choice.cached_tokens for choice in choices] == [0, 20, 20]
    sim = simulation(caching=False, max_num_seqs=1)
    choices = sim.submit_choices(SYSTEM, 30, n=2)
    sim.run_until_done()
    assert [choice.cached_tokens for choice in choices] == [0, 0]


def test_a_token_counts_once_for_all_tables() -> None:
    """The pool counts as many tokens as it holds of sequences of full length, of which each takes 23 blocks."""
    groups = kv_cache_groups((8, None), 8, 64, 4)
    assert most_blocks(groups, 16) == 16 + 5 + 2
    assert KVBlocks(96, 4, groups=groups).pool_tokens(64) == 96 * 64 // 23
    assert KVBlocks(96, 4, groups=kv_cache_groups((8,), 8, 64, 4)).pool_tokens(64) == 96 * 4
    assert KVBlocks(96, 4).pool_tokens(64) == 96 * 4


def test_more_sequences_run_at_once_in_as_much_memory() -> None:
    """A block of one group of two takes half of the bytes."""

    def most_running(**options: object) -> int:
        sim = simulation(max_num_seqs=32, max_num_batched_tokens=32, max_model_len=256, **options)
        for number in range(32):
            sim.submit([number] * 150, 100)
        most = 0
        while sim.scheduler.has_work:
            sim.step()
            most = max(most, len(sim.scheduler.running))
        return most

    assert most_running(windows=(), num_blocks=200) == 5
    assert most_running(num_blocks=400) >= 7
