"""The block tables of sequences where layers are in several KV cache groups: one for each group.

The table of a group with a window gives up the blocks that the window has passed, when the sequence next needs a block.
A prompt under way has the blocks of its largest step, so that what it gives up becomes the blocks of its next tokens
and it is never out of memory, although it does not hold all blocks of its tokens.

What a window has passed is still known to the prefix index, and given up before all other blocks. It is only kept like
others where a prompt ends, and where it leaves what the index knew: there others may go on from it.
"""

from __future__ import annotations

from headway.policy.block_manager import BlockManager
from headway.policy.kv_groups import GroupTable, KVCacheGroup
from headway.policy.page_index import NO_BLOCK, PageIndex
from headway.policy.plan import StepPlan, TableChange
from headway.policy.prefix_index import PrefixMatch
from headway.policy.request import Sequence
from headway.policy.swap import Swapped


class GroupedBlockManager(BlockManager):
    """A BlockManager for a pool with groups.

    A further choice of a request finds its prompt in the prefix index if the first one has passed some of it.
    """

    @property
    def _groups(self) -> tuple[KVCacheGroup, ...]:
        return self._blocks.groups

    @property
    def _pages(self) -> PageIndex:
        assert self._blocks.pages is not None
        return self._blocks.pages

    # --- admission ----------------------------------------------------------------------------------

    def wanted(self, sequence: Sequence) -> int:
        """Free blocks that its admission takes."""
        if self._can_fork(sequence):
            starts = [table.end for table in self._forked(sequence)[1]]
            return sum(self._ends(sequence, starts)) - sum(starts) + len(self._groups)
        known, references = self._match(sequence), self._blocks.references
        if self._restorable(sequence, known) is None:
            starts, shared, lacking = [known.length] * len(self._groups), known.blocks, 0
        else:
            _, tables = self._begins(sequence)
            starts = [table.end for table in tables]
            shared = [block for table in tables for block in table.held]
            lacking = sum(group.sinks for group, table in zip(self._groups, tables, strict=True) if table.first)
        cached = sum(1 for block in shared if not references[block])
        return sum(self._ends(sequence, starts)) - sum(starts) + cached + lacking

    def known_tokens(self, sequence: Sequence) -> int:
        """Of a waiting sequence: those that need not be computed."""
        if self._can_fork(sequence):
            return sequence.prompt_len - 1
        known = self._match(sequence)
        swapped = self._restorable(sequence, known)
        return known.length * self._blocks.block_size if swapped is None else swapped.computed

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """As BlockManager.admit(); of windowed groups, it takes the blocks of what is computed first."""
        blocks, owner, size = self._blocks, sequence.service.name, self._blocks.block_size
        if self.wanted(sequence) + spare > blocks.num_free:
            return False
        forks = self._can_fork(sequence)
        known = PrefixMatch() if forks else self._match(sequence)
        restored = None if forks else self._restorable(sequence, known)
        sequence.num_computed, tables = self._forked(sequence) if forks else self._begins(sequence)
        if forks and sequence.parent is not None:
            sequence.parent.room = 0  # it copies the block that both go on in
        starts = [table.end for table in tables]
        shared = [block for table in tables for block in table.held]
        blocks.share(shared, owner)
        sequence.num_registered = min(len(known.nodes), *starts)
        sequence.cache_node = known.nodes[sequence.num_registered - 1] if sequence.num_registered else 0
        leaves, last = len(known.nodes) * size, (len(sequence.tokens) - 1) // size * size
        sequence.keeps_at = tuple(at for at in dict.fromkeys((leaves, last)) if at > sequence.num_computed)
        if sequence.preemptions == 0 and sequence.output_len == 0:
            sequence.cached_tokens = sequence.num_computed
            blocks.prefix_stats.note(owner, sequence.prompt_len, sequence.num_computed)
            if shared and not forks:
                blocks.cached.found(shared)
        for group, end, table in zip(self._groups, self._ends(sequence, starts), tables, strict=True):
            if table.first and not table.sinks:  # the host has them
                table.sinks = blocks.allocate(group.sinks, owner)
            table.blocks += blocks.allocate(end - table.end, owner)
        sequence.tables = tables
        sequence.parent = sequence.prefix_match = None
        if restored is not None:
            self._restore(sequence, restored, starts)
        self._free_host(sequence)
        return True

    def _can_fork(self, sequence: Sequence) -> bool:
        """As BlockManager's; the first choice must have what windows see at the prompt's end."""
        parent = sequence.parent
        if parent is None or sequence.swapped is not None or not super()._can_fork(sequence):
            return False
        pairs, computed = zip(self._groups, parent.tables, strict=True), sequence.prompt_len - 1
        return all(table.first <= group.first(computed, self._blocks.block_size) for group, table in pairs)

    def _forked(self, sequence: Sequence) -> tuple[int, list[GroupTable]]:
        """As _begins(), of a further choice: all of the prompt but its last token, which is computed again."""
        parent, computed, tables = sequence.parent, sequence.prompt_len - 1, list[GroupTable]()
        assert parent is not None
        end = self._blocks.blocks_for(sequence.prompt_len)
        for group, table in zip(self._groups, parent.tables, strict=True):
            first = group.first(computed, self._blocks.block_size)
            sinks = (table.sinks or table.blocks[: group.sinks]) if first else []
            tables.append(GroupTable(first, table.entries(first, end), list(sinks)))
        return computed, tables

    def _match(self, sequence: Sequence) -> PrefixMatch:
        if not self._blocks.enable_prefix_caching or sequence.needs_every_token:
            return PrefixMatch()  # every prompt token is computed
        if sequence.prefix_match is None:
            sequence.prefix_match = PrefixMatch()
        self._pages.match(sequence.tokens, sequence.cache_salt, sequence.prefix_match)
        return sequence.prefix_match

    def _restorable(self, sequence: Sequence, known: PrefixMatch) -> Swapped | None:
        """What the host has of a sequence, if it has more than the index, and all that the index has not."""
        swapped = sequence.swapped
        if swapped is None or swapped.computed <= known.length * self._blocks.block_size:
            return None
        has_all = swapped.first <= known.whole or all(group.window for group in self._groups)
        return swapped if has_all else None

    def _begins(self, sequence: Sequence) -> tuple[int, list[GroupTable]]:
        """Tokens of a waiting sequence that need not be computed, and the known blocks that its tables begin with.

        What the host has of tables is not among the blocks.
        """
        known, size = self._match(sequence), self._blocks.block_size
        swapped = self._restorable(sequence, known)
        if swapped is None:
            return known.length * size, self._pages.tables(known, known.length)
        found = self._pages.tables(known, min(known.whole, swapped.computed // size))
        tables = [
            table if group.window is None else GroupTable(group.first(swapped.computed, size))
            for group, table in zip(self._groups, found, strict=True)
        ]
        return swapped.computed, tables

    def _ends(self, sequence: Sequence, starts: list[int]) -> list[int]:
        """How long the tables become whose known entries end there."""
        needed = self._blocks.blocks_for(len(sequence.tokens))
        pairs = zip(self._groups, starts, strict=True)
        return [
            needed if group.window is None else min(needed, max(start, group.sinks) + group.ahead)
            for group, start in pairs
        ]

    # --- steps --------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """Blocks that the next token of a decoding sequence takes, less those that windows have passed."""
        missing = self._missing(sequence, self._wanted_ends(sequence, 1)) + len(self._shared(sequence))
        return max(0, missing - self._passed(sequence))

    def _shared(self, sequence: Sequence) -> list[int]:
        """Groups where others hold the block of the next token, too."""
        entry, references = sequence.num_computed // self._blocks.block_size, self._blocks.references
        return [
            number
            for number, table in enumerate(sequence.tables)
            if entry < table.end and references[table.blocks[entry - table.first]] > 1
        ]

    def _wanted_ends(self, sequence: Sequence, count: int) -> list[int]:
        """How long the tables have to be for the next `count` tokens, and for a prompt's largest step."""
        size, start = self._blocks.block_size, sequence.num_computed
        needed, whole = self._blocks.blocks_for(start + count), self._blocks.blocks_for(len(sequence.tokens))
        return [
            max(needed, whole if group.window is None else min(whole, group.end(start, size))) for group in self._groups
        ]

    def _missing(self, sequence: Sequence, ends: list[int]) -> int:
        return sum(max(0, end - table.end) for end, table in zip(ends, sequence.tables, strict=True))

    def _passed(self, sequence: Sequence) -> int:
        """Blocks that become free when a sequence gives up what windows have passed."""
        references, found = self._blocks.references, 0
        for group, table in zip(self._groups, sequence.tables, strict=True):
            first = group.first(sequence.num_computed, self._blocks.block_size)
            found += sum(references[block] == 1 for block in table.entries(table.first or group.sinks, first))
        return found

    def extend(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """As BlockManager.extend(); gives up what windows have passed."""
        blocks, ends, tables = self._blocks, self._wanted_ends(sequence, count), sequence.tables
        shared, entry = self._shared(sequence), sequence.num_computed // blocks.block_size
        missing = self._missing(sequence, ends) + len(shared)
        if missing > blocks.num_free:
            free = blocks.num_free + self._passed(sequence)
            if missing > free:  # as others share what windows have passed
                ends = [blocks.blocks_for(sequence.num_computed + count)] * len(tables)
                missing = self._missing(sequence, ends) + len(shared)
            if missing > free:
                return False
        changed = []
        for group, table in zip(self._groups, tables, strict=True):
            before = table.first
            self._pass_by(sequence, group, table)
            changed.append(table.first > before)
        for number, (end, table) in enumerate(zip(ends, tables, strict=True)):
            start, lacking = table.end, end - table.end
            if number in shared:
                start = entry
                (copy,) = blocks.allocate(1, sequence.service.name)
                plan.copies.append((table.blocks[entry - table.first], copy))
                blocks.release([table.blocks[entry - table.first]])
                table.blocks[entry - table.first] = copy
            if lacking > 0:
                table.blocks += blocks.allocate(lacking, sequence.service.name, *table.blocks[-1:])
            if sequence.in_executor and (lacking > 0 or changed[number] or number in shared):
                added = table.entries(start, table.end)
                sinks = len(table.sinks)
                plan.tables.append(TableChange(sequence.seq_id, start, added, number, table.first, sinks))
        sequence.room = min(table.end for table in tables) * blocks.block_size
        return True

    def _pass_by(self, sequence: Sequence, group: KVCacheGroup, table: GroupTable) -> None:
        """Give up what the window of a table has passed, sinks apart."""
        size = self._blocks.block_size
        first = group.first(sequence.num_computed, size)
        count, start = first - table.first, table.first or group.sinks
        if count <= 0:
            return
        kept, passed = list[int](), list[int]()
        for entry, block in enumerate(table.entries(start, first), start):
            ends = (at for at in sequence.keeps_at if entry * size < at)
            (kept if any(group.first(at, size) <= entry for at in ends) else passed).append(block)
        self._blocks.release(kept)
        self._blocks.pass_by(passed)
        if not table.first:
            table.sinks = table.blocks[: group.sinks]
        del table.blocks[:count]
        table.first = first

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks after the newest token's: they were for drafts."""
        kept = self._blocks.blocks_for(len(sequence.tokens))
        for table in sequence.tables:
            self._blocks.release(table.entries(kept, table.end))
            del table.blocks[max(0, kept - table.first) :]
        sequence.room = 0

    def register_full(self, sequence: Sequence) -> None:
        """Enter the pages that have become full in the prefix index."""
        size, known = self._blocks.block_size, sequence.num_registered
        full = sequence.num_computed // size
        if full <= known:
            return
        if known and not self._pages.knows(sequence.cache_node):
            known = 0  # the last page was another's and is gone: begin again
        rows = [[_entry(table, entry) for table in sequence.tables] for entry in range(known, full)]
        parent: int | str = sequence.cache_node if known else sequence.cache_salt
        tokens = tuple(sequence.tokens[known * size : full * size])
        sequence.cache_node = self._blocks.register_pages(parent, tokens, rows)
        sequence.num_registered = full

    # --- the end ------------------------------------------------------------------------------------

    def withdraw(self, sequence: Sequence) -> None:
        """As BlockManager.withdraw(), also what windows have passed."""
        size = self._blocks.block_size
        path = self._pages.path(sequence.tokens[: sequence.num_registered * size], sequence.cache_salt)
        self._blocks.withdraw([block for page in path[sequence.cached_tokens // size :] for block in page])

    def _swap_out(self, sequence: Sequence) -> Swapped | None:
        """What others share with a sequence in all tables without a window, and the index knows, is not swapped out."""
        blocks, tables, computed = self._blocks, sequence.tables, sequence.num_computed
        if self._host is None or not computed or sequence.needs_every_token:
            return None
        references, first = blocks.references, 0
        whole = [table.blocks for table, group in zip(tables, self._groups, strict=True) if group.window is None]
        while whole and first < sequence.num_registered and all(references[table[first]] > 1 for table in whole):
            first += 1
        held = [block for part in self._parts(sequence, [first] * len(tables)) for block in part]
        return self._host.swap_out(held, first, first * blocks.block_size, computed) if held else None

    def _parts(self, sequence: Sequence, starts: list[int]) -> list[list[int]]:
        """What tables have of computed tokens, those without a window from these entries on."""
        size, computed = self._blocks.block_size, sequence.num_computed
        end, parts = self._blocks.blocks_for(computed), []
        for group, table, start in zip(self._groups, sequence.tables, starts, strict=True):
            first = start if group.window is None else group.first(computed, size)
            sinks = table.sinks or table.blocks[: group.sinks] if group.window is not None and first else []
            parts.append(sinks + table.entries(first, end))
        return parts

    def _restore(self, sequence: Sequence, swapped: Swapped, starts: list[int]) -> None:
        """Have copied back what tables without a window lack from `starts` on, and others altogether."""
        assert self._host is not None
        wanted, host_blocks, at = list[int](), list[int](), 0
        of_host = self._parts(sequence, [swapped.first] * len(starts))
        for part, lacking in zip(of_host, self._parts(sequence, starts), strict=True):
            at += len(part)
            wanted += lacking
            host_blocks += swapped.host_blocks[at - len(lacking) : at]
        found = min((start for group, start in zip(self._groups, starts, strict=True) if not group.window), default=0)
        self._host.swap_in(host_blocks, wanted, swapped.computed - found * self._blocks.block_size)

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks; those of the last tokens are the first to be given up."""
        held = [(table.first + at, block) for table in sequence.tables for at, block in enumerate(table.blocks)]
        held += [(at, block) for table in sequence.tables for at, block in enumerate(table.sinks)]
        self._blocks.release([block for _, block in sorted(held)])
        sequence.tables = []
        super().release(sequence)


def _entry(table: GroupTable, entry: int) -> int:
    """The block of an entry of a table; NO_BLOCK where a window has passed it."""
    if entry < len(table.sinks):
        return table.sinks[entry]
    return table.blocks[entry - table.first] if entry >= table.first else NO_BLOCK
