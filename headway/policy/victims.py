"""Who gives up seat and blocks for a waiting sequence of a better priority.

A running sequence yields to one whose priority is strictly better and that comes before it in the order of admission,
the last in the order of victims first, and at most MAX_DISPLACEMENTS times in its life. So the work that is thrown away
is bounded: after that it keeps its place until it ends, or until those who decode run out of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headway.policy.order import Order, OrderKey
from headway.policy.request import Sequence

MAX_DISPLACEMENTS = 3


@dataclass(frozen=True, slots=True)
class RunningRanks:
    """What waiting sequences are compared with. It holds for as long as the same sequences run.

    Args:
        last: greatest key of those who run, in the order of admission.
        latest: for each priority of those who run, when the newest of them arrived.
    """

    last: OrderKey
    latest: dict[int, int]

    @classmethod
    def of(cls, running: Iterable[Sequence], order: Order) -> RunningRanks:
        last: OrderKey = ()
        latest: dict[int, int] = {}
        for sequence in running:
            last = max(last, order(sequence))
            latest[sequence.priority] = max(latest.get(sequence.priority, sequence.arrival_ns), sequence.arrival_ns)
        return cls(last, latest)

    def outrank(self, sequence: Sequence) -> bool:
        """A waiting sequence would run by now if a better priority had not put others before it."""
        return any(
            priority < sequence.priority and arrival_ns > sequence.arrival_ns
            for priority, arrival_ns in self.latest.items()
        )


def victims_for(
    candidate: Sequence,
    running: Iterable[Sequence],
    order: Order,
    seats: int,
    missing: int,
    references: list[int],
) -> list[Sequence] | None:
    """The running sequences that must go so that `candidate` can run; None where that is not possible.

    Args:
        running: the last in the order of victims first.
        order: of admission.
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
        if sequence.priority <= candidate.priority or sequence.displacements >= MAX_DISPLACEMENTS:
            continue
        if order(sequence) < order(candidate):
            continue
        victims.append(sequence)
        seats += 1
        for block in sequence.block_table:
            held[block] += 1
            missing -= held[block] == references[block] and block not in kept
    return victims if seats > 0 and missing <= 0 else None
