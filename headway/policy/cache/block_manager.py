"""The block tables of sequences: which blocks of the pool hold their tokens, from admission to the end.

A sequence has a table for each KV cache group; where all layers see all tokens, that is one. A block that another
sequence holds too is copied before it is written. Blocks are registered in the prefix index once they are full and all
their tokens are final.

The table of a group with a window gives up the blocks that the window has passed, when the sequence next needs a block.
A prompt under way has the blocks of its largest step, so that what it gives up becomes the blocks of its next tokens
and it is never out of memory, although it does not hold all blocks of its tokens.

Blocks that a window has passed are still known to the prefix index, but are given up before all others. They are kept
like others only where a prompt ends, and where it leaves what the index knew: other prompts may go on from there.
"""

from __future__ import annotations

from headway.policy.cache.checkpoints import Checkpoint
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.cache.swap import HostPool, Swapped
from headway.policy.step.plan import ScheduledSequence, StepPlan, TableChange
from headway.policy.step.request import BlockTable, Sequence, Status


class BlockManager:
    """Takes blocks of a pool for sequences and gives them back; keeps their `tables`.

    Args:
        host: where blocks of preempted sequences may be swapped out to.
    """

    def __init__(self, blocks: KVBlocks, host: HostPool | None = None) -> None:
        self._blocks = blocks
        self._host = host
        self._groups = blocks.index.groups
        self._windowed = [(number, group) for number, group in enumerate(self._groups) if group.window]

    # --- admission ----------------------------------------------------------------------------------

    def wanted(self, sequence: Sequence) -> int:
        """How many free blocks the admission of a sequence takes: those of its tables, less shared ones in use."""
        if sequence.parent is not None and self._can_fork(sequence):
            starts = [table.end for table in self._forked(sequence)]
            return sum(self._lengths(sequence, starts)) - sum(starts) + len(starts)
        known, lacking = self._match(sequence), 0
        if sequence.swapped is None or self._restorable(sequence, known) is None:
            starts, shared = [known.length] * len(self._groups), known.blocks
            if self._blocks.checkpoints is not None:
                shared = shared[: known.length]
        else:
            tables = self._known_tables(sequence, known)[1]
            starts = [table.end for table in tables]
            shared = [block for table in tables for block in table.held]
            lacking = sum(group.sinks for number, group in self._windowed if tables[number].first)
        references = self._blocks.references
        cached = [references[block] for block in shared].count(0)
        return sum(self._lengths(sequence, starts)) - sum(starts) + cached + lacking

    def known_tokens(self, sequence: Sequence) -> int:
        """How many tokens of a waiting sequence need not be computed."""
        if self._can_fork(sequence):
            return sequence.prompt_len - 1
        known = self._match(sequence)
        swapped = self._restorable(sequence, known)
        return known.length * self._blocks.block_size if swapped is None else swapped.computed

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence blocks for its known tokens, shared with its parent or a cached prefix where it can.

        Tables with a window get the blocks of what is computed first.

        Args:
            spare: blocks that must be left free.

        Returns:
            False when too few blocks are free; nothing is taken then.
        """
        blocks, owner, parent, restored = self._blocks, sequence.service.name, sequence.parent, None
        if self.wanted(sequence) + spare > blocks.num_free:
            return False
        if parent is not None and self._can_fork(sequence):
            known, computed, tables = PrefixMatch(), sequence.prompt_len - 1, self._forked(sequence)
            parent.room = 0  # it copies the block that both go on in
        else:
            known = self._match(sequence)
            restored = self._restorable(sequence, known)
            computed, tables = self._known_tables(sequence, known)
        starts = [table.end for table in tables]
        shared = [block for table in tables for block in table.held]
        blocks.share(shared, owner)
        sequence.num_computed = computed
        sequence.num_registered = min(len(known.nodes), *starts)
        sequence.cache_node = known.nodes[sequence.num_registered - 1] if sequence.num_registered else 0
        if self._windowed or blocks.checkpoints is not None:
            self._plan_keeps(sequence, known.nodes)
        if sequence.preemptions == 0 and sequence.output_len == 0:
            sequence.cached_tokens = sequence.num_computed
            blocks.prefix_stats.note(owner, sequence.prompt_len, sequence.num_computed)
            if shared and known.nodes:
                blocks.cached.found(shared)
        ends = self._lengths(sequence, starts)
        for number, table in enumerate(tables):
            if table.first and not table.sinks:  # the host has them
                table.sinks = blocks.allocate(self._groups[number].sinks, owner)
            table.blocks += blocks.allocate(ends[number] - starts[number], owner)
        sequence.tables = tables
        sequence.parent = sequence.prefix_match = None
        if restored is not None:
            self._restore(sequence, restored, starts)
        self._free_host(sequence)
        return True

    def _can_fork(self, sequence: Sequence) -> bool:
        """A further choice of a request takes over the prompt's blocks of the first one, if that has them still.

        States are not kept. Where the first choice has passed what windows see at the prompt's end, the further one
        finds the prompt in the prefix index.
        """
        parent, size = sequence.parent, self._blocks.block_size
        if parent is None or parent.status is not Status.RUNNING or sequence.output_len:
            return False
        firsts = [(parent.tables[number].first, group) for number, group in self._windowed]
        is_whole = all(first <= group.first(sequence.prompt_len - 1, size) for first, group in firsts)
        return is_whole and self._blocks.checkpoints is None

    def _forked(self, sequence: Sequence) -> list[BlockTable]:
        """What a further choice takes over: all of the prompt, of which the last token is computed again."""
        assert sequence.parent is not None
        size, tables = self._blocks.block_size, []
        for group, table in zip(self._groups, sequence.parent.tables, strict=True):
            first = group.first(sequence.prompt_len - 1, size)
            sinks = (table.sinks or table.blocks[: group.sinks]) if first else []
            entries = table.entries(first, self._blocks.blocks_for(sequence.prompt_len))
            tables.append(BlockTable(first, entries, list(sinks)))
        return tables

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What the prefix index has of a waiting sequence; for a model with states, up to the last checkpoint."""
        blocks = self._blocks
        if not blocks.enable_prefix_caching or sequence.needs_every_token:
            return PrefixMatch()  # every prompt token is computed
        if sequence.prefix_match is None:
            sequence.prefix_match = PrefixMatch()
        known = sequence.prefix_match
        blocks.index.match(sequence.tokens, sequence.cache_salt, known)
        if blocks.checkpoints is not None:
            known.whole = known.length = blocks.checkpoints.known(known.nodes)
        return known

    def _restorable(self, sequence: Sequence, known: PrefixMatch) -> Swapped | None:
        """What the host holds of a sequence; None unless it goes on where the index ends, and further."""
        swapped = sequence.swapped
        if swapped is None or swapped.computed <= known.length * self._blocks.block_size:
            return None
        if self._blocks.checkpoints is not None:  # the host has no states
            return None
        has_all = swapped.first <= known.whole or len(self._windowed) == len(self._groups)
        return swapped if has_all else None

    def _known_tables(self, sequence: Sequence, known: PrefixMatch) -> tuple[int, list[BlockTable]]:
        """Tokens of a waiting sequence that need not be computed, and the known blocks that its tables begin with.

        Blocks in host memory are not among them.
        """
        size, swapped = self._blocks.block_size, self._restorable(sequence, known)
        computed = known.length * size if swapped is None else swapped.computed
        places = known.places[: known.length if swapped is None else min(known.whole, computed // size)]
        return computed, [
            BlockTable(*self._blocks.index.table(number, places))
            if swapped is None or group.window is None
            else BlockTable(group.first(computed, size))
            for number, group in enumerate(self._groups)
        ]

    def _lengths(self, sequence: Sequence, starts: list[int]) -> list[int]:
        """How many entries each table has after admission, if its known entries end at `starts`."""
        needed = self._blocks.blocks_for(len(sequence.tokens))
        ends = [needed] * len(starts)
        for number, group in self._windowed:
            ends[number] = min(needed, max(starts[number], group.sinks) + group.ahead)
        return ends

    # --- checkpoints --------------------------------------------------------------------------------

    def _plan_keeps(self, sequence: Sequence, nodes: list[int]) -> None:
        """Note behind which tokens of an admitted sequence its state, or what windows see, is to be kept.

        For a model with states, note also which one the sequence goes on from.
        """
        checkpoints, size, computed = self._blocks.checkpoints, self._blocks.block_size, sequence.num_computed
        leaves, ends, least = len(nodes) * size, (len(sequence.tokens) - 1) // size * size, 0
        if checkpoints is not None:
            if not self._blocks.enable_prefix_caching:
                return
            if computed:
                sequence.checkpoint = checkpoints.read(nodes[computed // size - 1])
            least = checkpoints.spacing
        worth_it = leaves - computed >= least
        sequence.keeps_at = tuple(at for at in sorted({leaves, ends}) if at > computed and (worth_it or at == ends))

    def keep_states(self, sequence: Sequence, count: int) -> tuple[Checkpoint, ...]:
        """The states to keep while a prompt's next `count` tokens are computed, as far as there are slots."""
        start, checkpoints = sequence.num_computed, self._blocks.checkpoints
        if checkpoints is None:
            return ()
        wanted = [at for at in sequence.keeps_at if start < at <= start + count]
        return tuple([Checkpoint(at, slot) for at in wanted if (slot := checkpoints.promise()) is not None])

    def roll(self, sequence: Sequence, tokens: int) -> int | None:
        """A slot for the state of a decoding sequence behind its first `tokens`; None where it is not to be kept."""
        checkpoints = self._blocks.checkpoints
        if checkpoints is None or not self._blocks.enable_prefix_caching or tokens % checkpoints.spacing:
            return None
        return checkpoints.roll(sequence.rolling)

    def rolled(self, sequence: Sequence, slot: int) -> None:
        """The slot now holds the state behind all computed tokens of the sequence, the last of which ends a block."""
        checkpoints, node = self._blocks.checkpoints, sequence.cache_node
        if checkpoints is not None:
            sequence.rolling = node if checkpoints.fill(slot, node, rolls=True) else 0

    def settle(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """A step of the sequence has ended: give the states that were kept in it to their nodes."""
        blocks, checkpoints = self._blocks, self._blocks.checkpoints
        if checkpoints is None:
            return
        self._let_go(sequence)
        for kept in item.keeps:
            if kept.tokens == sequence.num_computed and kept.tokens not in sequence.keeps_at:
                self.rolled(sequence, kept.slot)
                continue
            known = PrefixMatch()
            blocks.match(sequence.tokens[: kept.tokens + 1], sequence.cache_salt, known)
            if len(known.nodes) * blocks.block_size == kept.tokens:
                checkpoints.fill(kept.slot, known.nodes[-1])

    def _let_go(self, sequence: Sequence) -> None:
        """Let go of the state that the sequence goes on from: it has been read, or never will be."""
        if self._blocks.checkpoints is not None and sequence.checkpoint >= 0:
            self._blocks.checkpoints.let_go(sequence.checkpoint)
            sequence.checkpoint = -1

    # --- steps --------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """How many blocks the next token of a decoding sequence takes, less those that windows have passed."""
        if sequence.room > sequence.num_computed:
            return 0
        needed = self._blocks.blocks_for(sequence.num_computed + 1)
        return max(0, self._lacking(sequence, self._ends_of_step(sequence, needed)) - self._passed(sequence))

    def _ends_of_step(self, sequence: Sequence, needed: int) -> list[int]:
        """How many entries each table must have for `needed` blocks of tokens.

        With a window, a table must have those for a prompt's largest step.
        """
        blocks, ends = self._blocks, [needed] * len(self._groups)
        for number, group in self._windowed:
            largest = group.end(sequence.num_computed, blocks.block_size)
            ends[number] = max(needed, min(blocks.blocks_for(len(sequence.tokens)), largest))
        return ends

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

    def _passed(self, sequence: Sequence) -> int:
        """How many blocks become free when a sequence gives up what windows have passed."""
        references, size, found = self._blocks.references, self._blocks.block_size, 0
        for number, group in self._windowed:
            table, first = sequence.tables[number], group.first(sequence.num_computed, size)
            found += sum(references[block] == 1 for block in table.entries(table.first or group.sinks, first))
        return found

    def extend(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Give the sequence blocks of its own for its next `count` tokens, and tell the plan.

        Tables give up what windows have passed.

        Returns:
            False when too few blocks are free; nothing changes then.
        """
        blocks, tables, owner = self._blocks, sequence.tables, sequence.service.name
        size, start, references = blocks.block_size, sequence.num_computed, blocks.references
        entry, needed = start // size, (start + count + size - 1) // size
        ends = self._ends_of_step(sequence, needed) if self._windowed else [needed]
        most = sum(ends) - (entry - 1) * len(ends)  # the most blocks that the tables can lack
        if most > blocks.num_free and (lacking := self._lacking(sequence, ends)) > blocks.num_free:
            free = blocks.num_free + self._passed(sequence)
            if lacking > free and self._windowed:  # as others share what windows have passed
                ends = [needed] * len(tables)
                lacking = self._lacking(sequence, ends)
            if lacking > free:
                return False
        moved = self._give_up_passed(sequence) if self._windowed else ()
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

    def _give_up_passed(self, sequence: Sequence) -> list[int]:
        """Give up blocks that windows have passed, except sinks. Returns the numbers of the tables that changed."""
        size, changed = self._blocks.block_size, []
        for number, group in self._windowed:
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

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks after the newest token's: they were for drafts."""
        kept = self._blocks.blocks_for(len(sequence.tokens))
        for table in sequence.tables:
            self._blocks.release(table.entries(kept, table.end))
            del table.blocks[max(0, kept - table.first) :]
        sequence.room = 0

    def register_full(self, sequence: Sequence) -> None:
        """Enter the blocks that have become full in the prefix index."""
        blocks, known, tables = self._blocks, sequence.num_registered, sequence.tables
        size = blocks.block_size
        full = sequence.num_computed // size
        if full <= known:
            return
        further: list[list[int]] = []
        if self._windowed:
            if known and not blocks.index.knows(sequence.cache_node):
                known = 0  # the last page was another's and is gone: begin again
            further = [table.entries(known, full) for table in tables[1:]]
        parent: int | str = sequence.cache_node if known else sequence.cache_salt
        tokens = tuple(sequence.tokens[known * size : full * size])
        sequence.cache_node = blocks.register(tables[0].entries(known, full), parent, tokens, further)
        sequence.num_registered = full

    # --- the end ------------------------------------------------------------------------------------

    def withdraw(self, sequence: Sequence) -> None:
        """Take what a sequence that failed has registered out of the prefix index, so that others do not find it."""
        size, registered = self._blocks.block_size, sequence.num_registered
        found = sequence.cached_tokens // size
        if self._windowed:  # windows may have passed some of it
            known = PrefixMatch()
            self._blocks.index.match([*sequence.tokens[: registered * size], 0], sequence.cache_salt, known)
            self._blocks.withdraw(self._blocks.index.blocks_at(known.places[found:]))
        else:
            self._blocks.withdraw(sequence.held_blocks[found:registered])

    def preempt(self, sequence: Sequence) -> None:
        """Give back all blocks; the host may keep what they hold until the sequence returns."""
        swapped = self._swap_out(sequence)
        self.release(sequence)
        sequence.swapped = swapped

    def _swap_out(self, sequence: Sequence) -> Swapped | None:
        """Have the host take what a sequence has computed; None where it does not.

        Blocks that others share in all tables without a window, and that the index knows, stay in the pool.
        """
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
        """The blocks of computed tokens, table by table; without a window, from the entry in `starts` on."""
        size, computed = self._blocks.block_size, sequence.num_computed
        end, parts = self._blocks.blocks_for(computed), []
        for group, table, start in zip(self._groups, sequence.tables, starts, strict=True):
            first = start if group.window is None else group.first(computed, size)
            sinks = table.sinks or table.blocks[: group.sinks] if group.window is not None and first else []
            parts.append(sinks + table.entries(first, end))
        return parts

    def _restore(self, sequence: Sequence, swapped: Swapped, starts: list[int]) -> None:
        """Have blocks copied back from the host: to tables without a window from `starts` on, to others all of them."""
        assert self._host is not None
        wanted, host_blocks, at = list[int](), list[int](), 0
        of_host = self._parts(sequence, [swapped.first] * len(starts))
        for part, lacking in zip(of_host, self._parts(sequence, starts), strict=True):
            at += len(part)
            wanted += lacking
            host_blocks += swapped.host_blocks[at - len(lacking) : at]
        found = min((start for group, start in zip(self._groups, starts, strict=True) if not group.window), default=0)
        self._host.swap_in(host_blocks, wanted, swapped.computed - found * self._blocks.block_size)

    def _free_host(self, sequence: Sequence) -> None:
        if self._host is not None and sequence.swapped is not None:
            self._host.free(sequence.swapped)
            sequence.swapped = None

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, those on the host too; the sequence has nothing computed any more.

        Blocks of the last tokens are the first to be given up.
        """
        self._free_host(sequence)
        self._let_go(sequence)
        if sequence.rolling and self._blocks.checkpoints is not None:
            self._blocks.checkpoints.settle(sequence.rolling)
            sequence.rolling = 0
        tables = sequence.tables
        if len(tables) > 1:
            entries = [(table.first + at, block) for table in tables for at, block in enumerate(table.blocks)]
            entries += [entry for table in tables for entry in enumerate(table.sinks)]
            self._blocks.release([block for _, block in sorted(entries)])
        elif tables:
            self._blocks.release(tables[0].held)
        sequence.tables = []
        sequence.num_computed = sequence.num_registered = sequence.cache_node = sequence.room = 0
        sequence.in_executor = False
