"""What of a sequence's block tables goes to host memory when it is preempted, and comes back (`swap`).

A prompt that another engine has computed comes back in the same way, as if it had been preempted here.
"""

from __future__ import annotations

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.cache.swap import BlockSwap, Handed, HostPool, Swapped
from headway.policy.step.request import BlockTable, Sequence


class Swapping:
    """Takes blocks of the host for the blocks of preempted sequences, and gives them back."""

    def __init__(self, host: HostPool, blocks: KVBlocks) -> None:
        self.host = host
        self._blocks = blocks

    def restorable(self, sequence: Sequence, known: PrefixMatch) -> Swapped | None:
        """What the host holds of a sequence; None unless it goes on where the index ends, and further."""
        swapped, blocks = sequence.swapped, self._blocks
        if swapped is None or swapped.computed <= known.length * blocks.block_size:
            return None
        if blocks.checkpoints is not None:  # the host has no states
            return None
        has_all = swapped.first <= known.whole or all(group.window for group in blocks.index.groups)
        return swapped if has_all else None

    def tables(self, swapped: Swapped, known: PrefixMatch) -> list[BlockTable]:
        """The known blocks that tables begin with. Blocks in host memory are not among them."""
        size, index = self._blocks.block_size, self._blocks.index
        places = known.places[: min(known.whole, swapped.computed // size)]
        return [
            BlockTable(*index.table(number, places))
            if group.window is None
            else BlockTable(group.first(swapped.computed, size))
            for number, group in enumerate(index.groups)
        ]

    def swap_out(self, sequence: Sequence) -> Swapped | None:
        """Have the host take what a sequence has computed; None where it does not.

        Blocks that others share in all tables without a window, and that the index knows, stay in the pool.
        """
        blocks, tables, computed = self._blocks, sequence.tables, sequence.num_computed
        if not computed or sequence.needs_every_token:
            return None
        references, first = blocks.references, 0
        whole = [
            table.blocks for table, group in zip(tables, self._blocks.index.groups, strict=True) if group.window is None
        ]
        while whole and first < sequence.num_registered and all(references[table[first]] > 1 for table in whole):
            first += 1
        held = [block for part in self._parts(sequence, [first] * len(tables)) for block in part]
        return self.host.swap_out(held, first, first * blocks.block_size, computed) if held else None

    def _parts(self, sequence: Sequence, starts: list[int]) -> list[list[int]]:
        """The blocks of computed tokens, table by table; without a window, from the entry in `starts` on."""
        size, computed = self._blocks.block_size, sequence.num_computed
        end, parts = self._blocks.blocks_for(computed), []
        for group, table, start in zip(self._blocks.index.groups, sequence.tables, starts, strict=True):
            first = start if group.window is None else group.first(computed, size)
            sinks = table.sinks or table.blocks[: group.sinks] if group.window is not None and first else []
            parts.append(sinks + table.entries(first, end))
        return parts

    def restore(self, sequence: Sequence, swapped: Swapped, starts: list[int]) -> None:
        """Have blocks copied back from the host: to tables without a window from `starts` on, to others all of them."""
        wanted, host_blocks, at = list[int](), list[int](), 0
        of_host = self._parts(sequence, [swapped.first] * len(starts))
        for part, lacking in zip(of_host, self._parts(sequence, starts), strict=True):
            at += len(part)
            wanted += lacking
            host_blocks += swapped.host_blocks[at - len(lacking) : at]
        found = min(
            (start for group, start in zip(self._blocks.index.groups, starts, strict=True) if not group.window),
            default=0,
        )
        self.host.swap_in(host_blocks, wanted, swapped.computed - found * self._blocks.block_size)

    def hand_over(self, sequence: Sequence) -> Handed | None:
        """Have the host take what another engine needs to compute the last token of a prompt, as far as it is computed.

        Returns:
            What it has by now; None where it is full, which another try may change.
        """
        last, size = sequence.prompt_len - 1, self._blocks.block_size
        wanted = sorted(self._blocks.entries_for(last))
        handed = sequence.handed = sequence.handed or self.host.take(len(wanted), last)
        if handed is None:
            return None
        computed, at = min(last, sequence.num_computed), handed.copied
        while handed.copied < len(wanted) and min(last, (wanted[handed.copied][0] + 1) * size) <= computed:
            handed.copied += 1
        if at < handed.copied:
            held = [sequence.tables[table].entries(entry, entry + 1)[0] for entry, table in wanted[at : handed.copied]]
            self.host.swaps.append(BlockSwap(True, held, handed.host_blocks[at : handed.copied]))
        return handed

    def free(self, sequence: Sequence) -> None:
        """Give back what the host holds of a sequence."""
        if sequence.swapped is not None:
            self.host.free(sequence.swapped)
            sequence.swapped = None
