"""How long sequences wait for their first step, where that is limited."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headway.policy.step.request import FinishReason, Sequence, Status

_NEVER_BEGUN = (FinishReason.TIMEOUT, FinishReason.LATE)


class Unserved(dict[float, OrderedDict[int, Sequence]]):
    """Sequences that have never run, in the order in which they came, for each number of seconds that they may wait.

    A step looks only at the first of those that may wait equally long.
    """

    def add(self, sequence: Sequence, most_s: float) -> None:
        """A sequence has come that may wait so many seconds."""
        self.setdefault(most_s, OrderedDict())[sequence.seq_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        """A sequence has been started, or has ended; does nothing for one that may wait for ever."""
        for alike in self.values():
            alike.pop(sequence.seq_id, None)

    def expired(self, now: int) -> Iterator[Sequence]:
        """The sequences that have waited too long; finish each before asking for the next.

        A further choice of a request goes on waiting once the first has been served.
        """
        for most_s, alike in self.items():
            while alike:
                sequence = next(iter(alike.values()))
                if now - sequence.ledger.began_ns <= most_s * 1e9:
                    break
                del alike[sequence.seq_id]
                if sequence.parent is None or not _has_run(sequence.parent):
                    yield sequence


def _has_run(sequence: Sequence) -> bool:
    waits_still = sequence.status is Status.WAITING and sequence.preemptions == 0 and sequence.output_len == 0
    return not waits_still and sequence.finish_reason not in _NEVER_BEGUN
