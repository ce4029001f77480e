"""Stands for a device in tests of the policy, and sees that attention and recurrent layers read what they should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from headway.policy.cache.kv_groups import PASSED, KVCacheGroup
from headway.policy.cache.states import MOST_DRAFTS
from headway.policy.step.plan import ScheduledSequence, SequenceState, StepPlan


class FakeExecutor:
    """Knows only what encoded plans say. Its cache stores, in place of keys and values, the tokens they depend on."""

    def __init__(self, block_size: int, is_recurrent: bool = False, groups: tuple[KVCacheGroup, ...] = ()) -> None:
        self.block_size = block_size
        self.groups = groups or (KVCacheGroup(None),)
        self.is_recurrent = is_recurrent
        self.states: dict[int, list[int]] = {}  # by seq_id, in place of a state the tokens that it has seen
        self.goes_back: dict[int, int] = {}  # by seq_id, before how many tokens its state can go back behind drafts
        self.kept: dict[int, list[int]] = {}  # by checkpoint slot, in place of a state the tokens that it has seen
        self.known: dict[int, SequenceState] = {}
        self.prefixes: dict[tuple[int, int], int] = {}  # the number of some tokens and one more -> that of these
        self.numbers: dict[int, list[int]] = {}  # by seq_id: those of its first token, of its first two, and so on
        self.written: dict[tuple[int, int], Any] = {}  # (block, offset) -> group, number of the tokens up to there
        self.host: dict[tuple[int, int], Any] = {}  # the same for host blocks
        self.pooled: dict[int, list[int]] = {}  # by seq_id: the positions of what is in its vector

    def run(self, plan: StepPlan) -> None:
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        for seq_id in plan.preempted:
            self.known.pop(seq_id, None)
            self.states.pop(seq_id, None)
            self.pooled.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self.known
            self.known[new.seq_id], self.numbers[new.seq_id] = new, []
            if new.checkpoint >= 0:
                self.states[new.seq_id] = self.kept[new.checkpoint]
        for change in plan.tables:
            table = self.known[change.seq_id].block_tables[change.group]
            table[change.start :] = change.blocks
            table[change.sinks : change.first] = [PASSED] * (change.first - change.sinks)
        for swap in plan.swaps:
            pairs = zip(swap.blocks, swap.host_blocks, strict=True)
            for block, host_block in pairs:
                if swap.is_out:
                    self.copy(self.written, block, self.host, host_block)
                else:
                    self.copy(self.host, host_block, self.written, block)
        for source, target in plan.copies:
            self.copy(self.written, source, self.written, target)
        assert not self.is_recurrent or plan.work.drafts <= MOST_DRAFTS
        for item in plan.scheduled:
            self.write(item, self.known[item.seq_id])
            if self.is_recurrent:
                self.advance(item, self.known[item.seq_id], plan)
        for item in plan.scheduled:
            self.read(item, self.known[item.seq_id])
            if plan.pools:
                self.pool(item, self.known[item.seq_id])

    def pool(self, item: ScheduledSequence, state: SequenceState) -> None:
        if state.pooling is None:
            return
        end = item.start + item.num_tokens
        mine = self.pooled.setdefault(item.seq_id, [])
        mine += range(item.start, end)
        if state.pooling.takes_all:
            assert mine == list(range(end)), "the mean would lack a token, or have one twice"

    def copy(self, of: dict[tuple[int, int], Any], source: int, to: dict[tuple[int, int], Any], target: int) -> None:
        for offset in range(self.block_size):
            to.pop((target, offset), None)
            if (source, offset) in of:
                to[target, offset] = of[source, offset]

    def numbered(self, tokens: list[int], number: int = 0) -> Iterator[int]:
        """The numbers of those with this number and one more of the tokens, two more, and so on."""
        for token in tokens:
            number = self.prefixes.setdefault((number, token), len(self.prefixes) + 1)
            yield number

    def write(self, item: ScheduledSequence, state: SequenceState) -> None:
        numbers, end = self.numbers[item.seq_id], item.start + item.num_tokens
        if item.decoding:
            state.tokens[item.start :] = item.token_ids
            del numbers[item.start :]
        assert state.tokens[item.start : end] == item.token_ids
        numbers += self.numbered(state.tokens[len(numbers) : end], numbers[-1] if numbers else 0)
        for position in range(item.start, end):
            for group, table in enumerate(state.block_tables):
                place = table[position // self.block_size], position % self.block_size
                self.written[place] = group, numbers[position]

    def read(self, item: ScheduledSequence, state: SequenceState) -> None:
        numbers = self.numbers[item.seq_id]
        for number, (group, table) in enumerate(zip(self.groups, state.block_tables, strict=True)):
            for position in range(item.start + item.num_tokens):
                entry = position // self.block_size
                is_passed = group.window is not None and entry >= group.sinks and position <= item.start - group.window
                if is_passed and table[entry] == PASSED:
                    continue
                block = table[entry]
                known = self.written[block, position % self.block_size]
                assert known == (number, numbers[position]), "attention would read another's KV"

    def advance(self, item: ScheduledSequence, state: SequenceState, plan: StepPlan) -> None:
        before, end = self.states.get(item.seq_id, []) if item.start else [], item.start + item.num_tokens
        if item.start >= self.goes_back.pop(item.seq_id, end):
            before = before[: item.start]
        if item.samples > 1:
            self.goes_back[item.seq_id] = item.start + 1
        assert before == state.tokens[: item.start], "a recurrent layer would go on from another state"
        self.states[item.seq_id] = state.tokens[:end]
        behind = [kept.tokens for kept in item.keeps]
        assert behind == sorted(set(behind)) and all(item.start < tokens <= end for tokens in behind)
        for kept in item.keeps:
            assert all(kept.slot != new.checkpoint for new in plan.new), "a state is read while it is written"
            self.kept[kept.slot] = state.tokens[: kept.tokens]
