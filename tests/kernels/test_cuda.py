"""The CUDA kernels against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.families import CommonParts
from headway.kernels.interface import LayerCache
from headway.kernels.weights import SILU, Weight
from tests.kernels import operations
from tests.kernels.operations import DTYPES, check_attention
from tests.kernels.steps import assert_close, cache_of, on, random, step_of

pytest.importorskip("triton")
import tests.kernels.interpreted  # noqa: F401
from headway.kernels.cuda.attention import count_splits
from headway.kernels.cuda.kernels import CudaKernels

# Without a GPU, tests/conftest.py has set TRITON_INTERPRET before anything could import Triton.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of what takes the interpreter long: other dtypes than this one only convert what they load and store.
SLOWER = [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    return CudaKernels()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 96), (3, 40)])
def test_norms(kernels: CudaKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_norms(kernels, DEVICE, dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(kernels: CudaKernels, dtype: torch.dtype) -> None:
    operations.check_norm_of_heads(kernels, DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(2, 1100), (3, 40)])
def test_take(kernels: CudaKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_take(kernels, DEVICE, dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(2, 1100), (3, 40)])
def test_gate(kernels: CudaKernels, dtype: torch.dtype, tokens: int, width: int) -> None:
    operations.check_gate(kernels, DEVICE, dtype, tokens, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "half"), [(3, 64, 32), (2, 24, 12), (2, 80, 20)])
def test_rotate(kernels: CudaKernels, dtype: torch.dtype, tokens: int, width: int, half: int) -> None:
    operations.check_rotate(kernels, DEVICE, dtype, tokens, width, half)


@pytest.mark.parametrize("dtype", SLOWER)
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_attention_over_a_rounded_cache(kernels: CudaKernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check_attention(kernels, DEVICE, dtype, [1, 7, 20], [70, 7, 33], 4, 2, 32, 16, 37, cache_dtype=cache_dtype)
    check_attention(kernels, DEVICE, dtype, [1], [520], 3, 1, 32, 16, None, cache_dtype=cache_dtype)


def test_float8_is_stored_to_the_nearest(kernels: CudaKernels) -> None:
    operations.check_float8_store(kernels, DEVICE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "width"), [(8, 8), (16, 80)])
def test_store(kernels: CudaKernels, dtype: torch.dtype, block_size: int, width: int) -> None:
    operations.check_store(kernels, DEVICE, dtype, block_size, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_of_latents(kernels: CudaKernels, dtype: torch.dtype) -> None:
    operations.check_store_of_latents(kernels, DEVICE, dtype)


@pytest.mark.parametrize("tokens", [64, 4096, 4160])
def test_forbid(kernels: CudaKernels, tokens: int) -> None:
    operations.check_forbid(kernels, DEVICE, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_soft_cap(kernels: CudaKernels, dtype: torch.dtype) -> None:
    operations.check_add_and_soft_cap(kernels, DEVICE, dtype, 3, 40)


@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.slow)])
def test_experts(kernels: CudaKernels, dtype: torch.dtype) -> None:
    operations.check_route(kernels, DEVICE, dtype)
    operations.check_mixture(kernels, DEVICE, dtype, 9)
    operations.check_scores(kernels, DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(kernels: CudaKernels, dtype: torch.dtype) -> None:
    operations.check_heads(kernels, DEVICE, dtype, 3)


@pytest.mark.parametrize("dtype", SLOWER)
@pytest.mark.parametrize(("heads", "rank", "rotated"), [pytest.param(16, 64, 32, marks=pytest.mark.slow), (20, 36, 8)])
def test_attention_over_latents(kernels: CudaKernels, dtype: torch.dtype, heads: int, rank: int, rotated: int) -> None:
    for steps in (([1, 5, 9], [1, 7, 33]), ([1, 1], [700, 90])):  # a program has one token, however many there are
        operations.check_attention_over_latents(kernels, DEVICE, dtype, *steps, heads, rank, rotated, 16)
        operations.check_attention_over_latents(kernels, DEVICE, dtype, *steps, heads, rank, rotated, 16, 37, 16)


def test_copy_blocks(kernels: CudaKernels) -> None:
    operations.check_copy_blocks(kernels, DEVICE)
    kernels.copy_blocks([], [], [])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", SLOWER)
@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"), [(14, 2, 64, 16), (3, 3, 80, 8), (8, 1, 24, 64), (2, 1, 128, 32)]
)
def test_attention_of_a_mixed_step(
    kernels: CudaKernels, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, width: int, block_size: int
) -> None:
    check_attention(kernels, DEVICE, dtype, [1, 7, 1, 20], [1, 7, 70, 33], heads, kv_heads, width, block_size, window)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_attention_of_long_contexts_is_split(kernels: CudaKernels, dtype: torch.dtype, window: int | None) -> None:
    step, _ = step_of([1, 1], [700, 90], 16)
    assert count_splits(step, None, 1, 1, kernels._multiprocessors) > 1
    check_attention(kernels, DEVICE, dtype, [1, 1], [700, 90], 7, 1, 64, 16, window)


@pytest.mark.parametrize("window", [None, 37])
def test_attention_with_sinks(kernels: CudaKernels, window: int | None) -> None:
    """The context is in one part, or in several, the first of which the window hides."""
    for lengths, heads, kv_heads in ((([1, 7, 20], [1, 7, 33]), 14, 2), (([1, 1], [700, 90]), 7, 1)):
        check_attention(kernels, DEVICE, torch.float32, *lengths, heads, kv_heads, 64, 16, window, has_sinks=True)


@pytest.mark.parametrize("dtype", SLOWER)
@pytest.mark.parametrize(("window", "first_keys"), [(37, 16), (300, 16), (5, 80)])
def test_attention_with_queries_of_their_own_for_the_first_keys(
    kernels: CudaKernels, dtype: torch.dtype, window: int, first_keys: int
) -> None:
    for lengths, heads, kv_heads in ((([1, 7, 20], [1, 7, 33]), 14, 2), (([1, 1], [700, 90]), 7, 1)):
        check_attention(kernels, DEVICE, dtype, *lengths, heads, kv_heads, 64, 16, window, first_keys=first_keys)


def test_attention_with_a_soft_cap(kernels: CudaKernels) -> None:
    for lengths, heads, kv_heads in ((([1, 7, 20], [1, 7, 33]), 14, 2), (([1, 1], [700, 90]), 7, 1)):
        check_attention(kernels, DEVICE, torch.float32, *lengths, heads, kv_heads, 64, 16, 37, softcap=0.7)


@pytest.mark.parametrize("dtype", SLOWER)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
def test_what_sequences_have_in_common_is_read_once(
    kernels: CudaKernels, dtype: torch.dtype, sinks: torch.Tensor | None
) -> None:
    """Two parts in common, one with drafts, and a sequence between them that has nothing in common."""
    queries, contexts = [1, 3, 1, 1, 1], [150, 143, 300, 600, 290]
    step, blocks = step_of(queries, contexts, 16)
    for before, after, tokens in ((0, 1, 130), (2, 4, 272)):
        step.block_tables[after, : tokens // 16] = step.block_tables[before, : tokens // 16]
    cache = cache_of(blocks, 2, 16, 16, dtype, 1)
    query = random(0, dtype, 7, 4, 16)
    expected = operations.REFERENCE.attention(query, cache, step, 0.25, None, sinks)
    there, cached = on(DEVICE, step), LayerCache(cache.keys.to(DEVICE), cache.values.to(DEVICE))
    parts = [[0, 128, 0, 4], [2, 272, 4, 2], [0, 0, 0, 0]], [0, 1, 2, 3, 4, 6, 0], [128] * 4 + [272, 0, 272]
    there.common = CommonParts(*(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in parts))
    of_device = None if sinks is None else sinks.to(DEVICE)
    assert_close(kernels.attention(query.to(DEVICE), cached, there, 0.25, None, of_device), expected, dtype)
    windowed = operations.REFERENCE.attention(query, cache, step, 0.25, 40, sinks)
    assert_close(kernels.attention(query.to(DEVICE), cached, there, 0.25, 40, of_device), windowed, dtype)


def test_splits_fill_the_device_but_stay_long(kernels: CudaKernels) -> None:
    long, _ = step_of([1], [20_000], 16)
    short, _ = step_of([1], [400], 16)
    many, _ = step_of([1] * 64, [2_000] * 64, 16)
    assert count_splits(long, None, 8, 1, 132) == 32
    assert count_splits(short, None, 8, 1, 132) == 1
    assert count_splits(long, 128, 8, 1, 132) == 1  # however long, little of it is seen
    assert count_splits(many, None, 8, 1, 132) == 1


def test_linear(kernels: CudaKernels) -> None:
    weight, bias, x = random(0, torch.float32, 24, 40), random(1, torch.float32, 24), random(2, torch.float32, 3, 40)
    got = kernels.linear(Weight(weight.to(DEVICE)), bias.to(DEVICE))(x.to(DEVICE))
    torch.testing.assert_close(got.cpu(), x @ weight.T + bias, atol=1e-4, rtol=1e-4)


def test_no_tokens(kernels: CudaKernels) -> None:
    empty = torch.empty(0, 32, device=DEVICE)
    assert kernels.rms_norm(empty, torch.ones(32, device=DEVICE), 1e-6).shape == (0, 32)
    assert kernels.apply_gate(empty, SILU).shape == (0, 16)
