"""The traffic of an engine in brief: which requests came, when they had their first and last token, and its steps.

It is what a simulation of the same traffic needs, and what shows how far each request was from its objectives. A
recording of steps says more, and says it of each sequence in each step; this costs a step next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.policy.step.accounting import StepTimes
from headway.policy.step.recording import Arrival, Chain, End, RecordedEngine, arrival_of
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.step_time import StepWork


class FirstToken(msgspec.Struct, tag="first", gc=False):
    """A sequence has its first token, or the vector that is made of its prompt."""

    now: int
    seq_id: int


class Ran(msgspec.Struct, tag="ran", gc=False):
    """A step that followed another, with work left to do between them; nanoseconds as in RecordedStep."""

    work: StepWork
    sequences: int
    between_ns: int
    forward_ns: int
    sampling_ns: int
    drafted: int = 0  # how many sequences tried drafts
    accepted: int = 0  # how many drafts were right
    refused: int = 0  # how many of these sequences had one that was not


NONE = 0, 0, 0
Traffic = RecordedEngine | Arrival | FirstToken | End | Ran


class TrafficRecords:
    """Makes the records.

    Args:
        write: called with each record, and whether the engine has nothing left to do.
        block_size: tokens of a block.
        root: any number; the blocks' numbers depend on it.
    """

    def __init__(self, write: Callable[[Traffic, bool], None], block_size: int, root: int = 0) -> None:
        self._write, self._block_size, self._root = write, block_size, root
        self._present: set[int] = set()
        self._unbegun: set[int] = set()  # those without a token
        self._last_ns = 0  # when the step before was done, where it left something to do

    def arrived(self, sequence: Sequence, now: int) -> None:
        """A sequence was queued. Prompts that are preloaded are none of the traffic."""
        if sequence.pins_prompt:
            return
        self._present.add(sequence.seq_id)
        if not sequence.output_len:
            self._unbegun.add(sequence.seq_id)
        blocks = Chain.of(sequence, self._root).number(sequence.tokens, self._block_size)
        self._write(arrival_of(sequence, now, blocks), False)

    def began(self, sequence: Sequence, now: int) -> None:
        """A sequence has a token; told again, it is the first one that counts."""
        if sequence.seq_id in self._unbegun:
            self._unbegun.discard(sequence.seq_id)
            self._write(FirstToken(now, sequence.seq_id), False)

    def ended(self, sequence: Sequence, now: int) -> None:
        """A sequence has ended, before or with a step."""
        if sequence.seq_id not in self._present:
            return
        self._present.discard(sequence.seq_id)
        if sequence.output_len:
            self.began(sequence, now)
        self._unbegun.discard(sequence.seq_id)
        if not self._present:
            self._last_ns = 0
        reason = sequence.finish_reason or FinishReason.ERROR
        self._write(End(now, sequence.seq_id, reason, len(sequence.tokens), []), not self._present)

    def ran(
        self, work: StepWork, sequences: int, times: StepTimes, learn: bool = True, drafts: tuple[int, int, int] = NONE
    ) -> None:
        """A step has ended, and those that end with it have.

        Args:
            learn: it took as long as steps like it.
            drafts: the last three of Ran.
        """
        launched, computed, sampled = times.launched_ns, times.computed_ns, times.sampled_ns
        if self._last_ns and learn:
            parts = launched - self._last_ns, computed - launched, sampled - computed
            self._write(Ran(work, sequences, *parts, *drafts), not self._present)
        self._last_ns = sampled if self._present else 0

    def waited(self) -> None:
        """Nothing could run, or was to."""
        self._last_ns = 0
