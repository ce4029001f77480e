"""The paged KV pool: which sequences hold which blocks, and which blocks hold a known prefix.

Every block is in exactly one of three states: free; referenced by one or more sequences; or cached,
that is unreferenced but still holding a registered prefix. `eviction` decides which cached one is given up.
A block in use counts for the class of its sequences; one that sequences of several classes share counts for none.

The prefix index is a tree of exact keys (parent, tokens of one block): a lookup compares the token ids
themselves, so equal hashes can never hand one prompt's keys and values to another. The first block's
parent is the request's salt, which keeps tenants apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from headway.policy.eviction import COMMON, CachedBlocks

# Blocks in one part of the integrity check, which takes about a fifth of a millisecond.
CHECKED_AT_ONCE = 1024
PROTECTED_SHARE = 0.25
_NONE = -2  # no block follows it
BlockKey = tuple[int | str, tuple[int, ...]]


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


@dataclass(slots=True)
class PrefixMatch:
    """The known prefix of some tokens at a `version` of the index: its blocks, and the node of each."""

    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    version: int = -1


class KVBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens; every operation on a block is O(1).

    Args:
        protected_share: most of the pool, 0 to 1, whose contents are protected from eviction.

    Attributes:
        used: blocks in use of each class.
        cached: those that nobody holds and that hold a prefix.
        pinned: those that stay in use for good.
        allocated, runs: blocks given out so far, and the runs of consecutive ones that they are in block tables.

    Raises:
        ValueError: when a size is below one, or the share out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        protected_share: float = PROTECTED_SHARE,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty; both must be at least 1")
        if not 0 <= protected_share < 1:
            raise ValueError(f"the protected share of the KV pool is {protected_share:g}; give 0 to below 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.protected_share = protected_share
        self.references = [0] * num_blocks
        self.prefix_stats = PrefixStats()
        self.used: Counter[str] = Counter()
        self.cached = CachedBlocks(num_blocks, self.used, self.most_protected)
        self.pinned: list[int] = []
        self.allocated = self.runs = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._index: dict[BlockKey, int] = {}  # key -> block
        self._key_of: dict[int, BlockKey] = {}  # registered block -> its key
        self._nodes = [0] * num_blocks  # of each registered block; no number is given twice
        self._next_node = 1
        self._version = 0  # of the index: changes with every block that is registered or forgotten

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

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- blocks -------------------------------------------------------------------------------------

    def allocate(self, count: int, owner: str = COMMON, after: int = _NONE) -> list[int]:
        """Take `count` blocks for a class, evicting cached ones where too few are free.

        Args:
            after: the block of the sequence that they follow.

        Raises:
            OutOfBlocks: when fewer can be had; nothing is taken then.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
        kept = max(0, len(self._free) - count)
        blocks = self._free[kept:]
        blocks.reverse()
        del self._free[kept:]
        if count > len(blocks):
            blocks += self._evict(count - len(blocks))
        owners, references = self.cached.owners, self.references
        for block in blocks:
            references[block] = 1
            owners[block] = owner
        self.used[owner] += count
        self.allocated += count
        if count:
            self.runs += blocks[0] != after + 1
        if count > 1:
            self.runs += sum([second != first + 1 for first, second in pairwise(blocks)])
        return blocks

    def share(self, blocks: Iterable[int], owner: str = COMMON) -> None:
        """Add a reference to each block; a cached one can't be evicted any more."""
        owners, references, used = self.cached.owners, self.references, self.used
        for block in blocks:
            if references[block] == 0:
                self.cached.remove(block)
                owners[block] = owner
                used[owner] += 1
            elif owners[block] != owner:
                used[owners[block]] -= 1
                owners[block] = COMMON
                used[COMMON] += 1
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, given in order of position.

        The last blocks are cached first: a prefix is worth more than what followed it.
        """
        owners, references, registered, used = self.cached.owners, self.references, self._key_of, self.used
        cached = list[int]()
        for block in reversed(blocks):
            left = references[block] = references[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            if left == 0:
                used[owners[block]] -= 1
                if block in registered:
                    cached.append(block)
                else:
                    self._free.append(block)
        self.cached.add(cached)

    def pin(self, blocks: list[int]) -> None:
        """Keep registered blocks in use for good, as what requests to come begin with."""
        new = list(set(blocks).difference(self.pinned))
        self.share(new)
        self.cached.pin(new)
        self.pinned += new

    def _evict(self, count: int) -> list[int]:
        blocks, index, key_of, nodes = self.cached.evict(count), self._index, self._key_of, self._nodes
        for block in blocks:
            del index[key_of.pop(block)]
            nodes[block] = 0
        self._version += count
        return blocks

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
        if known.version == self._version:
            return known.blocks
        self._drop_forgotten(known)
        parent: int | str = known.nodes[-1] if known.nodes else salt
        size = self.block_size
        for start in range(len(known.blocks) * size, (len(tokens) - 1) // size * size, size):
            block = self._index.get((parent, tuple(tokens[start : start + size])))
            if block is None:
                break
            parent = self._nodes[block]
            known.blocks.append(block)
            known.nodes.append(parent)
        known.version = self._version
        return known.blocks

    def _drop_forgotten(self, known: PrefixMatch) -> None:
        """Drop what no longer holds: a block whose node has changed, and all after it."""
        nodes = self._nodes
        for at, (block, node) in enumerate(zip(known.blocks, known.nodes, strict=True)):
            if nodes[block] != node:
                del known.blocks[at:], known.nodes[at:]
                return

    def register(self, block: int, parent: int | str, tokens: tuple[int, ...]) -> int:
        """Enter a full block under its parent node and return the node that later blocks hang from.

        Where another block already holds the same prefix, that one stays in the index.
        """
        key = (parent, tokens)
        held = self._key_of.get(block)
        found = self._index.setdefault(key, block)
        if found != block or held == key:
            return self._nodes[found]
        if held is None:
            self._nodes[block] = self._next_node
            self._next_node += 1
        else:  # shared, but registered under a parent that was evicted: it moves, with all that hangs from it
            del self._index[held]
        self._key_of[block] = key
        self._version += 1
        return self._nodes[block]

    def register_all(self, blocks: list[int], first: int, last: int, parent: int | str, tokens: Sequence[int]) -> int:
        """register() the blocks `first` to `last`, the latter excluded, of a block table, with the tokens of all of it.

        Returns:
            The node that later blocks hang from.
        """
        size, index, key_of, nodes = self.block_size, self._index, self._key_of, self._nodes
        node = 0
        for at in range(first, last):
            block, key = blocks[at], (parent, tuple(tokens[at * size : (at + 1) * size]))
            if block in key_of or index.setdefault(key, block) != block:
                node = self.register(block, *key)
            else:
                key_of[block] = key
                node = nodes[block] = self._next_node
                self._next_node += 1
                self._version += 1
            parent = node
        return node

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Take blocks that sequences hold out of the index, as their contents can't be trusted."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._index[key]
                self._nodes[block] = 0
                self._version += 1
                self.cached.forget(block)

    def node_of(self, block: int) -> int:
        """The node of a registered block."""
        return self._nodes[block]

    def reset_prefix_cache(self) -> None:
        """Forget every registered prefix; blocks in use stay with their sequences, pinned ones are given up."""
        self.release(self.pinned)
        self.pinned.clear()
        self._free.extend(self.cached)
        self.cached.clear()
        self._index.clear()
        self._key_of.clear()
        self._nodes = [0] * self.num_blocks
        self._version += 1

    # --- integrity ----------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that the pool agrees with the block tables of all live sequences.

        Raises:
            RuntimeError: naming the block that leaked or is held twice.
        """
        for _ in self.check_by_parts(tables):
            pass

    def check_by_parts(self, tables: Iterable[Sequence[int]]) -> Iterator[None]:
        """check() with a pause after every CHECKED_AT_ONCE blocks; do not go on with it once the pool has changed."""
        expected = [0] * self.num_blocks
        for table in chain(tables, (self.pinned,)):
            for block in table:
                expected[block] += 1
        idle = bytearray(self.num_blocks)
        for count, block in enumerate(chain(self._free, self.cached), 1):
            if idle[block]:
                raise RuntimeError(f"block {block} is twice among the free and cached ones")
            idle[block] = 1
            if count > len(self._free) and block not in self._key_of:
                raise RuntimeError(f"block {block} is cached, but the prefix index does not know it")
            if count % CHECKED_AT_ONCE == 0:
                yield
        for block, (held, known) in enumerate(zip(expected, self.references, strict=True)):
            if held != known:
                raise RuntimeError(f"block {block} has {known} references, but {held} sequences hold it")
            if idle[block] != (held == 0):
                raise RuntimeError(f"block {block} has {held} references and is {'' if idle[block] else 'not '}idle")
            if block % CHECKED_AT_ONCE == 0:
                yield
        if len(self._key_of) != len(self._index):
            raise RuntimeError("the prefix index and the registered blocks disagree")
        if self.used.total() != self.num_blocks - self.num_free:
            raise RuntimeError(f"classes use {self.used.total()} blocks, {self.num_blocks - self.num_free} are in use")
