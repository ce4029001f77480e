"""Which running sequences give up seat and blocks for a waiting one that ranks above them.

A running sequence gives way to one whose level is strictly lower and that comes before it in the order of admission,
the last in the order of victims first, and with priorities only some times in its life (`Orders.displaces`). So the
work that is thrown away is bounded: after that it keeps its place until it ends, or until those who decode run out of
blocks. With objectives it is bounded by what starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from headway.policy.order import OrderedSequences, OrderKey, Orders
from headway.policy.request import Sequence


@dataclass(frozen=True, slots=True)
class RunningRanks:
    """What waiting sequences are compared with, for as long as the same sequences run.

    Args:
        last: the greatest key of the running sequences in the order of admission.
        latest: for each level of the running sequences, when the newest of them arrived.
    """

    last: OrderKey
    latest: dict[int, int]

    @classmethod
    def of(cls, running: OrderedSequences, orders: Orders) -> RunningRanks:
        last = max(map(orders.admission, running), default=())
        latest: dict[int, int] = {}
        for level, arrival_ns in [(orders.level(sequence), sequence.arrival_ns) for sequence in running]:
            if arrival_ns >= latest.get(level, arrival_ns):
                latest[level] = arrival_ns
        return cls(last, latest)

    def outrank(self, level: int, arrival_ns: int) -> bool:
        """A waiting sequence would run by now if a lower level had not put others before it."""
        return any(each < level and latest_ns > arrival_ns for each, latest_ns in self.latest.items())


def victims_for(
    candidate: Sequence,
    running: Iterable[Sequence],
    orders: Orders,
    seats: int,
    missing: int,
    references: list[int],
) -> list[Sequence] | None:
    """The running sequences that must go so that `candidate` can run; None where that is not possible.

    Args:
        running: in the order of victims, the last one first.
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
        if orders.level(sequence) <= orders.level(candidate) or sequence.displacements >= orders.displaces:
            continue
        if orders.admission(sequence) < orders.admission(candidate):
            continue
        victims.append(sequence)
        seats += 1
        for block in sequence.held_blocks:
            held[block] += 1
            missing -= held[block] == references[block] and block not in kept
    return victims if seats > 0 and missing <= 0 else None
