"""The memory plan: what a step takes comes before the KV pool."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.cost.config import read_shape
from headway.cost.layers import CacheSpec, Experts
from headway.engine import memory
from headway.engine.config import EngineConfig
from headway.engine.memory import kv_pool_bytes
from headway.policy.cache.sizing import sampling_bytes
from tests.cost import published

GIB = 1 << 30
SHAPE = read_shape(published.QWEN2_5_05B)
MODEL: Any = SimpleNamespace(shape=SHAPE)


def pool(available: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    return kv_pool_bytes(EngineConfig("m", **changes), torch.device("cpu"), MODEL, 512, SHAPE.max_positions)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_layers_may_keep_different_things(dtype: torch.dtype) -> None:
    """Each cache has the size of its layer, and a block takes what all of them have of it."""
    specs = [CacheSpec(2, 8, 8), CacheSpec(1, 32, 32, window=24), CacheSpec(4, 16, 8)]
    caches = memory.zero_caches(specs, 5, 16, dtype, torch.device("cpu"))
    assert [tuple(cache.keys.shape) for cache in caches] == [(5, 2, 16, 8), (5, 1, 16, 32), (5, 4, 16, 16)]
    assert [tuple(cache.values.shape) for cache in caches] == [(5, 2, 16, 8), (5, 1, 16, 32), (5, 4, 16, 8)]
    tensors = [tensor for cache in caches for tensor in cache.tensors]
    assert len(tensors) == (12 if dtype == torch.int8 else 6) and not any(tensor.any() for tensor in tensors)
    assert memory.bytes_per_block(specs, 16, dtype) * 5 == sum(tensor.nbytes for tensor in tensors)


def test_a_latent_is_kept_once_for_all_heads() -> None:
    """DeepSeek-V2-Lite keeps 512 numbers and the 64 of a key that has positions, in each of 27 layers."""
    shape = read_shape(published.DEEPSEEK_V2_LITE)
    assert memory.bytes_per_block(shape.caches, 1, torch.bfloat16) == 27 * (512 + 64) * 2
    cache = memory.zero_caches(shape.caches[:1], 3, 16, torch.bfloat16, torch.device("cpu"))[0]
    assert (tuple(cache.keys.shape), tuple(cache.values.shape)) == ((3, 1, 16, 576), (3, 1, 16, 512))
    assert len(cache.tensors) == 1
    cache.keys.fill_(2.0)
    assert (cache.values == 2).all()


def test_half_of_the_memory_is_the_pool_s_where_a_step_fits_into_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool(8 * GIB, monkeypatch) == 4 * GIB


def test_a_share_that_is_asked_for_is_one_of_the_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 16 * GIB)
    most, less = (pool(8 * GIB, monkeypatch, gpu_memory_utilization=share) for share in (0.9, 0.65))
    assert 5 * GIB < most < 6.4 * GIB and most - less == int(16 * GIB * 0.9) - int(16 * GIB * 0.65)


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 8 * GIB)
    assert pool(GIB, monkeypatch, kv_cache_memory=8 * GIB) == 8 * GIB
    with pytest.raises(ValueError, match=r"kv_cache_memory is 9\.0 GiB, but the machine has 8\.0 GiB; lower it"):
        pool(8 * GIB, monkeypatch, kv_cache_memory=9 * GIB)


def test_a_step_that_needs_more_than_half_makes_the_pool_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    many = sampling_bytes(1024, SHAPE.vocab, SHAPE.max_positions)
    assert GIB < many < 4 * GIB
    left = pool(4 * GIB, monkeypatch, max_num_seqs=1024)
    assert 0 < left < 4 * GIB - many
    assert left > pool(4 * GIB, monkeypatch, max_num_seqs=1100)
    assert pool(GIB // 2, monkeypatch, max_num_seqs=1024) == 0


def test_a_pool_that_was_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool(GIB, monkeypatch, max_num_seqs=1024, kv_cache_memory=3 * GIB) == 3 * GIB


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("seconds", "growth"),
    [(1, 1.1), pytest.param(180, 1.3, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_memory_is_flat_whatever_the_lengths(dtype: str, seconds: int, growth: float) -> None:
    """What a product keeps for each number of tokens that it has met would show: 48 of them in the shorter one."""
    command = [sys.executable, "-m", "tests.engine.mixed_lengths", dtype, str(seconds)]
    ready, after = map(int, subprocess.check_output(command, text=True).split()[-2:])
    assert after < growth * ready, (ready >> 20, after >> 20)


def test_a_mixture_keeps_a_result_for_each_expert_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are 20 experts and the shared one, together wider than the widest of a plain feed-forward layer."""
    plain = pool(4 * GIB, monkeypatch, max_num_seqs=1024)
    experts = Experts(count=32, per_token=20, width=64, layers=SHAPE.layers)
    monkeypatch.setattr(MODEL, "shape", replace(SHAPE, experts=experts))
    more = 21 * SHAPE.hidden - 2 * SHAPE.ffn
    assert plain - pool(4 * GIB, monkeypatch, max_num_seqs=1024) == 512 * more * 2 * memory.ACTIVATION_COPIES > 0
