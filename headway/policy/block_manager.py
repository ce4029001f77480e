"""The block tables of sequences: which blocks of the pool hold their tokens, from admission to the end.

A block that another sequence holds too is copied before it is written. A block is registered in the prefix index once
it is full and all its tokens are final.
"""

from __future__ import annotations

from headway.policy.checkpoints import Checkpoint
from headway.policy.kv_blocks import KVBlocks
from headway.policy.plan import ScheduledSequence, StepPlan, TableChange
from headway.policy.prefix_index import PrefixMatch
from headway.policy.request import Sequence, Status
from headway.policy.swap import HostPool, Swapped


class BlockManager:
    """Takes blocks of a pool for sequences and gives them back; keeps their `block_table`s.

    Args:
        host: where blocks of preempted sequences may be swapped out to.
    """

    def __init__(self, blocks: KVBlocks, host: HostPool | None = None) -> None:
        self._blocks = blocks
        self._host = host

    # --- admission ----------------------------------------------------------------------------------

    def wanted(self, sequence: Sequence) -> int:
        """Free blocks that its admission takes: those of all known tokens, less the shared ones that are in use."""
        prefix, references = self._known_prefix(sequence), self._blocks.references
        in_use = sum(1 for block in prefix if references[block])
        return self._blocks.blocks_for(len(sequence.tokens)) - in_use + self._can_fork(sequence)

    def known_tokens(self, sequence: Sequence) -> int:
        """Of a waiting sequence: those that need not be computed."""
        found = len(self._known_prefix(sequence))
        if sequence.swapped is not None and sequence.swapped.first <= found:
            return max(found * self._blocks.block_size, sequence.swapped.computed)
        return min(found * self._blocks.block_size, len(sequence.tokens) - 1)

    def admit(self, sequence: Sequence, spare: int) -> bool:
        """Give a waiting sequence blocks for all known tokens, shared with its parent or a cached prefix where it can.

        Args:
            spare: blocks that must be left free.

        Returns:
            False when too few blocks are free; nothing is taken then.
        """
        blocks, owner = self._blocks, sequence.service.name
        if self.wanted(sequence) + spare > blocks.num_free:
            return False
        table = list(self._known_prefix(sequence))
        blocks.share(table, owner)
        if sequence.parent is not None and self._can_fork(sequence):
            sequence.num_computed = sequence.prompt_len - 1
            sequence.parent.room = 0
        else:
            sequence.num_computed = len(table) * blocks.block_size
            self._plan_checkpoints(sequence)
            sequence.num_registered = len(table)
            sequence.cache_node = blocks.node_of(table[-1]) if table else 0
        if sequence.preemptions == 0 and sequence.output_len == 0:
            sequence.cached_tokens = sequence.num_computed
            blocks.prefix_stats.note(owner, sequence.prompt_len, sequence.num_computed)
            if sequence.num_registered:
                blocks.cached.found(table)
        table.extend(blocks.allocate(blocks.blocks_for(len(sequence.tokens)) - len(table), owner))
        sequence.block_table = table
        sequence.parent = sequence.prefix_match = None
        self._swap_in(sequence)
        return True

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        if sequence.parent is not None and self._can_fork(sequence):
            return sequence.parent.block_table[: self._blocks.blocks_for(sequence.prompt_len)]
        if sequence.needs_every_token:
            return []  # every prompt token is computed
        if sequence.prefix_match is None:
            sequence.prefix_match = PrefixMatch()
        known = self._blocks.match(sequence.tokens, sequence.cache_salt, sequence.prefix_match)
        if self._blocks.checkpoints is not None:
            return known[: self._blocks.checkpoints.known(sequence.prefix_match.nodes)]
        return known

    def _can_fork(self, sequence: Sequence) -> bool:
        """A further choice of a request takes over the prompt's blocks of the first one; their states are not kept."""
        parent = sequence.parent
        runs = parent is not None and parent.status is Status.RUNNING
        return runs and sequence.output_len == 0 and self._blocks.checkpoints is None

    # --- checkpoints --------------------------------------------------------------------------------

    def _plan_checkpoints(self, sequence: Sequence) -> None:
        """Note which state an admitted sequence goes on from, and behind which tokens its own is to be kept."""
        checkpoints, size, found = self._blocks.checkpoints, self._blocks.block_size, sequence.prefix_match
        if checkpoints is None or not self._blocks.enable_prefix_caching:
            return
        computed, nodes = sequence.num_computed, found.nodes if found is not None else []
        if computed:
            sequence.checkpoint = checkpoints.read(nodes[computed // size - 1])
        leaves, ends = len(nodes) * size, (len(sequence.tokens) - 1) // size * size
        worth_it = leaves - computed >= checkpoints.spacing
        sequence.keeps_at = tuple(at for at in sorted({leaves, ends}) if at > computed and (worth_it or at == ends))

    def keep_states(self, sequence: Sequence, count: int) -> tuple[Checkpoint, ...]:
        """The states that are to be kept of a prompt's next `count` tokens, as far as there are slots."""
        start, checkpoints = sequence.num_computed, self._blocks.checkpoints
        if checkpoints is None:
            return ()
        wanted = [at for at in sequence.keeps_at if start < at <= start + count]
        return tuple([Checkpoint(at, slot) for at in wanted if (slot := checkpoints.promise()) is not None])

    def roll(self, sequence: Sequence, tokens: int) -> int | None:
        """A slot for the state behind so many tokens of a sequence that decodes then, if it is to be kept."""
        checkpoints = self._blocks.checkpoints
        if checkpoints is None or not self._blocks.enable_prefix_caching or tokens % checkpoints.spacing:
            return None
        return checkpoints.roll(sequence.rolling)

    def rolled(self, sequence: Sequence, slot: int) -> None:
        """The slot has the state behind all computed tokens, which end a block."""
        checkpoints, node = self._blocks.checkpoints, sequence.cache_node
        if checkpoints is not None:
            sequence.rolling = node if checkpoints.fill(slot, node, rolls=True) else 0

    def settle(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """A step of the sequence has ended: the states that were kept are those of nodes."""
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
        """The sequence has read the state that it goes on from, or never will."""
        if self._blocks.checkpoints is not None and sequence.checkpoint >= 0:
            self._blocks.checkpoints.let_go(sequence.checkpoint)
            sequence.checkpoint = -1

    # --- steps --------------------------------------------------------------------------------------

    def growth(self, sequence: Sequence) -> int:
        """Blocks that the next token of a decoding sequence takes."""
        table, at = sequence.block_table, sequence.num_computed // self._blocks.block_size
        return int(at >= len(table) or self._blocks.references[table[at]] > 1)

    def extend(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Give the sequence blocks of its own for its next `count` tokens, and tell the plan.

        Returns:
            False when too few blocks are free; nothing changes then.
        """
        blocks, table = self._blocks, sequence.block_table
        size, start = blocks.block_size, sequence.num_computed
        first = start // size
        shared = first < len(table) and blocks.references[table[first]] > 1
        missing = (start + count + size - 1) // size - len(table)
        if missing <= 0 and not shared:
            sequence.room = len(table) * size
            return True
        if max(0, missing) + shared > blocks.num_free:
            return False
        if shared:
            (copy,) = blocks.allocate(1, sequence.service.name)
            plan.copies.append((table[first], copy))
            blocks.release([table[first]])
            table[first] = copy
        changed = first if shared else len(table)
        if missing > 0:
            table.extend(blocks.allocate(missing, sequence.service.name, table[-1]))
        sequence.room = len(table) * size
        if sequence.in_executor:
            plan.tables.append(TableChange(sequence.seq_id, changed, table[changed:]))
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks after the newest token's: they were for drafts."""
        kept = self._blocks.blocks_for(len(sequence.tokens))
        self._blocks.release(sequence.block_table[kept:])
        del sequence.block_table[kept:]
        sequence.room = 0

    def register_full(self, sequence: Sequence) -> None:
        """Enter the blocks that have become full in the prefix index."""
        size, known, table = self._blocks.block_size, sequence.num_registered, sequence.block_table
        full = sequence.num_computed // size
        if full > known:
            parent: int | str = sequence.cache_node if known else sequence.cache_salt
            tokens = tuple(sequence.tokens[known * size : full * size])
            sequence.cache_node = self._blocks.register(table[known:full], parent, tokens)
            sequence.num_registered = full

    # --- the end ------------------------------------------------------------------------------------

    def withdraw(self, sequence: Sequence) -> None:
        """Take what a sequence that failed has registered out of the prefix index, so that others do not find it."""
        found = sequence.cached_tokens // self._blocks.block_size
        self._blocks.withdraw(sequence.block_table[found : sequence.num_registered])

    def preempt(self, sequence: Sequence) -> None:
        """As release(), but the host may keep what the blocks hold until the sequence returns."""
        swapped = self._swap_out(sequence)
        self.release(sequence)
        sequence.swapped = swapped

    def _swap_out(self, sequence: Sequence) -> Swapped | None:
        """What others share with a sequence and the prefix index knows is not swapped out."""
        blocks, table, computed = self._blocks, sequence.block_table, sequence.num_computed
        if self._host is None or not computed or sequence.needs_every_token:
            return None
        first = 0
        while first < sequence.num_registered and blocks.references[table[first]] > 1:
            first += 1
        held = table[first : blocks.blocks_for(computed)]
        return self._host.swap_out(held, first, first * blocks.block_size, computed) if held else None

    def _swap_in(self, sequence: Sequence) -> None:
        """Have what the prefix index does not know of a sequence copied back, if the host has all of it."""
        swapped, sequence.swapped = sequence.swapped, None
        if self._host is None or swapped is None:
            return
        blocks, found = self._blocks, sequence.num_computed
        at = found // blocks.block_size
        if swapped.first <= at and found < swapped.computed:
            table = sequence.block_table[at : blocks.blocks_for(swapped.computed)]
            self._host.swap_in(swapped.host_blocks[at - swapped.first :], table, swapped.computed - found)
            sequence.num_computed = swapped.computed
        self._host.free(swapped)

    def _free_host(self, sequence: Sequence) -> None:
        if self._host is not None and sequence.swapped is not None:
            self._host.free(sequence.swapped)
            sequence.swapped = None

    def release(self, sequence: Sequence) -> None:
        """Give back all blocks, those on the host too; the sequence has nothing computed any more."""
        self._free_host(sequence)
        self._let_go(sequence)
        if sequence.rolling and self._blocks.checkpoints is not None:
            self._blocks.checkpoints.settle(sequence.rolling)
            sequence.rolling = 0
        self._blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_registered = sequence.cache_node = sequence.room = 0
        sequence.in_executor = False
