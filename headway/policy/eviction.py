"""Which cached block is given up next: by how long nobody has found it, by class, and last what many begin with.

Cached blocks stand in queues, least recently used first: one for each class whose sequence had the block last, and one
for protected blocks. The head of a queue is its candidate, and the order of candidates is:

1. A protected block that was not found for LIFETIME turnovers of the pool is protected no longer, and goes first.
2. Blocks of classes that have more than their share of the pool, in use and cached together; then blocks within a
   share. Among either, the one that has waited longest. A class without an objective waits HASTE times as fast.
3. Protected blocks, when nothing else is cached.

A prefix is protected once BRANCHES requests have gone on from the same block, as from the end of a system prompt. The
turns of one conversation go on from another block each; and of a document that a few questions are asked about nobody
hears again, so that fewer branches would cost more hits than they save. All that is protected is a bounded part of the
pool; beyond that, what was least recently used is ordinary again.

Taking the next block costs a look at each queue, however many blocks there are.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from itertools import chain

from headway.policy.service_class import ClassTable

BRANCHES = 6
LIFETIME = 4
HASTE = 4
COMMON = ""  # the owner of a block that is of no single class

_Queue = OrderedDict[int, int]  # block -> the time since which it is cached


class CachedBlocks:
    """The blocks that nobody holds and the prefix index knows, in the order in which they are given up.

    Time is the number of blocks that were cached so far.

    Args:
        used: blocks in use of each class; the pool keeps it up to date.
        most_protected: how many of them may be protected.

    Attributes:
        evictions: blocks given up, by class and reason: `age` (the oldest), `lent` (within its class's share, to
            another), `expired` (protected, and not found for long), `protected` (nothing else was left).
        owners: the class of each block that is in use or cached, COMMON where sequences of several share it.
        num_evicted: all of them.
        num_cached: blocks in all queues.
        num_protected: protected blocks, in use or cached.
    """

    def __init__(self, num_blocks: int, used: Mapping[str, int], most_protected: int) -> None:
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.owners = [COMMON] * num_blocks
        self.num_protected = self.num_evicted = self.num_cached = 0
        self._used = used
        self._queues: dict[str, _Queue] = {}
        self._protected: _Queue = OrderedDict()
        self._is_protected = bytearray(num_blocks)
        self._branches = [0] * num_blocks
        self._most_protected = most_protected
        self._lifetime = LIFETIME * num_blocks
        self._time = 0
        self._shares: Mapping[str, int] = {}
        self._haste: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[int]:
        return chain(self._protected, *self._queues.values())

    def set_classes(self, classes: ClassTable, shares: Mapping[str, int]) -> None:
        """From now on the order is by these classes.

        Args:
            shares: blocks that are kept for classes.
        """
        self._shares = shares
        self._haste = {each.name: HASTE for each in classes if math.isinf(each.ttft_ms)}

    def add(self, blocks: list[int]) -> None:
        """The last sequence has released these blocks, in this order."""
        self.num_cached += len(blocks)
        owners, queues, is_protected, time = self.owners, self._queues, self._is_protected, self._time
        for block in blocks:
            time += 1
            if is_protected[block]:
                self._protected[block] = time
                if len(self._protected) <= self._most_protected:
                    continue
                block, _ = self._protected.popitem(last=False)
                self.forget(block)
            queue = queues.get(owners[block])
            if queue is None:
                queue = queues[owners[block]] = OrderedDict()
            queue[block] = time
        self._time = time

    def remove(self, block: int) -> None:
        """A sequence has found the block."""
        self.num_cached -= 1
        if self._is_protected[block]:
            del self._protected[block]
        else:
            del self._queues[self.owners[block]][block]

    def clear(self) -> None:
        """Nothing is cached or protected any more."""
        self._queues.clear()
        self._protected.clear()
        self.num_cached = 0
        for block in range(len(self.owners)):
            self.forget(block)

    def found(self, prefix: list[int]) -> None:
        """A request begins with this prefix, all of which is in use, and goes on with something else."""
        end = prefix[-1]
        self._branches[end] += 1
        if self._branches[end] >= BRANCHES and not self._is_protected[end] and self._most_protected:
            self._protect(prefix)

    def pin(self, blocks: list[int]) -> None:
        """Count blocks that are in use for good as protected ones; others may be so many fewer."""
        self._most_protected = max(0, self._most_protected - len(blocks))
        self._protect(blocks)

    def _protect(self, blocks: list[int]) -> None:
        for block in blocks:
            self.num_protected += not self._is_protected[block]
            self._is_protected[block] = 1

    def forget(self, block: int) -> None:
        """The block is protected no longer, and nobody has begun with it."""
        self.num_protected -= self._is_protected[block]
        self._is_protected[block] = self._branches[block] = 0

    def evict(self, count: int) -> list[int]:
        """Take out the blocks that are given up next. There must be so many."""
        given_up, branches = list[int](), self._branches
        while (left := count - len(given_up)) > 0:
            queue, reason, alike = self._next()
            taken = [queue.popitem(last=False)[0] for _ in range(min(left, alike))]
            owner = self.owners[taken[0]]
            if queue is self._protected:
                self.forget(taken[0])
            else:
                for block in taken:
                    branches[block] = 0
                if not queue:
                    del self._queues[owner]
            self.evictions[owner, reason] += len(taken)
            given_up += taken
        self.num_evicted += count
        self.num_cached -= count
        return given_up

    def _next(self) -> tuple[_Queue, str, int]:
        """The queue whose head is given up next, why, and how many go after each other for that reason, at least."""
        if self._protected and self._time - next(iter(self._protected.values())) > self._lifetime:
            return self._protected, "expired", 1
        found, best, excess = self._protected, (False, -1), 0
        for owner, queue in self._queues.items():
            if queue:
                over = self._used[owner] + len(queue) - self._shares.get(owner, 0)
                key = over > 0, (self._time - next(iter(queue.values()))) * self._haste.get(owner, 1)
                if key > best:
                    found, best, excess = queue, key, over
        if found is self._protected:
            return found, "protected", 1
        alike = 1 if len(self._queues) > 1 else len(found)
        return (found, "age", min(alike, excess)) if best[0] else (found, "lent", alike)
