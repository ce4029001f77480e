"""The slots of the states that recurrent layers keep of sequences, and how many tokens each state has seen.

A step with drafts leaves the state before each draft in a slot of its own. When it is known how many drafts were
accepted, the state behind these becomes the sequence's, and the other slots are free again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headway.kernels.host import to_device
from headway.kernels.interface import Span
from headway.policy.step.plan import ScheduledSequence, SequenceState

_UNKNOWN = -1  # tokens seen by a state that a step may have changed, until the step is known to have ended


class StateSlots:
    """The slots of running sequences. Each has one, from its first step until it is forgotten.

    Args:
        num_slots: slots of sequences, as many as run at a time. The slots of checkpoints follow them.
        num_drafts: most drafts of a step; their slots come last.
    """

    def __init__(self, num_slots: int, num_checkpoints: int, num_drafts: int, device: torch.device) -> None:
        self._device = device
        self._num_slots = num_slots
        self._free = [*range(num_slots + num_checkpoints + num_drafts - 1, num_slots + num_checkpoints - 1, -1)]
        self._free += range(num_slots - 1, -1, -1)
        self._slots: dict[int, int] = {}  # by seq_id
        self._seen: dict[int, int] = {}  # how many tokens the state has seen, by seq_id
        self._begun: set[int] = set()  # sequences that have got their slots since `begin`
        self._before: dict[int, list[int]] = {}  # the slots before the drafts of this step, by seq_id
        self._spans = np.zeros((1 + num_slots + num_checkpoints + num_drafts, len(Span._fields)), np.int64)

    def has(self, item: ScheduledSequence, sequence: SequenceState) -> bool:
        """Whether the state before the item's first token is there."""
        begins = item.seq_id not in self._slots and sequence.checkpoint >= 0
        return item.start == 0 or begins or self._seen.get(item.seq_id) == item.start

    def lay_out(self, scheduled: list[ScheduledSequence], sequences: list[SequenceState]) -> Tensor:
        """StepGeometry.spans of a step of sequences whose states are there. It holds until the next step is laid out.

        Until `advance` is told that the step has ended, nothing is known of their states.
        """
        first, spans, further = 0, [[len(scheduled), 0, 0, 0, 0, 0, 0]], []
        for item, sequence in zip(scheduled, sequences, strict=True):
            number, count = item.seq_id, len(item.token_ids)
            slot = source = self._slots.get(number, -1)
            if slot < 0:
                slot = self._slots[number] = self._free.pop()
                self._begun.add(number)
                source = self._num_slots + sequence.checkpoint
            self._seen[number] = _UNKNOWN
            spans.append([first, count, source if item.start else -1, slot, 0, 0, 0])
            if item.keeps or item.samples > 1:
                further.append((len(spans) - 1, self._copies(item)))
            first += count
        for at, copies in further:
            for number, copy in enumerate(copies):
                if number:
                    spans[at][6] = len(spans) - at
                    at = len(spans)
                    spans.append([0] * 7)
                spans[at][4:6] = copy
        filled = self._spans[: len(spans)]
        filled[:] = spans
        return to_device(filled if self._device.type == "cpu" else filled.copy(), self._device)

    def _copies(self, item: ScheduledSequence) -> list[tuple[int, int]]:
        """Behind how many tokens of the item its state is copied to which slots: before its drafts, and as it asks."""
        copies = [(1 + at, self._free.pop()) for at in range(item.samples - 1)]
        if copies:
            self._before[item.seq_id] = [slot for _, slot in copies]
        return copies + [(kept.tokens - item.start, self._num_slots + kept.slot) for kept in item.keeps]

    def accept(self, scheduled: list[ScheduledSequence], tokens: Mapping[int, list[int] | None]) -> None:
        """Go back behind the drafts that a step has accepted, of which it has drawn the `tokens` of its sequences."""
        for item in scheduled:
            if before := self._before.pop(item.seq_id, None):
                behind = len(tokens[item.seq_id] or ())
                if 0 < behind <= len(before):
                    kept = before[behind - 1]
                    before[behind - 1], self._slots[item.seq_id] = self._slots[item.seq_id], kept
                    self._seen[item.seq_id] = item.start + behind
                self._free += before

    def reset(self) -> None:
        """Forget the drafts of a step that failed."""
        for before in self._before.values():
            self._free += before
        self._before.clear()

    def advance(self, scheduled: list[ScheduledSequence]) -> None:
        """Note that a step of these sequences has ended."""
        for item in scheduled:
            self._seen[item.seq_id] = item.start + len(item.token_ids)

    def begin(self) -> None:
        """A step begins, behind which all states may have to be doubted."""
        self._begun.clear()

    def doubt(self) -> None:
        """Know of no state any more whether it is there, and nothing of sequences that began with the last step.

        So it is the same in all ranks, in whatever part of the step each of them failed.
        """
        self.reset()
        for seq_id in self._begun & self._slots.keys():
            self.forget(seq_id)
        self._seen = dict.fromkeys(self._slots, _UNKNOWN)

    def forget(self, seq_id: int) -> None:
        """Free the slot of a sequence that needs it no more."""
        self._free += self._before.pop(seq_id, ())
        if seq_id in self._slots:
            self._free.append(self._slots.pop(seq_id))
            del self._seen[seq_id]
