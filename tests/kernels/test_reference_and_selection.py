"""The reference against formulas worked out by hand or by torch, and the choice of kernels."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from headway.kernels import kernels_for
from headway.kernels.interface import LayerCache, SinkQueries
from headway.kernels.reference import ReferenceKernels
from headway.kernels.weights import CLAMPED, GELU_TANH, SILU
from tests.kernels import operations
from tests.kernels.steps import cache_of, random, step_of

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize("tokens", [64, 4160])
def test_forbid(tokens: int) -> None:
    operations.check_forbid(REFERENCE, "cpu", tokens)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_torchs_over_the_stored_context(window: int | None) -> None:
    """A whole prompt of two sequences, stored through the cache, against scaled_dot_product_attention."""
    queries, heads, kv_heads, width = [6, 11], 4, 2, 16
    step, num_blocks = step_of(queries, queries, 4)
    cache = LayerCache(*(torch.zeros(num_blocks, kv_heads, 4, width) for _ in range(2)))
    query, key, value = (random(s, torch.float32, 17, h, width) for s, h in enumerate((heads, kv_heads, kv_heads)))
    REFERENCE.store(key, value, cache, step.slots)
    got = REFERENCE.attention(query, cache, step, 0.2, window)
    for start, end in ((0, 6), (6, 17)):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        seen = (distance >= 0) & (distance < (window or 100))
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2, enable_gqa=True)
        torch.testing.assert_close(got[start:end], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_is_a_key_without_a_value(window: int | None) -> None:
    """Against scaled_dot_product_attention with one key more, whose score is the sink and whose value is zero."""
    step, num_blocks = step_of([7], [7], 4)
    cache = LayerCache(*(torch.zeros(num_blocks, 2, 4, 16) for _ in range(2)))
    query, key, value = (random(seed, torch.float32, 7, heads, 16) for seed, heads in enumerate((4, 2, 2)))
    sinks = torch.tensor([-30.0, 0.0, 2.0, 30.0])
    REFERENCE.store(key, value, cache, step.slots)
    got = REFERENCE.attention(query, cache, step, 0.2, window, sinks)
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :]
    scores = torch.where((distance >= 0) & (distance < (window or 100)), 0.0, -math.inf).expand(4, 7, 7)
    bias = torch.cat([scores, sinks.view(4, 1, 1).expand(4, 7, 1)], dim=2)
    keys, values = (F.pad(x, (0, 0, 0, 0, 0, 1)).transpose(0, 1)[None] for x in (key, value))
    q = query.transpose(0, 1)[None]
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias[None], scale=0.2, enable_gqa=True)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert got[:, 3].abs().max() < 1e-9


def test_every_query_sees_the_first_keys_with_a_query_of_its_own() -> None:
    """Against a softmax over the scores of both queries."""
    step, num_blocks = step_of([9], [9], 4)
    cache = LayerCache(*(torch.zeros(num_blocks, 1, 4, 16) for _ in range(2)))
    query, first, key, value = (random(seed, torch.float32, 9, heads, 16) for seed, heads in enumerate((3, 3, 1, 1)))
    REFERENCE.store(key, value, cache, step.slots)
    got = REFERENCE.attention(query, cache, step, 0.2, 2, first=SinkQueries(first, 4))
    for row in range(9):
        seen = [(key[at, 0], value[at, 0], first[row] if at < 4 else query[row]) for at in range(row + 1)]
        seen = [each for at, each in enumerate(seen) if at < 4 or at > row - 2]
        scores = torch.stack([(own * keys).sum(1) * 0.2 for keys, _, own in seen], 1)
        expected = scores.softmax(1) @ torch.stack([values for _, values, _ in seen])
        torch.testing.assert_close(got[row], expected)


def test_attention_of_one_key_is_its_value() -> None:
    step, num_blocks = step_of([1], [1], 8)
    cache = cache_of(num_blocks, 1, 8, 8, torch.float32, 0)
    got = REFERENCE.attention(random(1, torch.float32, 1, 3, 8), cache, step, 1.0, None)
    assert torch.equal(got, cache.values.flatten(1, 2)[step.slots // 8, step.slots % 8].expand(1, 3, 8))


def test_rms_norm_of_three_and_four() -> None:
    got = REFERENCE.rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(got, torch.tensor([[3.0, 8.0]]) / math.sqrt(12.5))


def test_rotation_by_a_quarter_turn_pairs_halves() -> None:
    query, key = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]]), torch.zeros(1, 1, 5)
    REFERENCE.rotate(query, key, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([0]))
    assert query.tolist() == [[[-3.0, -4.0, 1.0, 2.0, 5.0]]]


def test_positions_behind_the_tables_count_as_the_last() -> None:
    angles, query, key = torch.arange(6.0).view(3, 2), torch.ones(3, 1, 4), torch.ones(3, 0, 4)
    REFERENCE.rotate(query, key, angles.cos(), angles.sin(), torch.tensor([1, 2, 900]))
    assert torch.equal(query[1], query[2]) and not torch.equal(query[0], query[1])


def test_gates() -> None:
    """torch's silu and gelu, and what gpt-oss's publishers say: (up + 1) * gate * sigmoid(1.702 * gate), cut at 7."""
    gate_up = random(0, torch.float32, 3, 10) * 6
    gate, up = gate_up[:, :5], gate_up[:, 5:]
    assert gate.max() > 7 and up.abs().max() > 7
    torch.testing.assert_close(REFERENCE.apply_gate(gate_up, SILU), F.silu(gate) * up)
    torch.testing.assert_close(REFERENCE.apply_gate(gate_up, GELU_TANH), F.gelu(gate, approximate="tanh") * up)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    torch.testing.assert_close(REFERENCE.apply_gate(gate_up, CLAMPED), (up + 1) * gate * torch.sigmoid(1.702 * gate))


def test_copy_blocks_reads_before_it_writes() -> None:
    cache = cache_of(4, 1, 4, 8, torch.float32, 0)
    keys = cache.keys.clone()
    REFERENCE.copy_blocks([cache], [0, 1], [1, 2])
    assert torch.equal(cache.keys, keys[[0, 0, 1, 3]])


def test_packed_weights_are_refused() -> None:
    operations.check_packed_weights_are_refused(REFERENCE)


def test_an_int8_cache_is_refused() -> None:
    operations.check_int8_cache_is_refused(REFERENCE)


def test_kernels_for_cpu() -> None:
    assert kernels_for("cpu", torch.bfloat16).name == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [("cpu", torch.int8, "dtype torch.int8 is not supported"), ("mps", torch.float16, "device 'mps' is not supported")],
)
def test_what_no_kernels_cover_is_refused(device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels_for(device, dtype)


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import headway.kernels, sys; print([name for name in ('numba', 'triton') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_experts() -> None:
    for dtype in operations.DTYPES:
        operations.check_route(REFERENCE, "cpu", dtype)
        operations.check_mixture(REFERENCE, "cpu", dtype, 9)
