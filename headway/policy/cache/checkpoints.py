"""Checkpoints of recurrent layers: which prefixes have their state kept, and in which slot.

A layer with a state in place of keys and values can go on behind a known prefix only from the state behind it, and that
is as large as the keys and values of hundreds of tokens. So it is not kept behind each block, but behind the last whole
block of a prompt, and where a prompt leaves what the prefix index knows, or what another begins with that waits for it.
A prefix counts as known up to the last block that has a checkpoint.

A sequence that decodes has its state kept every `spacing` tokens, each time in the slot of the time before. So when it
ends or is preempted, less than that is computed again, and it never has more than one such slot. All who decode have
half of the slots at most; the other half is for prompts.

A checkpoint belongs to a node of the prefix index and is gone with it. Where no slot is free, that which has not been
used for longest is given up. The executor keeps the states; it is told the slots.
"""

from __future__ import annotations

import msgspec

# A state is read and written for each token. So keeping it this often adds a thirty-second to that.
LEAST_SPACING = 32


class Checkpoint(msgspec.Struct, array_like=True, gc=False):
    """A copy that a plan asks for: the state behind the first `tokens` of a sequence goes to a slot."""

    tokens: int
    slot: int


class Checkpoints:
    """The slots for states. Each is free, promised to a step that is to fill it, or belongs to a node.

    Attributes:
        spacing: after every so many tokens the state of a decoding sequence is kept; a multiple of the block size.
        made: how many checkpoints were filled so far.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.spacing = -(-LEAST_SPACING // block_size) * block_size
        self.made = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: dict[int, int] = {}  # by node, that used last at the end
        self._readers: dict[int, int] = {}  # of slots that may not be given up
        self._orphans: set[int] = set()  # of these, slots whose node is gone
        self._promised: set[int] = set()
        self._rolling: set[int] = set()  # nodes behind which sequences still decode, and that nobody has read
        self._num_rolled = 0  # of the promised slots, those of sequences that decode
        self._pinned: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def known(self, nodes: list[int]) -> int:
        """How many nodes of a prefix there are up to the last one that has a checkpoint."""
        slots = self._slot_of
        return next((at + 1 for at in range(len(nodes) - 1, -1, -1) if nodes[at] in slots), 0)

    def read(self, node: int) -> int:
        """The slot of a node, which stays as it is until it is let go."""
        slot = self._slot_of[node] = self._slot_of.pop(node)
        self._rolling.discard(node)
        self._readers[slot] = self._readers.get(slot, 0) + 1
        return slot

    def let_go(self, slot: int) -> None:
        """A reader of the slot has read it."""
        left = self._readers[slot] = self._readers[slot] - 1
        if not left:
            del self._readers[slot]
            if slot in self._orphans:
                self._orphans.remove(slot)
                self._free.append(slot)

    def promise(self) -> int | None:
        """A slot for the next step to fill; None where all are in use."""
        if not self._free:
            oldest = next((node for node, slot in self._slot_of.items() if slot not in self._readers), None)
            if oldest is None:
                return None
            self.drop(oldest)
        slot = self._free.pop()
        self._promised.add(slot)
        return slot

    def roll(self, node: int) -> int | None:
        """A slot for a decoding sequence to fill: that of its last checkpoint, at `node`, unless that was read."""
        slot: int | None = None
        if node in self._rolling:
            self._rolling.remove(node)
            slot = self._slot_of.pop(node)
            self._promised.add(slot)
        elif len(self._rolling) + self._num_rolled < self.num_slots // 2:
            slot = self.promise()
        self._num_rolled += slot is not None
        return slot

    def fill(self, slot: int, node: int, rolls: bool = False) -> bool:
        """A promised slot now holds the state behind a node; False where another slot holds it already.

        Args:
            rolls: until `settle`, `roll` may give the slot out again.
        """
        self._promised.remove(slot)
        if node in self._slot_of:
            self._free.append(slot)
            return False
        self._slot_of[node] = slot
        if rolls:
            self._rolling.add(node)
        self.made += 1
        return True

    def settle(self, node: int) -> None:
        """The sequence whose last checkpoint is at the node decodes no more: it is kept like any other."""
        self._rolling.discard(node)

    def end_step(self) -> None:
        """Take back slots that were promised to the step and not filled."""
        self._free += self._promised
        self._promised.clear()
        self._num_rolled = 0

    def pin(self, nodes: list[int]) -> None:
        """Keep the last checkpoint of a prefix until clear() is called."""
        if known := self.known(nodes):
            self._pinned.append(self.read(nodes[known - 1]))

    def drop(self, node: int) -> None:
        """The node is gone, or its slot is wanted."""
        slot = self._slot_of.pop(node, None)
        if slot is None:
            return
        self._rolling.discard(node)
        if slot in self._readers:
            self._orphans.add(slot)
        else:
            self._free.append(slot)

    def clear(self) -> None:
        """Every node is gone."""
        for slot in self._pinned:
            self.let_go(slot)
        self._pinned.clear()
        for node in list(self._slot_of):
            self.drop(node)

    def check(self, num_readers: int) -> None:
        """Verify that each slot is in one state, and that there are `num_readers` readers besides pins.

        Raises:
            RuntimeError: it is not so.
        """
        held = sorted([*self._free, *self._promised, *self._slot_of.values(), *self._orphans])
        if held != list(range(self.num_slots)):
            raise RuntimeError(f"of {self.num_slots} slots of checkpoints {held} are held")
        if len(self._rolling) > self.num_slots // 2 or not self._rolling <= self._slot_of.keys():
            raise RuntimeError(f"{len(self._rolling)} of {self.num_slots} slots are of sequences that decode")
        if sum(self._readers.values()) != num_readers + len(self._pinned):
            raise RuntimeError(f"checkpoints have {self._readers} readers by slot, but {num_readers} are known")
