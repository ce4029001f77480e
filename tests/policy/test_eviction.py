"""Which cached blocks are given up: by age, by class and share, and last what many requests begin with."""

from __future__ import annotations

import math
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.policy.cache.eviction import BRANCHES, HASTE, LIFETIME, Queue
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import BUILT_IN
from headway.policy.step.accounting import StepTimes
from headway.policy.step.request import sequences_of
from tests.policy.simulation import Simulation, make_request

OWNERS = ("interactive", "offline", "gone")
SHARES = {"interactive": 5, "offline": 2}


def begin(pool: KVBlocks, tokens: list[int], owner: str = "") -> list[int]:
    """Take the blocks of a prompt, one token each, as the block manager does."""
    table = list(pool.match(tokens, ""))
    pool.share(table, owner)
    if table:
        pool.cached.found(table)
    node: int | str = pool.node_of(table[-1]) if table else ""
    for at in range(len(table), len(tokens) - 1):
        table += pool.allocate(1, owner)
        node = pool.register(table[-1:], node, tokens, at)
    return table


def serve(pool: KVBlocks, tokens: list[int], owner: str = "") -> int:
    """Have a prompt come and go; returns how many of its blocks were there."""
    found = len(pool.match(tokens, ""))
    pool.release(begin(pool, tokens, owner))
    return found


def numbers(first: int, count: int) -> list[int]:
    """The tokens of a prompt of so many blocks and a last token."""
    return [*range(first, first + count), -1]


def test_what_many_go_on_from_is_protected_and_what_one_goes_on_with_is_not() -> None:
    pool = KVBlocks(40, 1)
    system, talk = [1, 2, 3], [50, 51, 52, 53]
    for turn in range(BRANCHES + 1):
        serve(pool, [*system, *numbers(100 * (1 + turn), 2)])
        serve(pool, [*talk[: turn + 1], -1])
    assert pool.cached.num_protected == len(system)
    for other in range(2, 30):
        serve(pool, numbers(1000 * other, 5))
    assert len(pool.match([*system, 7, 7], "")) == len(system)
    assert pool.match([*talk, 7], "") == []
    assert pool.cached.evictions.keys() == {("", "age")}


def test_protection_is_bounded_and_ends_when_nobody_begins_so_any_more() -> None:
    pool = KVBlocks(40, 1)
    for first in (1, 10, 20):
        for branch in range(BRANCHES + 1):
            serve(pool, [*range(first, first + 5), 100 * first + branch, -1])
    assert pool.cached.num_protected == 10
    assert len(pool.match([*range(10, 15), 7, 7], "")) == len(pool.match([*range(20, 25), 7, 7], "")) == 5
    for at in range(LIFETIME * 40 + 20):
        serve(pool, numbers(10_000 + 2 * at, 1))
    assert pool.cached.num_protected == 0
    assert pool.match([10, 11], "") == []
    assert pool.cached.evictions["", "expired"] == 10


def test_without_protection_and_classes_it_is_the_least_recently_used() -> None:
    pool = KVBlocks(6, 1, protected_share=0.0)
    for _ in range(BRANCHES + 2):
        serve(pool, [1, 2, 3, -1], "offline")
    serve(pool, numbers(10, 3), "interactive")
    serve(pool, numbers(20, 1))
    assert pool.cached.num_protected == 0
    assert len(pool.match([1, 2, 3, -1], "")) == 2, "the end goes before the beginning"
    assert pool.cached.evictions == {("offline", "age"): 1}


def test_a_class_without_an_objective_ages_faster_but_old_blocks_of_others_go_too() -> None:
    pool = KVBlocks(100, 1)
    pool.cached.set_classes(BUILT_IN, {})
    serve(pool, numbers(1, 50), "interactive")
    serve(pool, numbers(1000, 50), "offline")
    serve(pool, numbers(2000, 20), "batch")
    assert pool.cached.evictions == {("offline", "age"): 20}
    for first in range(3000, 3000 + 100 * HASTE, 10):
        serve(pool, numbers(first, 10), "offline")
    assert pool.match(numbers(1, 50), "") == [], "unused for so long that the whole pool is offline's"


