"""Which adapters are in the device's slots.

A sequence with an adapter is admitted only while that is in a slot. One that is not takes a free slot, or that of the
adapter which was used least recently among those that no running sequence has and none waits for that is before it in
the queue. It is loaded beside the steps, and the sequence waits for that.

Sequences whose adapters are in slots go past one that finds no slot, but only so many of them: then those behind it
with adapters wait, too, until running ones have ended and given up a slot. Requests of the base model always go past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from headway.policy.step.accounting import Accounting
from headway.policy.step.request import Sequence


class AdapterLoad(NamedTuple):
    """An adapter, by its digest, that is to be brought into a slot."""

    digest: str
    slot: int


class AdapterSlots:
    """The slots, and who waits for one.

    Args:
        count: how many there are.
        max_bypasses: how many sequences with adapters may go past one that finds no slot.

    Attributes:
        loading: adapters on the way into slots.
        loads: those of which nobody has begun the way yet; whoever does takes them out.
        counts: sequences that found their adapter in a slot when they came, those that did not, and loads.
    """

    def __init__(self, count: int, max_bypasses: int) -> None:
        self._max_bypasses = max_bypasses
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[str, int] = {}  # adapters that are in slots, used least recently first
        self._users: Counter[str] = Counter()  # running sequences of each
        self._starts = 0  # sequences with adapters that were admitted
        self.loads: list[AdapterLoad] = []
        self.loading: dict[str, int] = {}
        self.counts = [0, 0, 0]

    def enter(self, sequence: Sequence) -> None:
        """A sequence with an adapter runs from now on."""
        self._users[sequence.adapter] += 1
        self._starts += 1
        self._slots[sequence.adapter] = self._slots.pop(sequence.adapter)

    def leave(self, sequence: Sequence) -> None:
        """A sequence with an adapter runs no longer."""
        self._users[sequence.adapter] -= 1
        if not self._users[sequence.adapter]:
            del self._users[sequence.adapter]

    def settle(self, waiting: Iterable[Sequence], accounting: Accounting, now: int) -> None:
        """Say of all that wait whether they lack a slot, and begin loads; before anybody is admitted in a step."""
        wanted: set[str] = set()
        closed = False  # those behind wait until somebody before them has a slot
        for sequence in waiting:
            if not sequence.adapter:
                continue
            slot = None if closed else self._slots.get(sequence.adapter)
            if sequence.slot_wanted_since < 0 and slot is None:
                accounting.begin_lacking(sequence, now)
                sequence.slot_wanted_since = self._starts
                self.counts[1] += sequence.slot < 0
            if slot is not None:
                if sequence.slot_wanted_since >= 0:
                    accounting.end_lacking(sequence, now)
                    sequence.slot_wanted_since = -1
                elif sequence.slot < 0:
                    self.counts[0] += 1
                sequence.slot = slot
            elif not closed and sequence.adapter not in self.loading and not self._load(sequence.adapter, wanted):
                closed = self._starts - sequence.slot_wanted_since >= self._max_bypasses
            wanted.add(sequence.adapter)

    def _load(self, adapter: str, wanted: set[str]) -> bool:
        """Begin to load an adapter; False where it finds no slot."""
        if not self._free:
            unused = (each for each in self._slots if each not in self._users and each not in wanted)
            if (victim := next(unused, None)) is None:
                return False
            self._free.append(self._slots.pop(victim))
        self.loading[adapter] = slot = self._free.pop()
        self.loads.append(AdapterLoad(adapter, slot))
        self.counts[2] += 1
        return True

    def ended(self, adapter: str, done: bool) -> None:
        """A load has ended: the adapter is in its slot, or it could not be had."""
        slot = self.loading.pop(adapter)
        if done:
            self._slots[adapter] = slot
        else:
            self._free.append(slot)

    @property
    def resident(self) -> list[str]:
        """The adapters that are in slots, used least recently first."""
        return list(self._slots)
