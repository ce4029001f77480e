"""The block tables of sequences, with and without windows, in any order of admission, steps, preemption and ends."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.cost.layers import AttentionSinks
from headway.policy.cache.block_manager import BlockManager
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import PASSED, kv_cache_groups, most_blocks
from headway.policy.cache.swap import HostPool, SwapSpace
from headway.policy.step.plan import StepPlan, state_of
from headway.policy.step.request import Request, Sequence, Status, sequences_of
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.step_time import StepTimeModel

SIZE, LONGEST, LARGEST_STEP = 2, 24, 6
# The content of a place in a block: the group, the salt, and the tokens up to the one whose keys and values these are.
Written = tuple[int, str, tuple[int, ...]]


class ManagerMachine(RuleBasedStateMachine):
    """Blocks hold what is written there. Each sequence finds its own tokens, and none writes into a shared block."""

    @initialize(
        windows=st.lists(st.sampled_from([None, 1, 3, 5, 9]), max_size=3),
        sinks=st.sampled_from([None, AttentionSinks(2, 7)]),
        spare=st.integers(0, 20),
        caching=st.booleans(),
        swaps=st.booleans(),
    )
    def begin(
        self, windows: list[int | None], sinks: AttentionSinks | None, spare: int, caching: bool, swaps: bool
    ) -> None:
        seen = [*windows, sinks.window] if sinks is not None else windows
        groups = kv_cache_groups(seen, LARGEST_STEP, LONGEST, SIZE, sinks)
        self.windows = [(group.window, group.sinks * SIZE) for group in groups] or [(None, 0)]
        self.pool = KVBlocks(most_blocks(groups, LONGEST // SIZE) + 1 + spare, SIZE, caching, groups=groups)
        self.host = HostPool(SwapSpace(20), StepTimeModel()) if swaps else None
        self.manager = BlockManager(self.pool, self.host)
        self.blocks: list[dict[int, Written]] = [{} for _ in range(self.pool.num_blocks)]
        self.on_host: list[dict[int, Written]] = [{} for _ in range(20)]
        self.live: list[Sequence] = []
        self.number = 0

    def of(self, status: Status, which: int) -> Sequence | None:
        found = [sequence for sequence in self.live if sequence.status is status]
        return found[which % len(found)] if found else None

    def copy(self) -> None:
        """Do what a plan says of the host."""
        for swap in self.host.take_swaps() if self.host is not None else ():
            for block, host_block in zip(swap.blocks, swap.host_blocks, strict=True):
                if swap.is_out:
                    self.on_host[host_block] = dict(self.blocks[block])
                else:
                    self.blocks[block] = dict(self.on_host[host_block])

    @rule(
        beginning=st.integers(0, 12),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        n=st.integers(1, 2),
        salt=st.sampled_from("xxy"),
    )
    def arrive(self, beginning: int, tokens: list[int], n: int, salt: str) -> None:
        params = SamplingParams(n=n, max_tokens=LONGEST, ignore_eos=True)
        request = Request(str(self.number), [0] * beginning + tokens, params, [9], seed=0, cache_salt=salt)
        for sequence in sequences_of(request, LONGEST):
            sequence.seq_id, self.number = self.number, self.number + 1
            self.live.append(sequence)
            self.try_to_admit(sequence, 0)
            if not sequence.index and n > 1 and sequence.status is Status.RUNNING:
                for _ in range(3):
                    self.step(sequence, LARGEST_STEP, 0, 0)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), spare=st.integers(0, 2))
    def admit(self, which: int, spare: int) -> None:
        sequence = self.of(Status.WAITING, which)
        if sequence is not None:
            self.try_to_admit(sequence, spare)

    def try_to_admit(self, sequence: Sequence, spare: int) -> None:
        parent = sequence.parent
        if (
            parent is not None
            and parent.status is not Status.FINISHED
            and parent.num_computed < sequence.prompt_len - 1
        ):
            return  # as the scheduler lets it wait
        wanted, known, free = self.manager.wanted(sequence), self.manager.known_tokens(sequence), self.pool.num_free
        admitted = self.manager.admit(sequence, spare)
        assert admitted == (wanted + spare <= free)
        assert 0 <= free - self.pool.num_free <= (wanted if admitted else 0)
        self.copy()
        if admitted:
            assert sequence.num_computed == known < len(sequence.tokens)
            sequence.status = Status.RUNNING
            self.finds_its_tokens(sequence)
        else:
            assert sequence.held_blocks == []

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), counts=st.lists(st.integers(1, LARGEST_STEP), min_size=1, max_size=6))
    def steps(self, which: int, counts: list[int]) -> None:
        sequence = self.of(Status.RUNNING, which)
        for count in counts if sequence is not None else ():
            self.step(sequence, count, drafts=count % 3, token=count // 3 % 2)

    def step(self, sequence: Sequence, count: int, drafts: int, token: int) -> None:
        plan = StepPlan()
        if len(sequence.tokens) + drafts >= LONGEST:
            return
        decodes = sequence.is_decoding
        count = 1 + drafts if decodes else min(count, sequence.num_to_compute)
        growth, free = self.manager.growth(sequence) if decodes else 0, self.pool.num_free
        before = state_of(sequence)
        sequence.in_executor = True
        if not self.manager.extend(sequence, count, plan):
            assert count > 1 or not decodes or growth > free
            assert state_of(sequence).block_tables == before.block_tables and not plan.copies and not plan.tables
            return
        for source, target in plan.copies:
            self.blocks[target] = dict(self.blocks[source])
        for change in plan.tables:
            before.change_table(change)
        assert before.block_tables == state_of(sequence).block_tables, "the executor knows other tables"
        self.write(sequence, [*sequence.tokens, *[2] * drafts] if decodes else sequence.tokens, count)
        if count < sequence.num_to_compute:
            sequence.num_computed += count
        else:
            sequence.tokens.append(token)
            sequence.num_computed = len(sequence.tokens) - 1
            self.manager.trim(sequence)
        if self.pool.enable_prefix_caching:
            self.manager.register_full(sequence)

    def write(self, sequence: Sequence, tokens: list[int], count: int) -> None:
        """Write keys and values of the next tokens, and see what attention sees of those before."""
        self.finds_its_tokens(sequence)
        for number, table in enumerate(sequence.tables):
            for at in range(sequence.num_computed, sequence.num_computed + count):
                (block,) = table.entries(at // SIZE, at // SIZE + 1)
                assert self.pool.references[block] == 1, "a step would write into a shared block"
                self.blocks[block][at % SIZE] = number, sequence.cache_salt, tuple(tokens[: at + 1])

    def finds_its_tokens(self, sequence: Sequence) -> None:
        """Check that each position that windows and sinks see is in the table, and holds what these tokens give."""
        computed = sequence.num_computed
        for number, (table, (window, sinks)) in enumerate(zip(sequence.tables, self.windows, strict=True)):
            first = 0 if window is None else max(0, computed - window + 1)
            for at in {*range(first, computed), *range(min(sinks, computed))}:
                (block,) = table.entries(at // SIZE, at // SIZE + 1)
                assert block != PASSED
                known = tuple(sequence.tokens[: at + 1])
                assert self.blocks[block][at % SIZE] == (number, sequence.cache_salt, known)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), returns=st.booleans())
    def preempt(self, which: int, returns: bool) -> None:
        sequence = self.of(Status.RUNNING, which)
        if sequence is not None:
            self.manager.preempt(sequence)
            sequence.preemptions += 1
            sequence.status = Status.WAITING
            self.copy()
            if returns:
                self.try_to_admit(sequence, 0)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), failed=st.booleans())
    def end(self, which: int, failed: bool) -> None:
        sequence = self.live.pop(which % len(self.live))
        if failed:
            self.manager.withdraw(sequence)
        self.manager.release(sequence)
        sequence.status = Status.FINISHED
        assert sequence.held_blocks == [] and sequence.swapped is None

    @rule()
    def forget(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.pool.cached.num_cached == 0

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(sequence.held_blocks for sequence in self.live)
            if self.host is not None:
                self.host.check(sequence.swapped for sequence in self.live)


ManagerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestManager: Any = ManagerMachine.TestCase
