"""How a step's attention is cut into tiles for the threads of a CPU."""

from __future__ import annotations

import numpy as np
import torch

from headway.kernels.interface import StepGeometry

SPLIT = 512
_TILE_QUERIES = 112
HEADER_WORDS, ITEM_WORDS, MERGE_WORDS = 3, 7, 4


class AttentionPlan:
    """The tiles of a step, the same for all layers with as many query heads to each key/value head (`group`).

    A context that is split has no parts that the window has passed, but for the first one, where sinks are.

    They are in memory that stays where it is while it suffices.

    The memory is int64: the number of tiles, the rows of the largest and the number of merges; then the tiles,
    costliest first, each of ITEM_WORDS: sequence, first query token in the step, number of query tokens, position of
    the first, first key, end of keys, row of the partial results or -1 where the tile writes its result; and the
    merges, each of MERGE_WORDS: query token, its first partial row, number of parts, rows from one part to the next.
    """

    def __init__(self, group: int, window: int | None = None) -> None:
        self._group, self._window = group, window
        self._take(4096)
        self._partial_rows = 0
        self._values, self._sums = torch.empty(0), torch.empty(0)
        self._lens: tuple[list[int], list[int]] = [], []

    def _take(self, words: int) -> None:
        self._memory = np.zeros(words, np.int64)
        self._address = int(self._memory.ctypes.data)

    @property
    def places(self) -> tuple[int, int, int]:
        """Addresses of the plan and of room for parts: their values, then their maxima and sums."""
        return self._address, self._values.data_ptr(), self._sums.data_ptr()

    def reserve(self, heads: int, width: int) -> None:
        """Have room for the step's parts: their values, float32 [rows, H, D], their maxima and sums [rows, H, 2]."""
        parts = self._partial_rows * heads
        if parts * width > len(self._values):
            self._values = torch.empty(2 * parts * width)
        if 2 * parts > len(self._sums):
            self._sums = torch.empty(4 * parts)

    def make(self, step: StepGeometry) -> None:
        """Plan a step, unless it is the one that was planned last, perhaps of another KV cache group."""
        queries, contexts = self._lens
        if step.context_lens_host is contexts and step.query_lens_host is queries:
            return
        self._lens = step.query_lens_host, step.context_lens_host
        tiles, merges, self._partial_rows = _cut(step, max(1, _TILE_QUERIES // self._group), self._window)
        tiles.sort(key=lambda tile: tile[2] * (tile[5] - tile[4]), reverse=True)
        most_rows = self._group * max((tile[2] for tile in tiles), default=0)
        numbers = [len(tiles), most_rows, len(merges)]
        for row in (*tiles, *merges):
            numbers.extend(row)
        if len(numbers) > len(self._memory):
            self._take(2 * len(numbers))
        self._memory[: len(numbers)] = numbers


def _cut(
    step: StepGeometry, tile_tokens: int, window: int | None
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """(tiles, merges, rows of partial results)."""
    tiles: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    start = rows = 0
    for sequence, (queries, context) in enumerate(zip(step.query_lens_host, step.context_lens_host, strict=True)):
        first_position = context - queries
        parts = -(-context // SPLIT) if queries <= tile_tokens else 1
        if parts > 1:
            seen = 0 if window is None else max(0, first_position - window + 1) // SPLIT
            kept = [0, *range(max(1, seen), parts)]
            for number, part in enumerate(kept):
                end = min((part + 1) * SPLIT, context)
                tiles.append((sequence, start, queries, first_position, part * SPLIT, end, rows + number * queries))
            merges.extend((start + token, rows + token, len(kept), queries) for token in range(queries))
            rows += len(kept) * queries
        else:
            for token in range(0, queries, tile_tokens):
                count = min(tile_tokens, queries - token)
                position = first_position + token
                tiles.append((sequence, start + token, count, position, 0, position + count, -1))
        start += queries
    return tiles, merges, rows
