"""Decides which cached block is given up next, by how long nobody has found it and by its class.

Blocks that many requests begin with are protected, and go last.

Cached blocks stand in queues, least recently used first: one for each class whose sequence had the block last, and one
for protected blocks. The head of a queue is its candidate, and the order of candidates is:

1. Blocks that a window has passed while their sequence went on: only one who leaves its text right there would find
   them of use.
2. A protected block that was not found for LIFETIME turnovers of the pool is protected no longer, and goes first.
3. Blocks of classes that have more than their share of the pool, in use and cached together; then blocks within a
   share. Among either, the one that has waited longest. A class without an objective waits HASTE times as fast.
4. Protected blocks, when nothing else is cached.

A prefix is protected once BRANCHES requests have gone on from the same block, as from the end of a system prompt. The
turns of one conversation go on from another block each; and of a document that a few questions are asked about nobody
hears again, so that fewer branches would cost more hits than they save. All that is protected is a bounded part of the
pool; beyond that, what was least recently used is ordinary again.

Taking the next block costs a look at each queue, however many blocks there are.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from itertools import chain, repeat, starmap

from headway.policy.objectives.service_class import ClassTable

BRANCHES = 6
LIFETIME = 4
HASTE = 4
COMMON = ""  # the owner of a block that is of no single class


class Queue:
    """Blocks, the one that has waited longest first.

    One that goes before its turn keeps its place in `_order`, and is passed over when its turn comes.
    """

    __slots__ = ("_gone", "_num_gone", "_order", "add", "add_all")

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._gone: Counter[int] = Counter()  # how many of the first places of a block are empty
        self._num_gone = 0
        self.add, self.add_all = self._order.append, self._order.extend

    def __len__(self) -> int:
        return len(self._order) - self._num_gone

    def __iter__(self) -> Iterator[int]:
        gone = self._gone.copy()
        for block in self._order:
            if gone[block]:
                gone[block] -= 1
            else:
                yield block

    def remove(self, block: int) -> None:
        """Take out a block before its turn."""
        self._gone[block] += 1
        self._num_gone += 1
        if 2 * self._num_gone > len(self._order):
            self._order = deque(self)
            self.add, self.add_all = self._order.append, self._order.extend
            self._gone.clear()
            self._num_gone = 0

    def first(self) -> int:
        """The block whose turn it is. There must be one."""
        order, gone = self._order, self._gone
        while gone and order[0] in gone:
            block = order.popleft()
            self._num_gone -= 1
            gone[block] -= 1
            if not gone[block]:
                del gone[block]
        return order[0]

    def take(self, count: int) -> list[int]:
        """Take out the first `count` blocks. There must be so many."""
        order = self._order
        if not self._gone:
            return list(starmap(order.popleft, repeat((), count)))
        taken: list[int] = []
        for _ in range(count):
            taken.append(self.first())
            order.popleft()
        return taken


class CachedBlocks:
    """The blocks that nobody holds and the prefix index knows, in the order in which they are given up.

    Time is the number of blocks that were cached so far.

    Args:
        used: how many blocks of each class are in use; the pool keeps it up to date.
        most_protected: how many blocks of the pool may be protected.

    Attributes:
        evictions: blocks given up, by class and reason: `passed` (by a window), `age` (the oldest), `lent` (within its
            class's share, to another), `expired` (protected, and not found for long), `protected` (nothing else was
            left).
        owners: the class of each block that is in use or cached, COMMON where sequences of several share it.
        num_evicted: how many blocks were given up in all.
        num_cached: how many blocks the queues hold.
        num_protected: how many blocks are protected, in use or cached.
        since: the time at which each cached block was cached.
    """

    def __init__(self, num_blocks: int, used: Mapping[str, int], most_protected: int) -> None:
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.owners = [COMMON] * num_blocks
        self.num_protected = self.num_evicted = self.num_cached = 0
        self._used = used
        self.since = array("q", bytes(8 * num_blocks))
        self._queues: defaultdict[str, Queue] = defaultdict(Queue)
        self._protected, self._passed = Queue(), Queue()
        self._is_protected, self._is_passed = bytearray(num_blocks), bytearray(num_blocks)
        self._branches: Counter[int] = Counter()
        self._most_protected = most_protected
        self._lifetime = LIFETIME * num_blocks
        self._time = 0
        self._shares: Mapping[str, int] = {}
        self._haste: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[int]:
        return chain(self._passed, self._protected, *self._queues.values())

    def set_classes(self, classes: ClassTable, shares: Mapping[str, int]) -> None:
        """Order blocks by these classes.

        Args:
            shares: how many blocks are kept for each class.
        """
        self._shares = shares
        self._haste = {each.name: HASTE for each in classes if math.isinf(min(each.ttft_ms, each.e2e_ms))}

    def add(self, blocks: list[int], alike: str | None = None) -> None:
        """The last sequence has released these blocks, in this order.

        Args:
            alike: the class of all of them, where they are of one.
        """
        self.num_cached += len(blocks)
        owners, since, is_protected, time = self.owners, self.since, self._is_protected, self._time
        if alike is not None and not self.num_protected:
            for now, block in enumerate(blocks, time + 1):
                since[block] = now
            self._time = time + len(blocks)
            return self._queues[alike].add_all(blocks)
        owner, add = None, self._protected.add
        for block in blocks:
            time += 1
            since[block] = time
            if is_protected[block]:
                self._protected.add(block)
                if len(self._protected) <= self._most_protected:
                    continue
                (block,) = self._protected.take(1)
                since[block] = time
                self.forget(block)
            if owners[block] != owner:
                owner = owners[block]
                add = self._queues[owner].add
            add(block)
        self._time = time

    def add_passed(self, blocks: list[int]) -> None:
        """The last sequence has released these blocks, as a window has passed them. They go before all others."""
        self.num_cached += len(blocks)
        for block in blocks:
            self._is_passed[block] = 1
            self._passed.add(block)

    def remove(self, block: int) -> None:
        """A sequence has found the block."""
        self.num_cached -= 1
        if self._is_passed[block]:
            self._is_passed[block] = 0
            self._passed.remove(block)
        elif self._is_protected[block]:
            self._protected.remove(block)
        else:
            self._queues[self.owners[block]].remove(block)

    def clear(self) -> None:
        """Nothing is cached or protected any more."""
        self._queues.clear()
        self._protected, self._passed = Queue(), Queue()
        self._is_passed = bytearray(len(self.owners))
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

    def is_protected(self, block: int) -> bool:
        return bool(self._is_protected[block])

    def forget(self, block: int) -> None:
        """The block is protected no longer, and nobody has begun with it."""
        self.num_protected -= self._is_protected[block]
        self._is_protected[block] = 0
        self._branches.pop(block, None)

    def evict(self, count: int) -> list[int]:
        """Take out the blocks that are given up next. There must be so many."""
        given_up: list[int] = []
        left = count
        while left:
            owner, queue, reason, alike = self._next()
            taken = queue.take(left if left < alike else alike)
            if queue is self._protected:
                owner = self.owners[taken[0]]
                self.forget(taken[0])
            elif queue is self._passed:
                for block in taken:
                    self._is_passed[block] = 0
            elif left >= alike and not queue:
                del self._queues[owner]
            self.evictions[owner, reason] += len(taken)
            given_up += taken
            left -= len(taken)
        for block in given_up if self._branches else ():
            self._branches.pop(block, None)
        self.num_evicted += count
        self.num_cached -= count
        return given_up

    def _next(self) -> tuple[str, Queue, str, int]:
        """The class and the queue whose head goes next, the reason, and for how many blocks at least it holds."""
        if self._passed._order and (num_passed := len(self._passed)):
            return COMMON, self._passed, "passed", num_passed
        if self.num_protected and self._protected and self._time - self.since[self._protected.first()] > self._lifetime:
            return COMMON, self._protected, "expired", 1
        if len(self._queues) == 1 and not self._shares:
            ((owner, queue),) = self._queues.items()
            if num_cached := len(queue):
                return owner, queue, "age", num_cached
        found, best, excess = (COMMON, self._protected), (False, -1), 0
        for owner, queue in self._queues.items():
            if num_cached := len(queue):
                over = self._used[owner] + num_cached - self._shares.get(owner, 0)
                key = over > 0, (self._time - self.since[queue.first()]) * self._haste.get(owner, 1)
                if key > best:
                    found, best, excess = (owner, queue), key, over
        if found[1] is self._protected:
            return *found, "protected", 1
        alike = 1 if len(self._queues) > 1 else len(found[1])
        return (*found, "age", min(alike, excess)) if best[0] else (*found, "lent", alike)