def test_a_share_is_given_up_last_and_lent_while_nothing_else_is_there() -> None:
    pool = KVBlocks(20, 1)
    pool.cached.set_classes(BUILT_IN, {"interactive": 10})
    serve(pool, numbers(1, 12), "interactive")
    for first in range(100, 300, 10):
        serve(pool, numbers(first, 8), "offline")
    assert len(pool.match(numbers(1, 12), "")) == 10
    assert pool.cached.evictions["interactive", "age"] == 2
    pool.allocate(15, "offline")
    assert pool.cached.evictions["interactive", "lent"] == 5


def test_a_block_of_sequences_of_two_classes_counts_for_neither() -> None:
    pool = KVBlocks(10, 1)
    first = begin(pool, [1, 2, 3, -1], "interactive")
    second = begin(pool, [1, 2, 4, -1], "offline")
    assert (pool.used["interactive"], pool.used["offline"], pool.used[""]) == (1, 1, 2)
    pool.release(first)
    pool.release(second)
    assert pool.used.total() == 0
    pool.check([])


def test_how_blocks_lie_beside_each_other_is_counted_as_they_are_given_out() -> None:
    pool = KVBlocks(8, 1)
    table = pool.allocate(4)
    assert (pool.allocated, pool.runs) == (4, 1)
    table += pool.allocate(2, "", table[-1])
    assert (pool.allocated, pool.runs) == (6, 1)
    pool.release(table[::2])
    pool.allocate(3)
    assert (pool.allocated, pool.runs) == (9, 4), "every second block is free"


def test_ten_thousand_sessions_leave_nothing_behind() -> None:
    rng = random.Random(3)
    sim = Simulation(num_blocks=257, max_num_seqs=16, max_num_batched_tokens=256, policy="slo", rng=rng, message_ns=0)
    sim.scheduler.set_classes(BUILT_IN, {})
    systems = [[10 * number + at % 7 for at in range(16)] for number in range(20)]
    sizes: list[int] = []
    for session in range(10_000):
        name = ("interactive", "offline")[session % 2]
        prompt = [*rng.choice(systems), *(rng.randrange(900) for _ in range(rng.randrange(1, 12)))]
        sim.scheduler.add(
            sequences_of(make_request(str(session), prompt, 2, sim.now, service_class=name), 64)[0], sim.now
        )
        while len(sim.scheduler.sequences) >= 16:
            run(sim)
        if session % 1000 == 999:
            sim.scheduler.check()
            sizes.append(footprint(sim))
    while sim.scheduler.has_work:
        run(sim)
    pool = sim.scheduler.blocks
    assert pool.num_free == pool.num_blocks and pool.used.total() == 0 and len(sim.scheduler.sequences) == 0
    assert sum(map(bool, pool.index.nodes)) == pool.cached.num_cached <= pool.num_blocks
    assert max(sizes[2:]) <= 1.1 * sizes[1], sizes


def run(sim: Simulation) -> None:
    """Run a step without the checks of each."""
    plan = sim.scheduler.schedule(sim.now)
    sim.now = max(sim.now + 1000, plan.wait_until_ns)
    if plan.scheduled:
        tokens: dict[int, list[int] | None] = {item.seq_id: [5] for item in plan.scheduled if item.samples}
        sim.scheduler.complete(plan, tokens, StepTimes(sim.now, sim.now, sim.now))


def footprint(sim: Simulation) -> int:
    """How many entries the pool, its queues and the scheduler keep in all."""
    pool = sim.scheduler.blocks
    kept = (pool._free, pool.used, pool.cached.evictions, pool.prefix_stats.hits_of_class, pool.cached._branches)
    queues = [each._order for each in (pool.cached._protected, *pool.cached._queues.values())]
    of_scheduler = (sim.scheduler.sequences, sim.scheduler.decisions)
    chains, heads = pool.index._chains, pool.index._heads
    lists = [each for chain in chains.values() for each in (chain.places, chain.tokens)]
    tree = (chains, heads, *heads.values(), *lists)
    return sum(map(len, (*kept, *tree, *queues, *of_scheduler)))


