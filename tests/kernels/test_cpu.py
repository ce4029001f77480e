"""The CPU kernels against the reference."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.families import Family
from headway.kernels.host import one_thread
from headway.kernels.interface import LayerCache, SinkQueries
from headway.kernels.weights import Weight
from tests.kernels import operations
from tests.kernels.operations import DTYPES, check_attention
from tests.kernels.steps import cache_of, random, step_of, torch_threads

# Each dtype with a cache as it is and with a rounded one. One kind more takes five seconds to compile.
IN_CACHES = pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [*((each, None) for each in DTYPES), *((each, torch.int8) for each in DTYPES[:2])]
    + [pytest.param(DTYPES[2], torch.int8, marks=pytest.mark.slow)],
    ids=str,
)
# Compiling for a first run on a machine takes tens of seconds where cores are slow or shared.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def with_threads(threads: int) -> CpuKernels:
    with torch_threads(threads):
        return CpuKernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 896), (3, 40), (70, 512)])
def test_norms(kernels: CpuKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_norms(kernels, "cpu", dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(kernels: CpuKernels, dtype: torch.dtype) -> None:
    operations.check_norm_of_heads(kernels, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 40), (70, 512)])
def test_add_and_soft_cap(kernels: CpuKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_add_and_soft_cap(kernels, "cpu", dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 896), (7, 40), (60, 768), (5, 7)])
def test_take(kernels: CpuKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    before = torch.get_num_threads()
    operations.check_take(kernels, "cpu", dtype, tokens, width)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_is_for_what_is_inside(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with pytest.raises(KeyError, match=r"^1$"), one_thread():
            raise KeyError(torch.get_num_threads())
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 486), (7, 40), (40, 512)])
def test_gate(kernels: CpuKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_gate(kernels, "cpu", dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "half"), [(1, 64, 32), (5, 24, 12), (90, 80, 20)])
def test_rotate(kernels: CpuKernels, dtype: torch.dtype, tokens: int, width: int, half: int) -> None:
    operations.check_rotate(kernels, "cpu", dtype, tokens, width, half)


@pytest.mark.parametrize("dtype", DTYPES)
def test_draw(kernels: CpuKernels, dtype: torch.dtype) -> None:
    operations.check_draw(kernels, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_route(kernels: CpuKernels, dtype: torch.dtype) -> None:
    operations.check_route(kernels, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(kernels: CpuKernels, dtype: torch.dtype) -> None:
    operations.check_scores(kernels, "cpu", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_heads(kernels: CpuKernels, dtype: torch.dtype, tokens: int) -> None:
    operations.check_heads(kernels, "cpu", dtype, tokens)


def test_rounded_heads(kernels: CpuKernels) -> None:
    operations.check_heads(kernels, "cpu", torch.float32, 5, "int8-weight-only")


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "block_size"), [(16, 128, 64, 16), (5, 36, 8, 8), (130, 32, 16, 1)]
)
def test_attention_over_latents(
    kernels: CpuKernels, dtype: torch.dtype, heads: int, rank: int, rotated: int, block_size: int
) -> None:
    steps = [1, 7, 1, 20], [1, 7, 1100, 333]
    for window, first_keys in ((None, 0), (70, 2 * block_size)):
        sizes = heads, rank, rotated, block_size, window, first_keys
        operations.check_attention_over_latents(kernels, "cpu", dtype, *steps, *sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9, 130])
def test_mixture(kernels: CpuKernels, dtype: torch.dtype, tokens: int) -> None:
    operations.check_mixture(kernels, "cpu", dtype, tokens)


@pytest.mark.parametrize("scheme", ["int8", "int8-weight-only", "int4"])
def test_mixture_of_rounded_experts(kernels: CpuKernels, scheme: str) -> None:
    operations.check_mixture(kernels, "cpu", torch.float32, 33, scheme)


def test_an_expert_with_more_tokens_than_a_piece_has(kernels: CpuKernels) -> None:
    """All go to one expert, in pieces, by three threads."""
    operations.check_mixture(with_threads(3), "cpu", torch.bfloat16, 700)


def test_experts_that_are_not_alike_are_refused(kernels: CpuKernels) -> None:
    gate_up, down = operations.random_experts(torch.float32, 3, 16, 8)
    gate_up[2] = (Weight(gate_up[2][0].parts[0], "int8"), None)
    with pytest.raises(ValueError, match=r"an expert's weight is \('int8', 16, 16, None\), but that of another is"):
        kernels.mixture(gate_up, down, 3)


def test_copy_blocks(kernels: CpuKernels) -> None:
    operations.check_copy_blocks(kernels, "cpu")


MIXED = ([1, 7, 1, 40, 130, 1, 1], [1, 7, 300, 100, 130, 1500, 513])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 37, 600])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"),
    [(14, 2, 64, 16), (4, 4, 80, 8), (8, 1, 24, 64), (4, 2, 128, 32), (2, 2, 8, 16), (6, 2, 96, 16), (3, 1, 32, 32)],
)
def test_attention_of_a_mixed_step(
    kernels: CpuKernels, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, width: int, block_size: int
) -> None:
    check_attention(kernels, "cpu", dtype, *MIXED, heads, kv_heads, width, block_size, window)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 700)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    width=st.sampled_from([8, 16, 40, 64, 72]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    window=st.one_of(st.none(), st.integers(1, 800)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    has_sinks=st.booleans(),
    first_blocks=st.integers(0, 8),
)
def test_attention_of_any_step(
    lengths: list[tuple[int, int]], kv_heads: int, group: int, width: int, block_size: int, window: int | None,
    dtype: torch.dtype, seed: int, has_sinks: bool, first_blocks: int,
) -> None:  # fmt: skip
    queries, contexts = [q for q, _ in lengths], [q + earlier for q, earlier in lengths]
    check_attention(
        CpuKernels(), "cpu", dtype, queries, contexts, kv_heads * group, kv_heads, width, block_size, window, seed,
        has_sinks=has_sinks, first_keys=first_blocks * block_size if window else 0,
    )  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"), [(14, 2, 64, 16), (4, 4, 80, 8), (8, 1, 24, 64), (4, 2, 128, 32)]
)
def test_attention_over_a_rounded_cache(
    kernels: CpuKernels, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, width: int, block_size: int
) -> None:
    for each in (torch.int8, torch.float8_e4m3fn):
        check_attention(kernels, "cpu", dtype, *MIXED, heads, kv_heads, width, block_size, window, cache_dtype=each)


def test_float8_is_stored_to_the_nearest(kernels: CpuKernels) -> None:
    operations.check_float8_store(kernels, "cpu")


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("window", [None, 37])
def test_attention_with_sinks(kernels: CpuKernels, window: int | None, cache_dtype: torch.dtype | None) -> None:
    """Contexts in one part and in several; of those, the window hides the first."""
    steps = [1, 7, 1, 20], [1, 7, 1100, 333]
    check_attention(kernels, "cpu", torch.float32, *steps, 14, 2, 64, 16, window, 0, cache_dtype, has_sinks=True)


@pytest.mark.covering(1)
@IN_CACHES
@pytest.mark.parametrize(("block_size", "first_keys"), [(16, 16), (32, 160), (16, 512), (5, 5)])
def test_attention_with_queries_of_their_own_for_the_first_keys(
    kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype | None, block_size: int, first_keys: int
) -> None:
    for window in (37, 600):
        sizes = 14, 2, 64, block_size, window, 0, cache_dtype
        check_attention(kernels, "cpu", dtype, *MIXED, *sizes, first_keys=first_keys)


@IN_CACHES
def test_attention_with_a_soft_cap(kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    steps = [1, 7, 1, 20], [1, 7, 1100, 333]
    check_attention(kernels, "cpu", dtype, *steps, 14, 2, 64, 16, 37, 0, cache_dtype, softcap=0.7)


def test_an_int8_cache_holds_zeros(kernels: CpuKernels) -> None:
    step, blocks = step_of([3], [3], 16)
    cache = operations.empty_cache((blocks, 1, 16, 16), torch.int8, "cpu")
    kernels.store(torch.zeros(3, 1, 16), torch.zeros(3, 1, 16), cache, step.slots)
    assert not kernels.attention(random(0, torch.float32, 3, 2, 16), cache, step, 0.25, None).any()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_copied_blocks_are_attended_to_as_the_first_ones(kernels: CpuKernels, cache_dtype: torch.dtype) -> None:
    step, blocks = step_of([20], [20], 16)
    cache = operations.empty_cache((blocks, 2, 16, 32), cache_dtype, "cpu")
    key, value, query = (random(seed, torch.float32, 20, heads, 32) for seed, heads in ((0, 2), (1, 2), (2, 4)))
    kernels.store(key, value, cache, step.slots)
    before = kernels.attention(query, cache, step, 0.2, None)
    used = step.block_tables[0, :2].tolist()
    free = [block for block in range(blocks) if block not in used][:2]
    kernels.copy_blocks([cache], used, free)
    step.block_tables[0, :2] = torch.tensor(free, dtype=torch.int32)
    assert torch.equal(kernels.attention(query, cache, step, 0.2, None), before)


def test_attention_does_not_depend_on_its_company_or_on_threads() -> None:
    """Bit for bit, so that a greedy request gives the same tokens alone and in a crowd."""
    width, heads, kv_heads, block_size = 64, 4, 2, 16
    queries, contexts = [1, 1, 30, 1], [1100, 77, 90, 640]
    step, num_blocks = step_of(queries, contexts, block_size)
    cache = cache_of(num_blocks, kv_heads, block_size, width, torch.float32, 5)
    query = random(6, torch.float32, sum(queries), heads, width)
    together = with_threads(3).attention(query, cache, step, 0.125, None)
    start = 0
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        alone, _ = step_of([count], [context], block_size)
        alone.block_tables = step.block_tables[row : row + 1]
        got = with_threads(1).attention(query[start : start + count], cache, alone, 0.125, None)
        assert torch.equal(got, together[start : start + count])
        start += count


@IN_CACHES
def test_what_sequences_have_in_common_is_read_once_and_no_bit_differs(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    """A family in two branches, with a chunk of a prompt and drafts in it, and others between its sequences."""
    queries = [1, 1, 3, 150, 1, 1, *[1] * 40]
    contexts = [2000, 1100, 1603, 1200, 700, 1900, *range(1600, 1640)]
    step, blocks = step_of(queries, contexts, 16)
    cache = operations.empty_cache((blocks, 2, 16, 64), cache_dtype or dtype, "cpu")
    slots = torch.arange(blocks * 16)
    kernels = with_threads(3)
    kernels.store(random(1, dtype, len(slots), 2, 64), random(2, dtype, len(slots), 2, 64), cache, slots)
    common = [(0, 2, 1536), (2, 5, 1100), (5, 3, 1040), *((3 if n == 6 else n - 1, n, 1040) for n in range(6, 46))]
    for before, number, tokens in common:
        full = -(-tokens // 16)
        step.block_tables[number, :full] = step.block_tables[before, :full]
    query, sinks = random(0, dtype, sum(queries), 4, 64), random(3, torch.float32, 4)
    apart = kernels.attention(query, cache, step, 0.125, None, sinks)
    family = Family([0, *(number for _, number, _ in common)], [tokens for _, _, tokens in common])
    cascade = replace(step, families=[family], context_lens_host=list(contexts))
    together = kernels.attention(query, cache, cascade, 0.125, None, sinks)
    assert torch.equal(together, apart)


@IN_CACHES
def test_attention_does_not_depend_on_how_a_long_prompt_is_cut(
    kernels: CpuKernels, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    """Bit for bit: many tokens go over their context in one piece, few in parts that are merged."""
    step, blocks = step_of([200], [1500], 16)
    cache = operations.empty_cache((blocks, 2, 16, 64), cache_dtype or dtype, "cpu")
    before, query = step_of([1500], [1500], 16)[0], random(0, dtype, 200, 4, 64)
    kernels.store(random(1, dtype, 1500, 2, 64), random(2, dtype, 1500, 2, 64), cache, before.slots)
    of_first = random(4, dtype, 200, 4, 64)
    for window, sinks, keys in (
        (None, None, 0),
        (700, random(3, torch.float32, 4), 0),
        (100, None, 0),
        (100, None, 32),
    ):
        options = 0.125, window, sinks, None
        whole = kernels.attention(query, cache, step, *options, SinkQueries(of_first, keys) if keys else None)
        for first, end in ((0, 1), (57, 60), (199, 200)):
            few, _ = step_of([end - first], [1300 + end], 16)
            few.block_tables = step.block_tables
            own = SinkQueries(of_first[first:end], keys) if keys else None
            assert torch.equal(kernels.attention(query[first:end], cache, few, *options, own), whole[first:end])


def test_attention_over_latents_does_not_depend_on_its_company_or_on_threads() -> None:
    queries, contexts = [1, 1, 30, 1], [1100, 77, 90, 641]
    step, num_blocks = step_of(queries, contexts, 16)
    for dtype in DTYPES:
        keys = random(5, dtype, num_blocks, 1, 16, 80)
        cache, query, start = LayerCache(keys, keys[..., :64]), random(6, dtype, sum(queries), 16, 80), 0
        together = with_threads(3).attention(query, cache, step, 0.125, None)
        for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
            alone, _ = step_of([count], [context], 16)
            alone.block_tables = step.block_tables[row : row + 1]
            got = with_threads(1).attention(query[start : start + count], cache, alone, 0.125, None)
            assert torch.equal(got, together[start : start + count])
            start += count


def test_large_scores_do_not_overflow(kernels: CpuKernels) -> None:
    step, num_blocks = step_of([1], [200], 16)
    cache = cache_of(num_blocks, 1, 16, 32, torch.float32, 0)
    query = random(3, torch.float32, 1, 2, 32) * 1e4
    plain = operations.empty_cache((num_blocks, 1, 16, 32), torch.float32, "cpu")
    before, _ = step_of([200], [200], 16)
    key, value = random(0, torch.float32, 200, 1, 32), random(1, torch.float32, 200, 1, 32)
    operations.REFERENCE.store(key, value, plain, before.slots)
    kernels.store(key, value, cache, before.slots)
    got = kernels.attention(query, cache, step, 1.0, None)
    torch.testing.assert_close(got, operations.REFERENCE.attention(query, plain, step, 1.0, None), atol=1e-3, rtol=1e-3)


def test_one_plan_serves_all_layers_and_a_new_step_makes_a_new_one(kernels: CpuKernels) -> None:
    first, blocks = step_of([2], [9], 8)
    cache = cache_of(blocks, 1, 8, 16, torch.float32, 0)
    query = random(1, torch.float32, 2, 2, 16)
    kernels.attention(query, cache, first, 0.25, None)
    made = kernels._plans[2, None]._memory.copy()
    kernels.attention(query, cache, first, 0.25, 4)
    assert (kernels._plans[2, None]._memory == made).all()
    kernels.attention(query[:1], cache, step_of([1], [9], 8)[0], 0.25, None)
    assert (kernels._plans[2, None]._memory != made).any()


def test_a_plan_finds_room_for_any_number_of_tiles(kernels: CpuKernels) -> None:
    many = [1] * 900
    check_attention(kernels, "cpu", torch.float32, many, [1 + i % 20 for i in range(900)], 2, 1, 16, 16, None)


def test_no_tokens(kernels: CpuKernels) -> None:
    empty = torch.empty(0, 32)
    assert kernels.rms_norm(empty, torch.ones(32), 1e-6).shape == (0, 32)
    assert kernels.gated_linear(Weight(torch.ones(32, 32)), None)(empty).shape == (0, 16)


def test_heads_must_be_dense(kernels: CpuKernels) -> None:
    crooked = torch.zeros(4, 16, 2).transpose(1, 2)
    with pytest.raises(ValueError, match=r"key of shape \(4, 2, 16\) has strides \(32, 1, 2\)"):
        kernels.rotate(torch.zeros(4, 2, 16), crooked, torch.ones(4, 8), torch.ones(4, 8), torch.arange(4))


def test_threads_of_torch_are_respected_and_left_alone() -> None:
    before = torch.get_num_threads()
    kernels = with_threads(1)
    seen = []

    def work() -> None:
        kernels.rms_norm(torch.ones(64, 1024), torch.ones(1024), 1e-6)
        seen.append(kernels._team.threads)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert seen == [1, 1]
    assert torch.get_num_threads() == before
