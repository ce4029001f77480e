"""The block pool: allocation, sharing, eviction order, exact prefixes, and an integrity check that can fail."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.policy.cache.kv_blocks import KVBlocks, OutOfBlocks
from headway.policy.cache.prefix_index import PrefixMatch


def fill(pool: KVBlocks, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate and register the blocks of a sequence, as the scheduler does."""
    table = pool.allocate(pool.blocks_for(len(tokens)))
    full = len(tokens) // pool.block_size
    pool.register(table[:full], salt, tokens)
    return table


def test_allocation_is_all_or_nothing() -> None:
    pool = KVBlocks(4, 2)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_cached_blocks_are_evicted_least_recently_used_and_ends_before_beginnings() -> None:
    pool = KVBlocks(4, 2)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(first)
    pool.release(second)
    assert pool.num_free == 4
    assert pool.allocate(1) == [first[1]]
    assert pool.match([1, 2, 3, 4, 9], "") == first[:1]
    assert pool.match([5, 6, 7, 8, 9], "") == second


def test_a_shared_cached_block_is_not_evicted() -> None:
    pool = KVBlocks(3, 2)
    table = fill(pool, [1, 2, 3, 4])
    pool.release(table)
    pool.share(pool.match([1, 2, 3, 4, 5], ""))
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    pool.allocate(1)
    pool.check([table, [2]] if 2 not in table else [table, [b for b in range(3) if b not in table]])


def test_prefixes_are_compared_by_their_tokens_not_by_their_hashes() -> None:
    class Colliding(int):
        def __hash__(self) -> int:
            return 1

    pool = KVBlocks(8, 2)
    secret = [Colliding(10), Colliding(11)]
    fill(pool, secret)
    assert pool.match([Colliding(20), Colliding(21), 1], "") == []
    assert len(pool.match([10, 11, 1], "")) == 0 or pool.match([Colliding(10), Colliding(11), 1], "")


def test_salts_keep_tenants_apart() -> None:
    pool = KVBlocks(8, 2)
    fill(pool, [1, 2, 3, 4], salt="a")
    assert pool.match([1, 2, 3, 4, 5], "a") != []
    assert pool.match([1, 2, 3, 4, 5], "b") == []
    assert pool.match([1, 2, 3, 4, 5], "") == []


def test_a_shared_block_whose_known_beginning_was_evicted_is_found_again() -> None:
    pool = KVBlocks(4, 2)
    short, table = fill(pool, [1, 2]), fill(pool, [1, 2, 3, 4])  # the second block of table hangs from short's
    pool.release(short)
    pool.allocate(2)  # evicts it
    pool.share(table)  # by another choice of the same request, which registers the prompt as its own
    pool.register(table, "", [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 5], "") == table
    pool.check([table, table, [b for b in range(4) if b not in table]])


def test_the_check_finds_leaks_and_double_use() -> None:
    pool = KVBlocks(4, 2)
    table = pool.allocate(2)
    pool.check([table])
    with pytest.raises(RuntimeError, match="1 references, but 0 sequences"):
        pool.check([table[:1]])
    with pytest.raises(RuntimeError, match="1 references, but 2 sequences"):
        pool.check([table, table[:1]])
    pool.release(table)
    pool._free.append(table[0])
    with pytest.raises(RuntimeError, match=f"block {table[0]} is twice among the free"):
        pool.check([])
    del pool._free[-2:]
    with pytest.raises(RuntimeError, match="has 0 references and is not idle"):
        pool.check([])
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(table[:1])


def test_empty_pools_are_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 0 blocks of 16 tokens is empty"):
        KVBlocks(0, 16)


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocating, sharing, registering and releasing leaves the books straight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVBlocks(12, 2)
        self.live: list[tuple[list[int], list[int]]] = []
        self.contents: dict[int, list[int]] = {}  # what was written to each block, with all before it
        self.known: dict[tuple[int, ...], PrefixMatch] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def look_for_what_was_looked_for_before(self, tokens: list[int]) -> None:
        known = self.known.setdefault(tuple(tokens), PrefixMatch())
        assert self.pool.match(tokens, "", known) == self.pool.match(tokens, "")

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def begin(self, tokens: list[int]) -> None:
        prefix = self.pool.match(tokens, "")
        assert len(prefix) * 2 < len(tokens)
        for block, at in zip(prefix, range(len(prefix)), strict=True):
            assert self.contents[block] == tokens[: at * 2 + 2]
        revived = sum(1 for block in prefix if self.pool.references[block] == 0)
        missing = self.pool.blocks_for(len(tokens)) - len(prefix)
        if missing + revived > self.pool.num_free:
            return
        self.pool.share(prefix)
        table = prefix + self.pool.allocate(missing)
        for at in range(len(prefix), len(table)):
            self.contents[table[at]] = tokens[: at * 2 + 2]
        node: int | str = self.pool.node_of(prefix[-1]) if prefix else ""
        full = len(tokens) // 2
        self.pool.register(table[len(prefix) : full], node, tokens, len(prefix))
        self.live.append((tokens, table))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), page=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def go_on(self, which: int, page: tuple[int, int]) -> None:
        tokens, table = self.live[which % len(self.live)]
        if len(tokens) % 2 or not self.pool.num_free:
            return
        before = table[-1]
        tokens += page
        table += self.pool.allocate(1, "", before)
        self.contents[table[-1]] = list(tokens)
        if node := self.pool.node_of(before):
            self.pool.register(table[-1:], node, tokens, len(table) - 1)
        else:
            self.pool.register(table, "", tokens)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def fork(self, which: int) -> None:
        tokens, table = self.live[which % len(self.live)]
        self.pool.share(table)
        tokens, table = list(tokens), list(table)
        self.pool.register(table[: len(tokens) // 2], "", tokens)
        self.live.append((tokens, table))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        _, table = self.live.pop(which % len(self.live))
        self.pool.release(table)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.pool.match([0, 0, 0], "") == []

    @invariant()
    def books_are_straight(self) -> None:
        self.pool.check(table for _, table in self.live)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
