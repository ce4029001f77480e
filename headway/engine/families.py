"""Which sequences of a step have the beginning of their contexts in the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway.kernels.families import LEAST_COMMON, Family


class Tables(Protocol):
    """Block tables, as `layout.BlockTables` has them."""

    array: NDArray[np.int32]
    arrays: NDArray[np.int32]
    beginnings: int
    watched: int


class Families:
    """Finds them again only when sequences come, go or exchange what they had in common, which most steps do not.

    Args:
        block_size: tokens in a block of a table.
    """

    def __init__(self, tables: Tables, block_size: int) -> None:
        self._tables, self._size = tables, block_size
        self._known: tuple[list[int], int] = [], 0
        self._families: Sequence[Family] = ()

    def of(self, rows: list[int], contexts: list[int], queries: list[int]) -> Sequence[Family]:
        """The families of a step.

        Args:
            rows: of each sequence in the tables.
            contexts, queries: of each sequence, as StepGeometry has them.
        """
        wanted = rows, self._tables.beginnings
        if wanted != self._known:
            computed = [context - count for context, count in zip(contexts, queries, strict=True)]
            self._families = self._found(rows, computed)
            longest = max([max(family.common) for family in self._families], default=LEAST_COMMON)
            self._tables.watched = max(self._tables.watched, -(-longest // self._size))
            self._known = wanted
        return self._families

    def _found(self, rows: list[int], computed: list[int]) -> list[Family]:
        """For sequences that have so many tokens computed. Where tables differ early, looking costs next to nothing."""
        long = [number for number, tokens in enumerate(computed) if tokens >= LEAST_COMMON]
        if len(long) < 2:
            return []
        of_long = [rows[number] for number in long]
        last = self._tables.array[of_long, (LEAST_COMMON - 1) // self._size].tolist()
        if len(set(last)) == len(last):
            return []
        blocks = -(-max(computed) // self._size)
        tables = self._tables.arrays[:, of_long, :blocks].swapaxes(0, 1)
        order = sorted(range(len(long)), key=lambda at: tables[at].tobytes())
        found: list[Family] = []
        for before, at in pairwise(order):
            is_same = (tables[before] == tables[at]).all(axis=0)
            same = blocks if is_same.all() else int(is_same.argmin())
            common = min(same * self._size, computed[long[before]], computed[long[at]])
            if common < LEAST_COMMON:
                continue
            if not found or found[-1].sequences[-1] != long[before]:
                found.append(Family([long[before]], []))
            found[-1].sequences.append(long[at])
            found[-1].common.append(common)
        return found
