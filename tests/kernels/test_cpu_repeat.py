"""Steps that are done again as a program: the memory of their results, and what they give."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.team import Arena
from headway.kernels.interface import AttentionShape, StepGeometry
from headway.kernels.weights import Weight
from tests.kernels.operations import empty_cache, random_experts
from tests.kernels.steps import random, step_of

pytestmark = pytest.mark.timeout(600)

BLOCK, HIDDEN = 16, 96
# Layers that have little in common.
ATTENTIONS = [AttentionShape(4, 2, 32, None), AttentionShape(4, 4, 16, None), AttentionShape(6, 3, 48, 600)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9)), max_size=60))
def test_tensors_that_are_held_do_not_overlap(orders: list[tuple[int, int]]) -> None:
    """Each order makes a tensor and lets go of one of those before it."""
    arena, held = Arena(), []
    for size, let_go in orders:
        tensor = arena.empty((size,), torch.int32).fill_(len(held))
        held.append((tensor[size // 2 :], size))  # a view keeps the memory
        del tensor
        if let_go < len(held):
            del held[let_go]
        spans = sorted((view.data_ptr() - size // 2 * 4, size * 4) for view, size in held if size)
        assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))
        assert all(start % 64 == 0 for start, _ in spans)


def test_memory_is_used_again_and_joined() -> None:
    arena = Arena()
    parts = [arena.empty((1000,), torch.float32) for _ in range(5)]
    addresses = [part.data_ptr() for part in parts]
    for order in (3, 1, 1, 1, 0):
        del parts[order]
    gc.collect()
    assert arena.empty((5000,), torch.float32).data_ptr() == addresses[0]


def test_a_large_result_takes_the_memory_of_one_that_is_gone() -> None:
    linear = CpuKernels().linear(Weight(random(0, torch.float32, 70_000, 16)), None)
    x = random(1, torch.float32, 64, 16)
    first, second = linear(x), linear(x)
    assert first.data_ptr() != second.data_ptr()
    gone = first.data_ptr()
    del first
    third = linear(x)
    assert third.data_ptr() == gone
    assert torch.equal(second, third)


class Layers:
    """The attention of some decoder layers over steps at fixed addresses, as the engine has them."""

    def __init__(self, dtype: torch.dtype, cache_dtype: torch.dtype, blocks: int) -> None:
        self.kernels = kernels = CpuKernels()
        self.table, self.norm = random(0, dtype, 50, HIDDEN), random(3, dtype, HIDDEN)
        self.layers = []
        for number, (heads, kv_heads, width, _) in enumerate(ATTENTIONS):
            qkv = kernels.linear(Weight(random(4 * number, dtype, (heads + 2 * kv_heads) * width, HIDDEN)), None)
            out = kernels.linear(Weight(random(4 * number + 1, dtype, HIDDEN, heads * width), "int8"), None)
            angles = random(4 * number + 2, torch.float32, 4096, width // 2)
            cache = empty_cache((blocks, kv_heads, BLOCK, width), cache_dtype, "cpu")
            for tensor in cache.tensors:
                tensor.zero_()
            # The tables are kept, as a program knows their addresses alone.
            self.layers.append((qkv, out, angles.cos(), angles.sin(), cache))
        self.numbers = torch.zeros(3, 64, dtype=torch.int64)
        self.tables = torch.zeros(64, 256, dtype=torch.int32)

    def fix(self, step: StepGeometry, tokens: Tensor) -> StepGeometry:
        count = len(tokens)
        for row, values in enumerate((tokens, step.positions, step.slots)):
            self.numbers[row, :count] = values
        self.tables[: len(step.block_tables), : step.block_tables.shape[1]] = step.block_tables
        step.positions, step.slots = self.numbers[1, :count], self.numbers[2, :count]
        step.block_tables = self.tables[: len(step.block_tables)]
        return step

    def run(self, step: StepGeometry) -> Tensor:
        kernels, count = self.kernels, len(step.positions)
        residual = kernels.take(self.table, self.numbers[0, :count])
        hidden = kernels.rms_norm(residual, self.norm, 1e-6)
        for (heads, kv_heads, width, window), (qkv, out, cos, sin, cache) in zip(ATTENTIONS, self.layers, strict=True):
            query, key, value = qkv(hidden).view(count, -1, width).split([heads, kv_heads, kv_heads], 1)
            kernels.rotate(query, key, cos, sin, step.positions)
            kernels.store(key, value, cache, step.slots)
            attended = kernels.attention(query, cache, step, 0.2, window)
            hidden, residual = kernels.add_rms_norm(out(attended.flatten(1)), residual, self.norm, 1e-6)
        return hidden

    def repeated(self, step: StepGeometry) -> Tensor:
        return self.kernels.repeat(("layers", len(step.positions)), step, ATTENTIONS, lambda: self.run(step))


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
def test_a_program_gives_what_its_operations_give(dtype: torch.dtype, is_int8: bool) -> None:
    """Other tokens, sequences and contexts, so many parts too that memory has to move; bit for bit."""
    loads = [
        ([1, 1, 1], [5, 9, 1]), ([1, 1, 1], [6, 10, 2]), ([3], [40]), ([1, 1, 1], [700, 1300, 2]), ([2, 1], [600, 33]),
        ([1, 1, 1], [2000, 2000, 2000]), ([3], [3]), ([1], [8]), ([1, 1, 1], [701, 1301, 3]),
    ]  # fmt: skip
    eager, again = (Layers(dtype, torch.int8 if is_int8 else dtype, 500) for _ in range(2))
    for number, (queries, contexts) in enumerate(loads * 2):
        tokens = torch.randint(0, 50, (sum(queries),), generator=torch.Generator().manual_seed(number))
        expected = eager.run(eager.fix(step_of(queries, contexts, BLOCK, number)[0], tokens))
        got = again.repeated(again.fix(step_of(queries, contexts, BLOCK, number)[0], tokens))
        assert torch.equal(got, expected)


def test_the_second_time_nothing_is_called() -> None:
    layers = Layers(torch.float32, torch.float32, 20)
    step = layers.fix(step_of([1], [5], BLOCK)[0], torch.tensor([3]))
    first = layers.repeated(step)
    place, kept = first.data_ptr(), first.clone()
    del first

    def never() -> Tensor:
        raise AssertionError("called again")

    second = layers.kernels.repeat(("layers", 1), step, ATTENTIONS, never)
    assert second.data_ptr() == place
    assert torch.equal(second, kept)


def test_a_mixture_is_repeated_for_other_tokens_and_other_experts() -> None:
    """What was recorded reads the plan that it has just made."""
    kernels, step, calls = CpuKernels(), step_of([1] * 5, [1] * 5, BLOCK)[0], []
    mixture = kernels.mixture(*random_experts(torch.bfloat16, 6, 16, 8), 6)
    x, logits = torch.zeros(5, 16, dtype=torch.bfloat16), torch.zeros(5, 6, dtype=torch.bfloat16)

    def run() -> Tensor:
        calls.append(1)
        return mixture(x, *kernels.route(logits, 2, True, False), None)

    for seed in range(4):
        x.copy_(random(seed, torch.bfloat16, 5, 16))
        logits.copy_(random(seed + 10, torch.bfloat16, 5, 6))
        got = kernels.repeat("mixture", step, [], run).clone()
        assert torch.equal(got, mixture(x, *kernels.route(logits, 2, True, False), None))
    assert len(calls) == 1


def test_only_so_many_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.kernels.cpu.kernels._MOST_PROGRAMS", 3)
    kernels, step = CpuKernels(), step_of([1], [1], BLOCK)[0]
    x, weight = random(0, torch.float32, 4, 16), torch.ones(16)
    for key in (1, 2, 3, 4, 1, 4):
        kernels.repeat(key, step, [], lambda: kernels.rms_norm(x, weight, 1e-6))
        assert len(kernels._programs) <= 3
