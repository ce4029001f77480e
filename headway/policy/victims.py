"""Who gives up seat and blocks for a waiting sequence of a better priority.

A running sequence yields to one whose priority is strictly better and that comes before it in the order of the queue,
the last in order first, and at most MAX_DISPLACEMENTS times in its life. So the work that is thrown away is bounded:
after that it keeps its place until it ends, or until those who decode run out of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from headway.policy.request import Sequence
from headway.policy.waiting import OrderKey

MAX_DISPLACEMENTS = 3


def victims_for(
    candidate: Sequence,
    running: Iterable[Sequence],
    order: Callable[[Sequence], OrderKey],
    seats: int,
    missing: int,
    references: list[int],
) -> list[Sequence] | None:
    """The running sequences that must go so that `candidate` can run; None where that can't be had.

    Args:
        running: the last in order first.
        seats: how many are free without them.
        missing: blocks that the candidate lacks beyond the free ones; the prefix that it shares is its `prefix_match`.
        references: of each block.
    """
    kept = set(candidate.prefix_match.blocks) if candidate.prefix_match is not None else set()
    held: Counter[int] = Counter()
    victims: list[Sequence] = []
    for sequence in running:
        if seats > 0 and missing <= 0:
            return victims
        if order(sequence) < order(candidate):
            return None
        if sequence.priority <= candidate.priority or sequence.displacements >= MAX_DISPLACEMENTS:
            continue
        victims.append(sequence)
        seats += 1
        for block in sequence.block_table:
            held[block] += 1
            missing -= held[block] == references[block] and block not in kept
    return victims if seats > 0 and missing <= 0 else None
