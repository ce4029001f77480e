"""How a step's attention is cut into tiles for the threads of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter

import numpy as np
import torch

from headway.kernels.families import Family
from headway.kernels.interface import StepGeometry

SPLIT = 512
_TILE_QUERIES = 112
HEADER_WORDS, ITEM_WORDS, MERGE_WORDS = 3, 8, 7
_POSITION, _END = 3, 5  # words of an item

Row = tuple[int, ...]


class AttentionPlan:
    """The tiles of a step, the same for all layers with as many query heads to each key/value head (`group`).

    A context that is split has no parts that the window has passed, but for the first one, where sinks are. A part that
    sequences of a family have in common is one tile with the queries of all, or a few tiles, so that its keys are read
    once. As parts begin where they always do, that changes no bit of a result.

    They are in memory that stays where it is while it suffices.

    The memory is int64: the number of tiles, the rows of the largest and the number of merges; then the tiles,
    costliest first, each of ITEM_WORDS: sequence, first query token in the step, number of query tokens, position of
    the first, first key, end of keys, row of the partial results or -1 where the tile writes its result, and the word
    of this memory from which on the query tokens are listed, or 0 where they follow each other; and the merges, each of
    MERGE_WORDS: query token; number of parts that are in common, the row of the first and rows from one to the next;
    and the same three of the parts behind them. The lists come last.

    Args:
        threads: how many there are for each key/value head.
    """

    def __init__(self, group: int, window: int | None = None, threads: int = 1) -> None:
        self._group, self._window, self._threads = group, window, threads
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
        cut = _Cut(step, max(1, _TILE_QUERIES // self._group), self._window, self._threads)
        self._partial_rows = cut.rows
        cut.tiles.sort(key=lambda tile: tile[2] * (tile[5] - tile[4]), reverse=True)
        most_rows = self._group * max(map(itemgetter(2), cut.tiles), default=0)
        numbers = [len(cut.tiles), most_rows, len(cut.merges)]
        lists = HEADER_WORDS + len(cut.tiles) * ITEM_WORDS + len(cut.merges) * MERGE_WORDS
        for *words, listed in cut.tiles:
            numbers += words
            numbers.append(lists + listed if listed >= 0 else 0)
        for row in cut.merges:
            numbers += row
        numbers += cut.listed
        if len(numbers) > len(self._memory):
            self._take(2 * len(numbers))
        self._memory[: len(numbers)] = numbers

    def growing(self) -> list[int]:
        """The addresses of what is one more with each further token of all sequences, which have one token each.

        No part of a context begins, and there are no families.
        """
        (_, contexts), memory, found = self._lens, self._memory, list[int]()
        for tile in range(int(memory[0])):
            at = HEADER_WORDS + tile * ITEM_WORDS
            found.append(self._address + 8 * (at + _POSITION))
            if memory[at + _END] == contexts[memory[at]]:
                found.append(self._address + 8 * (at + _END))
        return found


class _Cut:
    """A step cut into `tiles` and `merges`, with `rows` of partial results and the `listed` query tokens of tiles.

    Rows are those of the plan's memory, but for the place of a list, which is one of `listed`, or -1.
    """

    def __init__(self, step: StepGeometry, tile_tokens: int, window: int | None, threads: int) -> None:
        self.tiles: list[Row] = []
        self.merges: list[Row] = []
        self.listed: list[int] = []
        self.rows = 0
        self._tile_tokens, self._threads = tile_tokens, threads
        self._lens = list(zip(step.query_lens_host, step.context_lens_host, strict=True))
        self._starts = list(accumulate(step.query_lens_host, initial=0))
        # Parts that a sequence has in common with others, the row of the first, and rows from one to the next.
        common: dict[int, Row] = {}
        if window is None:
            for family in step.families:
                common |= self._of_family(family)
        for sequence, (queries, context) in enumerate(self._lens):
            parts = -(-context // SPLIT) if queries <= tile_tokens else 1
            if parts > 1:
                seen = 0 if window is None else max(0, context - queries - window + 1) // SPLIT
                kept = [0, *range(max(1, seen), parts)]
                self._split(sequence, kept, common.get(sequence, (0, 0, 0)))
            else:
                for token in range(0, queries, tile_tokens):
                    count = min(tile_tokens, queries - token)
                    start, position = self._starts[sequence] + token, context - queries + token
                    self.tiles.append((sequence, start, count, position, 0, position + count, -1, -1))

    def _split(self, sequence: int, parts: list[int], common: Row) -> None:
        """Tiles of the parts of a context that are not in common, and a merge of all parts for each query token."""
        (queries, context), start, (shared, first, stride) = self._lens[sequence], self._starts[sequence], common
        own = parts[shared:]
        for number, part in enumerate(own):
            end, row = min((part + 1) * SPLIT, context), self.rows + number * queries
            self.tiles.append((sequence, start, queries, context - queries, part * SPLIT, end, row, -1))
        for token in range(queries):
            self.merges.append((start + token, shared, first + token, stride, len(own), self.rows + token, queries))
        self.rows += len(own) * queries

    def _of_family(self, family: Family) -> dict[int, Row]:
        """Tiles of the parts in common, whose partial rows are one for each query token of the family, part by part."""
        firsts, tokens = dict[int, int](), list[int]()
        for sequence in family.sequences:
            queries, _ = self._lens[sequence]
            if queries <= self._tile_tokens:
                firsts[sequence] = len(tokens)
                tokens += range(self._starts[sequence], self._starts[sequence] + queries)
        most = dict.fromkeys(firsts, 0)
        at, base, parts = len(self.listed), self.rows, max(family.common) // SPLIT
        for part, runs in enumerate(_runs(family, firsts)):
            for run in runs:
                begin, end = firsts[run[0]], firsts[run[-1]] + self._lens[run[-1]][0]
                # As few tiles as give each thread one.
                each = max(1, min(self._tile_tokens, (end - begin) * parts // self._threads))
                first, key_end, row = part * SPLIT, (part + 1) * SPLIT, base + part * len(tokens)
                for token in range(begin, end, each):
                    count = min(each, end - token)
                    # Every query sees all of these keys.
                    self.tiles.append((run[0], 0, count, key_end, first, key_end, row + token, at + token))
                most.update(dict.fromkeys(run, part + 1))
        self.listed += tokens
        self.rows += max(most.values(), default=0) * len(tokens)
        return {sequence: (parts, base + firsts[sequence], len(tokens)) for sequence, parts in most.items()}


def _runs(family: Family, members: dict[int, int]) -> Iterator[list[list[int]]]:
    """For each part from the first on, the runs of these members, two or more, that have it in common."""
    for part in range(max(family.common) // SPLIT):
        runs, last = [], list[int]()
        for sequence, common in zip(family.sequences, [0, *family.common], strict=True):
            if common < (part + 1) * SPLIT:
                runs.append(last)
                last = []
            if sequence in members:
                last.append(sequence)
        yield [run for run in [*runs, last] if len(run) > 1]
