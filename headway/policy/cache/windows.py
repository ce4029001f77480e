"""What sliding windows make of block tables: how long these are, and which blocks they give up.

The table of a group with a window gives up the blocks that the window has passed, when the sequence next needs a block.
A prompt under way has the blocks of its largest step, so that what it gives up becomes the blocks of its next tokens
and it is never out of memory, although it does not hold all blocks of its tokens.

Blocks that a window has passed are still known to the prefix index, but are given up before all others. They are kept
like others only where a prompt ends, and where it leaves what the index knew: other prompts may go on from there.
"""

from __future__ import annotations

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.cache.windowed_index import WindowedIndex
from headway.policy.step.request import BlockTable, Sequence


class Windows:
    """The groups of a pool that have windows, by their numbers. There are none for a model without windows."""

    def __init__(self, blocks: KVBlocks) -> None:
        self.groups = [(number, group) for number, group in enumerate(blocks.index.groups) if group.window]
        self._blocks = blocks

    def tables(self, places: list[int]) -> list[BlockTable]:
        """The blocks of these pages with which tables go on behind them."""
        index = self._blocks.index
        return [BlockTable(*index.table(number, places)) for number in range(len(index.groups))]

    def shorten(self, ends: list[int], tables: list[BlockTable]) -> None:
        """Lower the numbers of entries that tables have after admission, beginning with these known ones."""
        for number, group in self.groups:
            ends[number] = min(ends[number], max(tables[number].end, group.sinks) + group.ahead)

    def ends_of_step(self, sequence: Sequence, needed: int) -> list[int]:
        """How many entries each table must have for `needed` blocks of tokens.

        With a window, a table must have those for a prompt's largest step.
        """
        blocks, ends = self._blocks, [needed] * len(sequence.tables)
        for number, group in self.groups:
            largest = group.end(sequence.num_computed, blocks.block_size)
            ends[number] = max(needed, min(blocks.blocks_for(len(sequence.tokens)), largest))
        return ends

    def passed(self, sequence: Sequence) -> int:
        """How many blocks become free when a sequence gives up what windows have passed."""
        references, size, found = self._blocks.references, self._blocks.block_size, 0
        for number, group in self.groups:
            table, first = sequence.tables[number], group.first(sequence.num_computed, size)
            found += sum(references[block] == 1 for block in table.entries(table.first or group.sinks, first))
        return found

    def give_up_passed(self, sequence: Sequence) -> list[int]:
        """Give up blocks that windows have passed, except sinks. Returns the numbers of the tables that changed."""
        size, changed = self._blocks.block_size, []
        for number, group in self.groups:
            table, first = sequence.tables[number], group.first(sequence.num_computed, size)
            start = table.first or group.sinks
            if first <= table.first:
                continue
            kept, passed = list[int](), list[int]()
            for entry, block in enumerate(table.entries(start, first), start):
                ends = (at for at in sequence.keeps_at if entry * size < at)
                (kept if any(group.first(at, size) <= entry for at in ends) else passed).append(block)
            self._blocks.release(kept)
            self._blocks.pass_by(passed)
            if not table.first:
                table.sinks = table.blocks[: group.sinks]
            del table.blocks[: first - table.first]
            table.first = first
            changed.append(number)
        return changed

    def are_whole(self, parent: Sequence, tokens: int) -> bool:
        """Whether a sequence still has all blocks that others need to go on behind so many of its tokens."""
        size = self._blocks.block_size
        return all(parent.tables[number].first <= group.first(tokens, size) for number, group in self.groups)

    def known_page(self, sequence: Sequence) -> int:
        """How many of its pages are in the prefix index; 0 where the last was another's and is gone: begin again."""
        index, known = self._blocks.index, sequence.num_registered
        assert isinstance(index, WindowedIndex)
        return known if known and index.knows(sequence.cache_node) else 0

    def registered(self, sequence: Sequence) -> list[int]:
        """The blocks that a sequence has registered itself, also those that windows have passed."""
        size, known = self._blocks.block_size, PrefixMatch()
        tokens = [*sequence.tokens[: sequence.num_registered * size], 0]
        self._blocks.index.match(tokens, sequence.cache_salt, known)
        return self._blocks.index.blocks_at(known.places[sequence.cached_tokens // size :])
