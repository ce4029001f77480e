"""How long sequences wait for their first step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headway.policy.step.request import FinishReason, Sequence, Status

_NEVER_BEGUN = (FinishReason.TIMEOUT, FinishReason.LATE)


class Unserved:
    """Sequences that have never run, in the order in which they came, for each time that they may wait.

    A step looks only at the first of those that may wait equally long.

    Args:
        max_wait_s: how long any may wait, where its class does not say less; may be infinite.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._sequences: dict[float, OrderedDict[int, Sequence]] = {}

    def max_wait_s(self, sequence: Sequence) -> float:
        """How long a sequence may wait."""
        return min(self._max_wait_s, sequence.service.queue_timeout_s)

    def add(self, sequence: Sequence) -> None:
        alike = self._sequences.setdefault(self.max_wait_s(sequence), OrderedDict())
        alike[sequence.seq_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        alike = self._sequences.get(self.max_wait_s(sequence))
        if alike is not None:
            alike.pop(sequence.seq_id, None)

    def expired(self, now: int) -> Iterator[Sequence]:
        """The sequences that have waited too long; finish each before asking for the next.

        A further choice of a request goes on waiting once the first has been served.
        """
        for max_wait_s, alike in self._sequences.items():
            while alike:
                sequence = next(iter(alike.values()))
                if now - sequence.ledger.began_ns <= max_wait_s * 1e9:
                    break
                self.discard(sequence)
                if sequence.parent is None or not _has_run(sequence.parent):
                    yield sequence


def _has_run(sequence: Sequence) -> bool:
    waits_still = sequence.status is Status.WAITING and sequence.preemptions == 0 and sequence.output_len == 0
    return not waits_still and sequence.finish_reason not in _NEVER_BEGUN
