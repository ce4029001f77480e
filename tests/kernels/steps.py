"""Steps over shuffled block tables, to run any implementation against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headway.kernels.interface import LayerCache, StepGeometry

# Largest absolute error against float32 arithmetic on values of order one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


def step_of(queries: list[int], contexts: list[int], block_size: int, seed: int = 0) -> tuple[StepGeometry, int]:
    """A step whose sequences compute their last queries[i] of contexts[i] tokens; and the number of blocks."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for context in contexts]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
    for row, (count, used) in enumerate(zip(counts, torch.tensor(counts).cumsum(0).tolist(), strict=True)):
        tables[row, :count] = order[used - count : used]
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
    slots = tables[sequence, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(contexts, dtype=torch.int32)
    step = StepGeometry(
        starts, lens, tables, slots, positions, len(contexts), max(queries), max(contexts), list(queries),
        list(contexts),
    )  # fmt: skip
    return step, num_blocks


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache_of(num_blocks: int, kv_heads: int, block_size: int, width: int, dtype: torch.dtype, seed: int) -> LayerCache:
    shape = (num_blocks, kv_heads, block_size, width)
    return LayerCache(random(seed, dtype, *shape), random(seed + 1, dtype, *shape))


def on(device: str, step: StepGeometry) -> StepGeometry:
    """The same step with its tensors on another device."""
    tensors = (step.query_start, step.context_lens, step.block_tables, step.slots, step.positions)
    return StepGeometry(
        *(tensor.to(device) for tensor in tensors), step.num_sequences, step.max_query_len, step.max_context_len,
        step.query_lens_host, step.context_lens_host,
    )  # fmt: skip


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within the dtype's tolerance, absolute below one and relative above."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float().cpu(), expected.float(), atol=tolerance, rtol=tolerance)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Give torch, and teams that are made inside, so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
