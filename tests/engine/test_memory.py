"""The memory plan: what a step takes comes before the KV pool."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.cost.config import read_shape
from headway.engine import memory
from headway.engine.config import EngineConfig
from headway.engine.memory import kv_pool_bytes, sampling_bytes
from tests.cost import published

GIB = 1 << 30
SHAPE = read_shape(published.QWEN2_5_05B)
MODEL: Any = SimpleNamespace(shape=SHAPE)


def pool(available: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> int:
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    return kv_pool_bytes(EngineConfig("m", **changes), torch.device("cpu"), MODEL, 512, SHAPE.max_positions)


def test_half_of_the_memory_is_the_pool_s_where_a_step_fits_into_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool(8 * GIB, monkeypatch) == 4 * GIB


def test_a_step_that_needs_more_than_half_makes_the_pool_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    many = sampling_bytes(1024, SHAPE.vocab, SHAPE.max_positions)
    assert GIB < many < 4 * GIB
    left = pool(4 * GIB, monkeypatch, max_num_seqs=1024)
    assert 0 < left < 4 * GIB - many
    assert left > pool(4 * GIB, monkeypatch, max_num_seqs=1100)
    assert pool(GIB // 2, monkeypatch, max_num_seqs=1024) == 0


def test_a_pool_that_was_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool(GIB, monkeypatch, max_num_seqs=1024, kv_cache_memory=3 * GIB) == 3 * GIB


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seconds", [5, pytest.param(180, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_memory_is_flat_whatever_the_lengths(dtype: str, seconds: int) -> None:
    """What a product keeps for each number of tokens that it has met would show."""
    command = [sys.executable, "-m", "tests.engine.mixed_lengths", dtype, str(seconds)]
    ready, after = map(int, subprocess.check_output(command, text=True).split()[-2:])
    assert after < 1.3 * ready, (ready >> 20, after >> 20)
