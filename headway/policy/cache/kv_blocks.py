"""The paged KV pool: which sequences hold which blocks, and which blocks hold a known prefix.

Every block is in exactly one of three states: free; referenced by one or more sequences; or cached,
that is unreferenced but still holding a registered prefix. `eviction` decides which cached one is given up.
A block in use counts for the class of its sequences; one that sequences of several classes share counts for none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import sub

from headway.policy.cache.checkpoints import Checkpoints
from headway.policy.cache.eviction import COMMON, CachedBlocks
from headway.policy.cache.kv_groups import KVCacheGroup, most_blocks
from headway.policy.cache.prefix_index import PrefixIndex, PrefixMatch
from headway.policy.cache.windowed_index import WindowedIndex

# Blocks in one part of the integrity check, which takes about a fifth of a millisecond.
CHECKED_AT_ONCE = 1024
PROTECTED_SHARE = 0.25


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for."""


@dataclass(slots=True)
class PrefixStats:
    """Tokens looked up in the prefix index and found there since the start, of all and of each class."""

    queries: int = 0
    hits: int = 0
    queries_of_class: Counter[str] = field(default_factory=Counter)
    hits_of_class: Counter[str] = field(default_factory=Counter)

    def note(self, service_class: str, queries: int, hits: int) -> None:
        """A prompt was looked up."""
        self.queries += queries
        self.hits += hits
        self.queries_of_class[service_class] += queries
        self.hits_of_class[service_class] += hits


class KVBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens; every operation on a block is O(1).

    Args:
        protected_share: most of the pool, 0 to 1, whose contents are protected from eviction.
        num_checkpoints: slots for states of recurrent layers; None for a model without such layers.
        groups: KV cache groups, each with a block table of its own; empty where all layers see all tokens.

    Attributes:
        used: how many blocks of each class are in use.
        cached: the blocks that nobody holds and that hold a prefix.
        on_evicted: is told of evicted blocks while they hold what they held; None where nobody asks.
        pinned: the blocks that stay in use for good.
        index: which blocks hold which prefix.
        checkpoints: the states of prefixes, which are not known without one; None for a model without recurrent layers.
        repeated: how often blocks are held beyond once. A pinned block in use is held once more than its sequences do.
        allocated, runs: how many blocks were given out so far, and in how many runs of consecutive numbers.

    Raises:
        ValueError: when a size is below one, or the share out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        protected_share: float = PROTECTED_SHARE,
        num_checkpoints: int | None = None,
        groups: Sequence[KVCacheGroup] = (),
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty; both must be at least 1")
        if not 0 <= protected_share < 1:
            raise ValueError(f"the protected share of the KV pool is {protected_share:g}; give 0 to below 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching and num_checkpoints != 0
        self.checkpoints = None if num_checkpoints is None else Checkpoints(num_checkpoints, block_size)
        self.protected_share = protected_share
        self.references = [0] * num_blocks
        self.prefix_stats = PrefixStats()
        self.used: Counter[str] = Counter()
        self.cached = CachedBlocks(num_blocks, self.used, self.most_protected)
        self.pinned: list[int] = []
        self.on_evicted: Callable[[list[int]], None] | None = None
        self.allocated = self.runs = self.repeated = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self.groups = tuple(groups)
        self.index = (
            WindowedIndex(num_blocks, block_size, groups, self.references)
            if any(group.window for group in groups)
            else PrefixIndex(num_blocks, block_size)
        )

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + self.cached.num_cached

    @property
    def usage(self) -> float:
        """Share of the pool that sequences reference, pinned blocks left out; 0 to 1."""
        return 1.0 - (self.num_free + len(self.pinned)) / self.num_blocks

    @property
    def most_protected(self) -> int:
        """Blocks that may be protected, pinned ones included."""
        return math.floor(self.protected_share * self.num_blocks)

    @property
    def tables(self) -> int:
        """How many block tables a sequence has."""
        return len(self.groups) or 1

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks of a table hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def entries_for(self, computed: int) -> list[tuple[int, int]]:
        """The entries of block tables that tokens after so many computed ones need: each with its table, by tables."""
        size, found, end = self.block_size, list[tuple[int, int]](), self.blocks_for(computed)
        for number, group in enumerate(self.index.groups):
            first = group.first(computed, size)
            entries = [*range(group.sinks if first else 0), *range(first, end)]
            found += [(entry, number) for entry in entries]
        return found

    def most_blocks(self, num_tokens: int) -> int:
        """How many blocks one sequence holds at most, in all its tables, until it has so many tokens."""
        return most_blocks(self.groups, self.blocks_for(num_tokens))

    def pool_tokens(self, max_model_len: int) -> int:
        """How many tokens of sequences of this length the pool holds, each counted once for all tables."""
        whole = self.num_blocks * self.block_size
        return min(whole, self.num_blocks * max_model_len // self.most_blocks(max_model_len)) if self.groups else whole

    @property
    def repeated_tokens(self) -> int:
        """Tokens that sequences hold in blocks of others, in one table."""
        return self.repeated * self.block_size // self.tables

    # --- blocks -------------------------------------------------------------------------------------

    def allocate(self, count: int, owner: str = COMMON, after: int | None = None) -> list[int]:
        """Take `count` blocks for a class, evicting cached ones where too few are free.

        Args:
            after: the block of the sequence that they follow.

        Raises:
            OutOfBlocks: when fewer can be had; nothing is taken then.
        """
        free, owners, references = self._free, self.cached.owners, self.references
        blocks: list[int] = []
        if count == 1 and free:
            blocks.append(free.pop())
        else:
            lacking = count - len(free)
            if lacking > self.cached.num_cached:
                raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
            if free:
                kept = -lacking if lacking < 0 else 0
                blocks = free[kept:]
                blocks.reverse()
                del free[kept:]
            if lacking > 0:
                evicted = self.cached.evict(lacking)
                if self.on_evicted is not None:
                    self.on_evicted(evicted)
                self._forget(evicted)
                blocks += evicted
            if count > 1:
                steps = list(map(sub, blocks[1:], blocks))
                self.runs += len(steps) - steps.count(1)
        for block in blocks:
            references[block] = 1
            owners[block] = owner
        if count:
            self.runs += blocks[0] - 1 != after
        self.used[owner] += count
        self.allocated += count
        return blocks

    def allocate_each(self, wanted: Sequence[tuple[str, int]]) -> list[int]:
        """Take a block for each of these classes, behind a block, as allocate() does one after the other.

        No class may have a share of the pool. There must be as many blocks.
        """
        owners, used, runs, first = self.cached.owners, self.used, self.runs, wanted[0][0]
        blocks = self.allocate(len(wanted), first)
        for block, (owner, after) in zip(blocks, wanted, strict=True):
            runs += block - 1 != after
            if owner != first:
                owners[block] = owner
                used[first] -= 1
                used[owner] += 1
        self.runs = runs
        return blocks

    def share(self, blocks: Iterable[int], owner: str = COMMON) -> None:
        """Add a reference to each block; a cached one can't be evicted any more."""
        owners, references, used = self.cached.owners, self.references, self.used
        for block in blocks:
            if references[block] == 0:
                self.cached.remove(block)
                owners[block] = owner
                used[owner] += 1
            else:
                self.repeated += 1
                if owners[block] != owner:
                    used[owners[block]] -= 1
                    owners[block] = COMMON
                    used[COMMON] += 1
            references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block of a sequence, given in order of position.

        The last blocks are cached first: a prefix is worth more than what followed it.
        """
        references, nodes, idle = self.references, self.index.nodes, blocks[::-1]
        held = [references[block] for block in idle]
        if held.count(1) == len(held):
            for block in idle:
                references[block] = 0
        else:
            if min(held) < 1:
                raise RuntimeError(f"block {idle[held.index(min(held))]} was released more often than it was taken")
            for block in idle:
                references[block] -= 1
            idle = [block for block, count in zip(idle, held, strict=True) if count == 1]
            self.repeated -= len(held) - len(idle)
        known = [nodes[block] for block in idle]
        if any(known[: (unknown := known.count(0))]):  # a block that is not registered is before one that is
            idle.sort(key=lambda block: nodes[block] != 0)
        self._free += idle[:unknown]
        owners, names = self.cached.owners, [name for name, count in self.used.items() if count]
        if len(names) == 1:
            self.used[names[0]] -= len(idle)
        else:
            of_each = [owners[block] for block in idle]
            names = list(set(of_each))
            for owner in names:
                self.used[owner] -= of_each.count(owner)
        if unknown < len(idle):
            self.cached.add(idle[unknown:], names[0] if len(names) == 1 else None)

    def pass_by(self, blocks: list[int]) -> None:
        """Release blocks that a window has passed while their sequence goes on. They are given up before all others."""
        passed: list[int] = []
        for block in blocks:
            if self.references[block] > 1 or not self.index.nodes[block] or self.cached.is_protected(block):
                self.release([block])
            else:
                self.references[block] = 0
                self.used[self.cached.owners[block]] -= 1
                passed.append(block)
        self.cached.add_passed(passed)

    def pin(self, blocks: list[int]) -> None:
        """Keep registered blocks in use for good, as what requests to come begin with."""
        new = list(set(blocks).difference(self.pinned))
        self.share(new)
        self.cached.pin(new)
        self.pinned += new

    # --- prefixes -----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: str, known: PrefixMatch | None = None) -> list[int]:
        """Blocks that hold the longest known prefix of `tokens`, the last token excluded.

        One token is always left to compute, because its logits are wanted. Takes no references.

        Args:
            known: what an earlier call with the same tokens and salt found. It is brought up to date, and what still
                holds of it is not looked up again.
        """
        if not self.enable_prefix_caching:
            return []
        known = PrefixMatch() if known is None else known
        self.index.match(tokens, salt, known)
        return known.blocks

    def register(
        self, blocks: list[int], parent: int | str, tokens: list[int], start: int = 0, further: Sequence[list[int]] = ()
    ) -> int:
        """Enter full blocks with these tokens in the prefix index; PrefixIndex.register() describes the arguments."""
        index = self.index
        node = index.register(blocks, parent, tokens, start, further)
        if index.replaced:
            for block in index.replaced:
                self._drop_idle(block)
            index.replaced.clear()
        return node

    def _drop_idle(self, block: int) -> None:
        """A cached block is no longer registered."""
        self.cached.remove(block)
        self.cached.forget(block)
        self._free.append(block)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the index, as their contents can't be trusted."""
        known = [block for block in dict.fromkeys(blocks) if self.index.nodes[block]]
        self._forget(known)
        for block in known:
            if self.references[block]:
                self.cached.forget(block)
            else:
                self._drop_idle(block)

    def _forget(self, blocks: list[int]) -> None:
        if self.checkpoints is not None:
            for block in blocks:
                self.checkpoints.drop(self.index.nodes[block])
        self.index.forget(blocks)

    def node_of(self, block: int) -> int:
        """The page of a registered block."""
        return self.index.nodes[block]

    def reset_prefix_cache(self) -> None:
        """Forget every registered prefix; blocks in use stay with their sequences, pinned ones are given up."""
        self.release(self.pinned)
        self.pinned.clear()
        self._free.extend(self.cached)
        self.cached.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.index.clear()

    # --- integrity ----------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that the pool agrees with the block tables of all live sequences.

        Raises:
            RuntimeError: naming the block that leaked or is held twice.
        """
        for _ in self.check_by_parts(tables):
            pass

    def check_by_parts(self, tables: Iterable[Sequence[int]]) -> Iterator[None]:
        """Do check() with a pause after every CHECKED_AT_ONCE blocks; do not go on once the pool has changed."""
        expected = [0] * self.num_blocks
        for table in chain(tables, (self.pinned,)):
            for block in table:
                expected[block] += 1
        idle = bytearray(self.num_blocks)
        for count, block in enumerate(chain(self._free, self.cached), 1):
            if idle[block]:
                raise RuntimeError(f"block {block} is twice among the free and cached ones")
            idle[block] = 1
            if count > len(self._free) and not self.index.nodes[block]:
                raise RuntimeError(f"block {block} is cached, but the prefix index does not know it")
            if count % CHECKED_AT_ONCE == 0:
                yield
        repeated = 0
        for block, (held, known) in enumerate(zip(expected, self.references, strict=True)):
            if held != known:
                raise RuntimeError(f"block {block} has {known} references, but {held} sequences hold it")
            repeated += held - 1 if held else 0
            if idle[block] != (held == 0):
                raise RuntimeError(f"block {block} has {held} references and is {'' if idle[block] else 'not '}idle")
            if block % CHECKED_AT_ONCE == 0:
                yield
        yield from self.index.check_by_parts(CHECKED_AT_ONCE)
        if repeated != self.repeated:
            raise RuntimeError(f"blocks are held {repeated} times beyond once, but {self.repeated} were counted")
        if self.used.total() != self.num_blocks - self.num_free:
            raise RuntimeError(f"classes use {self.used.total()} blocks, {self.num_blocks - self.num_free} are in use")
