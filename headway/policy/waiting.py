"""How long sequences wait for their first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headway.policy.request import FinishReason, Sequence, Status


class Unserved:
    """Sequences that have never run, in the order in which they came: a step looks at the first only.

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
        """Those that have waited too long; finish each before asking for the next.

        A further choice of a request goes on waiting once the first has been served.
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
