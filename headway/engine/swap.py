"""Host memory for KV blocks that are swapped out, and the copies there and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from headway.kernels.interface import LayerCache
from headway.policy.cache.swap import BlockSwap, SwapSpace

STAGED_BYTES = 32 << 20  # device memory that copies go through
CACHED_BYTES = 2 << 20  # of a CPU's caches, which copies go through
MEASURED_BLOCKS = 64
_ROUNDS = 3


class HostBlocks:
    """Blocks in host memory. Each is a row of bytes: its part of all tensors of all layers, one after the other.

    On a GPU they go through a staging tensor, so that what crosses the bus are whole rows. All copies are ordered among
    each other, and the device has done them when a call returns.

    Args:
        caches: the caches of the KV pool.
        num_blocks: how many blocks the host has; their memory is page-locked where the pool is on a GPU.

    Attributes:
        block_bytes: of a row.
        keep: is told of rows that are to be kept elsewhere: their numbers, names, and all rows.
        arrived: what came from there, for the blocks that it is to be in before they are copied to the pool.
    """

    def __init__(self, caches: list[LayerCache], num_blocks: int) -> None:
        self._parts = [tensor.view(torch.uint8) for cache in caches for tensor in cache.tensors]
        self._sizes = [part[0].nbytes for part in self._parts]
        self._device = self._parts[0].device
        self.block_bytes = size = sum(self._sizes)
        self.keep: Callable[[list[int], list[bytes], torch.Tensor], None] | None = None
        self.arrived: dict[int, memoryview] = {}
        is_cpu = self._device.type == "cpu"
        self._at_once = max(1, (min(STAGED_BYTES, CACHED_BYTES) if is_cpu else STAGED_BYTES) // size)
        self._rows = torch.empty((num_blocks, size), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        # On a CPU: each tensor, [blocks, bytes of its part], and its columns of the rows, which NumPy copies quicker.
        self._of_cpu = [
            (part.view(len(part), -1).numpy(), columns.numpy())
            for part, columns in zip(self._parts, self._rows.split(self._sizes, 1), strict=True)
            if is_cpu
        ]

    def run(self, swaps: list[BlockSwap]) -> None:
        """Copy what a plan says, in its order."""
        for swap in swaps:
            if self.arrived:
                self._take_arrived(swap)
            copy = partial(self._within_cpu, swap.is_out) if self._of_cpu else self._out if swap.is_out else self._in
            for at in range(0, len(swap.blocks), self._at_once):
                copy(swap.blocks[at : at + self._at_once], swap.host_blocks[at : at + self._at_once])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for swap in swaps:
            if swap.names and self.keep is not None:
                self.keep(swap.host_blocks, swap.names, self._rows)

    def _take_arrived(self, swap: BlockSwap) -> None:
        for host_block in swap.host_blocks:
            content = self.arrived.pop(host_block, None)
            if content is not None and not swap.is_out:  # else of a sequence that ended before it was admitted
                self._rows[host_block].numpy().data[:] = content

    def _within_cpu(self, is_out: bool, blocks: list[int], host_blocks: list[int]) -> None:
        for part, columns in self._of_cpu:
            if is_out:
                columns[host_blocks] = part[blocks]
            else:
                part[blocks] = columns[host_blocks]

    def _out(self, blocks: list[int], host_blocks: list[int]) -> None:
        numbers = torch.tensor(blocks, device=self._device)
        parts = [part.index_select(0, numbers).flatten(1) for part in self._parts]
        for row, host_block in zip(torch.cat(parts, 1), host_blocks, strict=True):
            self._rows[host_block].copy_(row, non_blocking=True)

    def _in(self, blocks: list[int], host_blocks: list[int]) -> None:
        numbers = torch.tensor(blocks, device=self._device)
        staged = torch.empty((len(blocks), self._rows.shape[1]), dtype=torch.uint8, device=self._device)
        for row, host_block in zip(staged, host_blocks, strict=True):
            row.copy_(self._rows[host_block], non_blocking=True)
        for part, columns in zip(self._parts, staged.split(self._sizes, 1), strict=True):
            part.index_copy_(0, numbers, columns.contiguous().view(-1, *part.shape[1:]))

    @property
    def geometry(self) -> list[tuple[str, list[int]]]:
        """The types and shapes of what a row has of a block, in order."""
        return [(str(part.dtype), list(part.shape[1:])) for part in self._parts]

    @property
    def rows(self) -> NDArray[np.uint8]:
        """The memory itself: [blocks, bytes]."""
        return self._rows.numpy()

    @torch.inference_mode()
    def measured(self) -> SwapSpace:
        """The number of blocks, and how long copies take: the shortest of several of one block, and of many.

        The pool's first blocks are copied there and back, so that they are left as they were.
        """
        count = min(MEASURED_BLOCKS, len(self._rows), len(self._parts[0]))
        one, many = self._round_trip_ns(1), self._round_trip_ns(count)
        block_ns = max(0.0, (many - one) / (count - 1)) if count > 1 else one
        return SwapSpace(len(self._rows), max(0.0, one - block_ns), block_ns)

    def _round_trip_ns(self, count: int) -> float:
        blocks, times = list(range(count)), []
        for _ in range(_ROUNDS):
            began = time.monotonic_ns()
            self.run([BlockSwap(True, blocks, blocks)])
            self.run([BlockSwap(False, blocks, blocks)])
            times.append(time.monotonic_ns() - began)
        return float(min(times))
