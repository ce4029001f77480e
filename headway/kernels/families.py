"""What sequences of a step have in common: the beginning of their contexts, in the same blocks of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEAST_COMMON = 512  # tokens
# On a GPU a part in common takes another launch of attention in each layer. Sequences with many query tokens, as of a
# prompt, read little for each of them.
_LEAST_SAVED = 8192  # tokens that are not read again
_MOST_QUERIES = 16


class Family(NamedTuple):
    """Sequences of a step whose contexts begin in the same blocks, ordered so that neighbours have most in common."""

    sequences: list[int]  # their numbers in the step
    # For each but the first, how many tokens it has in common with the one before: at least LEAST_COMMON, and all
    # computed in earlier steps.
    common: list[int]


@dataclass(slots=True)
class CommonParts:
    """What a kernel on a GPU is to read once; a sequence has one such part at most. Tensors are int32 on the device."""

    # [P, 4]: a sequence that has it, its tokens, the first of its `queries` and how many; no queries: no part.
    parts: Tensor
    queries: Tensor  # [T] query tokens of the step, those of one part after the other
    tokens: Tensor  # [T] how many tokens of its context a query token finds in a part; 0 in none


def common_parts(
    families: Sequence[Family], query_lens: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The parts, queries and tokens of CommonParts, as far as they pay."""
    starts = np.cumsum([0, *query_lens])
    parts: list[tuple[int, int, int, int]] = []
    queries: list[int] = []
    tokens = np.zeros(starts[-1], np.int32)
    for family in families:
        for first, end, common in _best_runs(family.common, 0, len(family.sequences))[1]:
            run = [each for each in family.sequences[first:end] if query_lens[each] <= _MOST_QUERIES]
            if (len(run) - 1) * common < _LEAST_SAVED:
                continue
            own = [token for each in run for token in range(starts[each], starts[each + 1])]
            parts.append((run[0], common, len(queries), len(own)))
            queries += own
            tokens[own] = common
    return np.array(parts, np.int32).reshape(-1, 4), np.array(queries, np.int32), tokens


def _best_runs(common: list[int], first: int, end: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The runs of neighbours from `first` to `end` that save most: how many tokens, and (first, end, common) of each.

    All together have as much in common as the two neighbours that have least; or they part there.
    """
    if end - first < 2:
        return 0, []
    at = min(range(first, end - 1), key=common.__getitem__)
    together = (end - first - 1) * common[at]
    before, after = _best_runs(common, first, at + 1), _best_runs(common, at + 1, end)
    if before[0] + after[0] > together:
        return before[0] + after[0], before[1] + after[1]
    return together, [(first, end, common[at])]
