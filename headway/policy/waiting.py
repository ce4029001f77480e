"""The order in which waiting sequences are served, and how long they wait.

A new order is one function and a row in ORDERS. A sequence's key does not change, so the queue stays sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headway.policy.request import FinishReason, Sequence, Status

# Waiting ages: who has waited so much longer goes before one whose priority is better by 1.
AGEING_NS = 10_000_000_000

OrderKey = tuple[int, ...]


def fcfs(sequence: Sequence) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival_ns, sequence.seq_id)


def priority(sequence: Sequence) -> OrderKey:
    """Lower priority values first, each worth AGEING_NS of waiting; then first come, first served."""
    return (sequence.priority * AGEING_NS + sequence.arrival_ns, sequence.seq_id)


ORDERS: dict[str, Callable[[Sequence], OrderKey]] = {"fcfs": fcfs, "priority": priority}


class OrderedSequences:
    """Sequences kept sorted by an order; no two keys are equal, as no two numbers are."""

    def __init__(self, order: Callable[[Sequence], OrderKey]) -> None:
        self._order = order
        self._entries: list[tuple[OrderKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._entries)

    def __reversed__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in reversed(self._entries))

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (self._order(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._entries, (self._order(sequence),))
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise KeyError(f"sequence {sequence.request_id}/{sequence.index} is not in this queue")
        del self._entries[at]

    def first(self) -> Sequence:
        return self._entries[0][1]

    def last(self) -> Sequence:
        return self._entries[-1][1]


class Unserved:
    """Sequences that have never run, in the order of their hand-over, so that a step looks at the first only.

    Args:
        max_wait_ns: how long they may wait; may be infinite.
    """

    def __init__(self, max_wait_ns: float) -> None:
        self._max_wait_ns = max_wait_ns
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        self._sequences.pop(sequence.seq_id, None)

    def expired(self, now: int) -> Iterator[Sequence]:
        """Those who have waited too long; each is to be finished before the next is asked for.

        A further choice of a request that has been served goes on waiting: its request has not waited too long.
        """
        while self._sequences:
            sequence = next(iter(self._sequences.values()))
            if now - sequence.ledger.began_ns <= self._max_wait_ns:
                return
            self.discard(sequence)
            if sequence.parent is None or not _has_run(sequence.parent):
                yield sequence


def _has_run(sequence: Sequence) -> bool:
    waits_still = sequence.status is Status.WAITING and sequence.preemptions == 0 and sequence.output_len == 0
    return not waits_still and sequence.finish_reason is not FinishReason.TIMEOUT
