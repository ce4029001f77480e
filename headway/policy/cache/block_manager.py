"""The block tables of sequences: which blocks of the pool hold their tokens, from admission to the end.

A sequence has a table for each KV cache group; where all layers see all tokens, that is one. A block that another
sequence holds too is copied before it is written. Blocks are registered in the prefix index once they are full and all
their tokens are final. `windows`, `states` and `swapping` have what only some models or servers need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.offload import Offloading
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.cache.states import KeptStates, plan_keeps
from headway.policy.cache.swap import Handed, HostPool, Swapped
from headway.policy.cache.swapping import Swapping
from headway.policy.cache.windows import Windows
from headway.policy.step.plan import StepPlan, TableChange
from headway.policy.step.request import BlockTable, Sequence, Status


@dataclass(slots=True)
class Start:
    """What a waiting sequence would begin with."""

    known: PrefixMatch  # what the prefix index has of it
    computed: int  # tokens that need not be computed
    tables: list[BlockTable]  # the known blocks that its tables begin with
    ends: list[int]  # how many entries each table would have
    wanted: int  # how many free blocks that takes
    swapped: Swapped | None  # what the host holds of it
    is_forked: bool  # the tables are those of the first choice of its request


class BlockManager:
    """Takes blocks of a pool for sequences and gives them back; keeps their `tables`.

    Args:
        host: where blocks of preempted sequences may be swapped out to.

    Attributes:
        offloading: gives registered blocks names; None where none are kept beyond the pool.
        states: which states are kept; None for a model without recurrent layers.
    """

    def __init__(self, blocks: KVBlocks, host: HostPool | None = None) -> None:
        self._blocks = blocks
        self._windows = Windows(blocks) if any(group.window for group in blocks.index.groups) else None
        self._swapping = None if host is None else Swapping(host, blocks)
        self.offloading: Offloading | None = None
        self.states = None if blocks.checkpoints is None else KeptStates(blocks, blocks.checkpoints)

    # --- admission ----------------------------------------------------------------------------------

    def wanted(self, sequence: Sequence) -> int:
        """How many free blocks the admission of a sequence takes: those of its tables, less shared ones in use."""
        return self._start(sequence).wanted

    def known_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence need not be computed."""
        if sequence.parent is not None and self._can_fork(sequence, sequence.parent):
            return sequence.prompt_len - 1
        known = self._match(sequence)
        swapped = None if self._swapping is None else self._swapping.restorable(sequence, known)
        return known.length * self._blocks.block_size if swapped is None else swapped.computed

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence blocks for its known tokens, shared with its parent or a cached prefix where it can.

        Tables with a window get the blocks of what is computed first.

        Args:
            spare: blocks that must be left free.

        Returns:
            False when too few blocks are free; nothing is taken then.
        """
        blocks, owner, start = self._blocks, sequence.service.name, self._start(sequence)
        if start.wanted + spare > blocks.num_free:
            return False
        if start.is_forked and sequence.parent is not None:
            sequence.parent.room = 0  # it copies the block that both go on in
        nodes, tables = start.known.nodes, start.tables
        starts = [table.first + len(table.blocks) for table in tables]
        shared = tables[0].blocks if self._windows is None else [b for table in tables for b in table.held]
        blocks.share(shared, owner)
        sequence.num_computed = start.computed
        sequence.num_registered = min(len(nodes), *starts)
        sequence.cache_node = nodes[sequence.num_registered - 1] if sequence.num_registered else 0
        if self._windows is not None or self.states is not None:
            plan_keeps(blocks, sequence, nodes)
        if sequence.preemptions == 0 and sequence.output_len == 0:
            sequence.cached_tokens = sequence.num_computed
            blocks.prefix_stats.note(owner, sequence.prompt_len, sequence.num_computed)
            if shared and nodes:
                blocks.cached.found(shared)
        for number, table in enumerate(tables):
            if table.first and not table.sinks:  # the host has them
                table.sinks = blocks.allocate(blocks.index.groups[number].sinks, owner)
            table.blocks += blocks.allocate(start.ends[number] - starts[number], owner)
        sequence.tables = tables
        sequence.parent = sequence.prefix_match = None
        if self._swapping is not None:
            if start.swapped is not None:
                self._swapping.restore(sequence, start.swapped, starts)
            self._swapping.free(sequence)
        return True

    def _start(self, sequence: Sequence) -> Start:
        """What a waiting sequence would be admitted with."""
        blocks, parent, known, swapped = self._blocks, sequence.parent, PrefixMatch(), None
        is_forked = parent is not None and self._can_fork(sequence, parent)
        if is_forked and parent is not None:
            computed = sequence.prompt_len - 1
            tables = self._forked(parent, computed, sequence.prompt_len)
        else:
            known = self._match(sequence)
            computed, places = known.length * blocks.block_size, known.places[: known.length]
            if self._swapping is not None and (swapped := self._swapping.restorable(sequence, known)) is not None:
                computed, tables = swapped.computed, self._swapping.tables(swapped, known)
            else:
                tables = [BlockTable(0, places)] if self._windows is None else self._windows.tables(places)
        ends = [-(-len(sequence.tokens) // blocks.block_size)] * len(tables)
        if self._windows is not None:
            self._windows.shorten(ends, tables)
        wanted = sum(ends)
        for number, table in enumerate(tables):
            wanted -= table.first + len(table.blocks)
            held = table.sinks + table.blocks if table.sinks else table.blocks
            # The last block of a prompt that is taken over is copied.
            wanted += 1 if is_forked else list(map(blocks.references.__getitem__, held)).count(0)
            if swapped is not None and table.first:
                wanted += blocks.index.groups[number].sinks
        return Start(known, computed, tables, ends, wanted, swapped, is_forked)

    def _can_fork(self, sequence: Sequence, parent: Sequence) -> bool:
        """A further choice of a request takes over the prompt's blocks of the first one, if that has them still.

        States are not kept. Where the first choice has passed what windows see at the prompt's end, the further one
        finds the prompt in the prefix index.
        """
        if parent.status is not Status.RUNNING or sequence.output_len or self.states is not None:
            return False
        return self._windows is None or self._windows.are_whole(parent, sequence.prompt_len - 1)

    def _forked(self, source: Sequence, start: int, known: int) -> list[BlockTable]:
        """The blocks of another's `known` tokens that a sequence takes over, which goes on behind `start` of them.

        A further choice takes over all of the prompt, and computes its last token again.
        """
        size, tables = self._blocks.block_size, []
        for group, table in zip(self._blocks.index.groups, source.tables, strict=True):
            first = group.first(start, size)
            sinks = (table.sinks or table.blocks[: group.sinks]) if first else []
            tables.append(BlockTable(first, table.entries(first, self._blocks.blocks_for(known)), list(sinks)))
        return tables

    def fork(self, sequence: Sequence, source: Sequence, computed: int) -> None:
        """Give a running sequence without blocks those of another's computed tokens, from which it goes on.

        Whoever writes into a block that both hold copies it first.
        """
        sequence.tables = self._forked(source, computed, computed)
        self._blocks.share([block for table in sequence.tables for block in table.held], sequence.service.name)
        sequence.num_computed, sequence.keeps_at = computed, source.keeps_at
        sequence.num_registered, sequence.cache_node = source.num_registered, source.cache_node
        source.room = 0

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the prefix index has of a waiting sequence; for a model with states, up to the last checkpoint."""
        blocks, asks_more = self._blocks, sequence.params.prompt_logprobs is not None or sequence.pooling is not None
        if not blocks.enable_prefix_caching or (asks_more and sequence.needs_every_token):
            return PrefixMatch()  # every prompt token is computed
        if sequence.prefix_match is None:
            sequence.prefix_match = PrefixMatch()
        known = sequence.prefix_match
        blocks.index.match(sequence.tokens, sequence.cache_salt, known)
        if blocks.checkpoints is not None:
            known.whole = known.length = blocks.checkpoints.known(known.nodes)
        return known

    # --- steps --------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """How many blocks the next token of a decoding sequence takes, less those that windows have passed."""
        if sequence.room > sequence.num_computed:
            return 0
        needed = self._blocks.blocks_for(sequence.num_computed + 1)
        if self._windows is None:
            return self._lacking(sequence, [needed])
        lacking = self._lacking(sequence, self._windows.ends_of_step(sequence, needed))
        return max(0, lacking - self._windows.passed(sequence))

    def _lacking(self, sequence: Sequence, ends: list[int]) -> int:
        """How many blocks the tables lack to have so many entries.

        Where others hold the block of the next token too, its copy counts as one of them.
        """
        references, entry, lacking = self._blocks.references, sequence.num_computed // self._blocks.block_size, 0
        for number, table in enumerate(sequence.tables):
            has = table.first + len(table.blocks)
            if ends[number] > has:
                lacking += ends[number] - has
            if entry < has and references[table.blocks[entry - table.first]] > 1:
                lacking += 1
        return lacking

    def extend(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Give the sequence blocks of its own for its next `count` tokens, and tell the plan.

        Tables give up what windows have passed.

        Returns:
            False when too few blocks are free; nothing changes then.
        """
        blocks, tables, owner, windows = self._blocks, sequence.tables, sequence.service.name, self._windows
        size, start, references = blocks.block_size, sequence.num_computed, blocks.references
        entry, needed = start // size, (start + count + size - 1) // size
        ends = [needed] if windows is None else windows.ends_of_step(sequence, needed)
        most = sum(ends) - (entry - 1) * len(ends)  # the most blocks that the tables can lack
        if most > blocks.num_free and (lacking := self._lacking(sequence, ends)) > blocks.num_free:
            free = blocks.num_free
            if windows is not None:
                free += windows.passed(sequence)
                if lacking > free:  # as others share what windows have passed
                    ends = [needed] * len(tables)
                    lacking = self._lacking(sequence, ends)
            if lacking > free:
                return False
        moved = () if windows is None else windows.give_up_passed(sequence)
        room = 0
        for number, table in enumerate(tables):
            own, first, end = table.blocks, table.first, ends[number]
            changed = has = first + len(own)
            if has > entry and references[own[entry - first]] > 1:
                (copy,), changed = blocks.allocate(1, owner), entry
                plan.copies.append((own[entry - first], copy))
                blocks.release([own[entry - first]])
                own[entry - first] = copy
            if end > has:
                own += blocks.allocate(end - has, owner, own[-1] if own else None)
                has = end
            if has < room or not number:
                room = has
            if sequence.in_executor and (changed < has or number in moved):
                added, sinks = own[changed - first :], len(table.sinks)
                plan.tables.append(TableChange(sequence.seq_id, changed, added, number, first, sinks))
        sequence.room = room * size
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks after the newest token's: they were for drafts."""
        kept = self._blocks.blocks_for(len(sequence.tokens))
        for table in sequence.tables:
            self._blocks.release(table.entries(kept, table.end))
            del table.blocks[max(0, kept - table.first) :]
        sequence.room = 0

    def register_full(self, sequence: Sequence) -> None:
        """Enter the blocks that have become full in the prefix index."""
        tables, size, known = sequence.tables, self._blocks.block_size, sequence.num_registered
        full, further = sequence.num_computed // size, list[list[int]]()
        if full <= known:
            return
        if self._windows is None:
            first = tables[0].blocks[known:full]
        else:
            known = self._windows.known_page(sequence)
            first, *further = [table.entries(known, full) for table in tables]
        parent: int | str = sequence.cache_node if known else sequence.cache_salt
        sequence.cache_node = self._blocks.register(first, parent, sequence.tokens, known, further)
        sequence.num_registered = full
        if self.offloading is not None:
            self.offloading.registered(sequence, full)

    # --- the end ------------------------------------------------------------------------------------

    def withdraw(self, sequence: Sequence) -> None:
        """Take what a sequence that failed has registered out of the prefix index, so that others do not find it."""
        found = sequence.cached_tokens // self._blocks.block_size
        own = sequence.held_blocks[found : sequence.num_registered]
        self._blocks.withdraw(own if self._windows is None else self._windows.registered(sequence))

    def preempt(self, sequence: Sequence) -> None:
        """Give back all blocks; the host may keep what they hold until the sequence returns."""
        swapped = None if self._swapping is None else self._swapping.swap_out(sequence)
        self.release(sequence)
        sequence.swapped = swapped

    def hand_over(self, sequence: Sequence) -> Handed | None:
        """Have the host keep a copy of what is computed of a prompt, for another engine; None where it cannot."""
        return None if self._swapping is None else self._swapping.hand_over(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, those on the host too; the sequence has nothing computed any more.

        Blocks of the last tokens are the first to be given up.
        """
        if self._swapping is not None:
            self._swapping.free(sequence)
        if self.states is not None:
            self.states.leave(sequence)
        self._blocks.index.leave(sequence.cache_node, sequence.tokens)
        tables = sequence.tables
        if len(tables) > 1:
            entries = [(table.first + at, block) for table in tables for at, block in enumerate(table.blocks)]
            entries += [entry for table in tables for entry in enumerate(table.sinks)]
            self._blocks.release([block for _, block in sorted(entries)])
        elif tables:
            self._blocks.release(tables[0].sinks + tables[0].blocks)
        sequence.tables = []
        sequence.num_computed = sequence.num_registered = sequence.cache_node = sequence.room = 0
        sequence.in_executor = False

    # --- integrity ----------------------------------------------------------------------------------

    def check_by_parts(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[None]:
        """Verify that no block is leaked or held twice, with pauses; KVBlocks.check_by_parts() says when.

        Raises:
            RuntimeError: naming the block.
        """
        yield from self._blocks.check_by_parts(sequence.held_blocks for sequence in running)
        if any(sequence.held_blocks for sequence in waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        if self._blocks.checkpoints is not None:
            self._blocks.checkpoints.check(sum(sequence.checkpoint >= 0 for sequence in running))
        if self._swapping is not None:
            self._swapping.host.check(sequence.swapped for sequence in waiting)
