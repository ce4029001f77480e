"""Kernels of ranks that each compute some rows of a step, with one KV cache for all (context parallelism)."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from headway.kernels.cpu.kernels import CpuKernels
from headway.kernels.cpu.rank_board import MEET, RankBoard, meet_job
from headway.kernels.interface import AttentionShape, LayerCache, StepGeometry


class ContextKernels(CpuKernels):
    """CpuKernels with which the rows of a rank attend to keys that other ranks write in the same step.

    Args:
        board: of these ranks.
        least_rows: with so many rows for each rank, a prompt is shared.
        memory: see LargePages.

    Attributes:
        shares: all ranks run this step, each some rows of it.
    """

    def __init__(self, board: RankBoard, least_rows: int, memory: mmap.mmap | None = None) -> None:
        super().__init__(memory)
        self._ranks, self.shares = board, False
        self.warm_up_tokens = board.count * least_rows

    @contextmanager
    def sharing(self, threads: int) -> Iterator[None]:
        """Share steps until the context ends, and have no more than so many threads compute this rank's rows."""
        self.shares = True
        self._team.limit(threads)
        try:
            yield
        finally:
            self.shares = False
            self._team.limit(self._team.threads)

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """See Kernels. When it returns in a shared step, all ranks have stored what they have of this layer."""
        super().store(key, value, cache, slots)
        if self.shares:
            board = self._ranks
            self._team.run_alone(meet_job(), MEET, (board.address, board.number, 0, board.count))

    def repeat(
        self, key: Hashable, step: StepGeometry, attentions: Sequence[AttentionShape], run: Callable[[], Tensor]
    ) -> Tensor:
        """See Kernels. A program meets the other ranks, or does not."""
        return super().repeat((key, "shared") if self.shares else key, step, attentions, run)