class EvictionMachine(RuleBasedStateMachine):
    """Whatever comes and goes: the books are straight, and what is given up is what the rules say."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVBlocks(16, 1, protected_share=0.3)
        self.pool.cached.set_classes(BUILT_IN, SHARES)
        self.live: list[list[int]] = []
        cached, choose = self.pool.cached, self.pool.cached.evict

        def evict(count: int) -> list[int]:
            since = {block: cached.since[block] for block in cached}
            before, protected = list(since), {block for block in since if cached._is_protected[block]}
            held = {name: self.pool.used[name] for name in OWNERS}
            for block in since.keys() - protected:
                held[cached.owners[block]] = held.get(cached.owners[block], 0) + 1
            chosen = choose(count)
            assert len(set(chosen)) == count and set(chosen) <= set(before)
            for block in chosen:
                expired = {each for each in protected if cached._time - since[each] > LIFETIME * 16}
                owner = cached.owners[block]
                if block in protected:
                    assert block in expired or since.keys() == protected, "a protected block went before another"
                else:
                    assert not expired
                    over = {name for name, count in held.items() if count > SHARES.get(name, 0)}
                    there = since.keys() - protected
                    rivals = [each for each in there if (cached.owners[each] in over) == (owner in over)]
                    assert owner in over or not over & {cached.owners[each] for each in there}, "a share was taken"
                    ages = {
                        each: (cached._time - since[each]) * (HASTE if cached.owners[each] == "offline" else 1)
                        for each in rivals
                    }
                    assert ages[block] == max(ages.values())
                    held[owner] -= 1
                protected.discard(block)
                del since[block]
            return chosen

        cached.evict = evict  # type: ignore[method-assign]

    @rule(tokens=st.lists(st.integers(0, 3), max_size=9), owner=st.sampled_from(OWNERS))
    def begin(self, tokens: list[int], owner: str) -> None:
        prefix = self.pool.match([*tokens, -1], "")
        revived = sum(self.pool.references[block] == 0 for block in prefix)
        if len(tokens) - len(prefix) + revived <= self.pool.num_free:
            self.live.append(begin(self.pool, [*tokens, -1], owner))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.pool.release(self.live.pop(which % len(self.live)))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def fail(self, which: int) -> None:
        table = self.live.pop(which % len(self.live))
        self.pool.withdraw(table)
        self.pool.release(table)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.pool.cached.num_protected == 0

    @invariant()
    def books_are_straight(self) -> None:
        pool, cached = self.pool, self.pool.cached
        pool.check(self.live)
        assert cached.num_cached == len(list(cached)) == len(set(cached))
        assert cached.num_protected == sum(cached._is_protected)
        assert len(cached._protected) <= math.floor(0.3 * 16)
        for name in {*pool.used, *OWNERS}:
            mine = {block for block in range(16) if pool.references[block] and cached.owners[block] == name}
            assert pool.used[name] == len(mine)


EvictionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEviction = EvictionMachine.TestCase


class QueueMachine(RuleBasedStateMachine):
    """A queue is like an ordered dict."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.wanted = Queue(), dict[int, None]()

    @rule(block=st.integers(0, 9))
    def add(self, block: int) -> None:
        if block not in self.wanted:
            self.queue.add(block)
            self.wanted[block] = None

    @rule(block=st.integers(0, 9))
    def remove(self, block: int) -> None:
        if block in self.wanted:
            self.queue.remove(block)
            del self.wanted[block]

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        first = list(self.wanted)[:count]
        assert self.queue.take(len(first)) == first
        for block in first:
            del self.wanted[block]

    @invariant()
    def is_as_wanted(self) -> None:
        assert list(self.queue) == list(self.wanted)
        assert len(self.queue) == len(self.wanted)
        assert not self.wanted or self.queue.first() == next(iter(self.wanted))


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue = QueueMachine.TestCase
