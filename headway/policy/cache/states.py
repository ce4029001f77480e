"""Which states of recurrent layers are kept as checkpoints while sequences are computed (`checkpoints`)."""

from __future__ import annotations

from collections.abc import Mapping

from headway.policy.cache.checkpoints import Checkpoint, Checkpoints
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.step.plan import ScheduledSequence
from headway.policy.step.request import Sequence

# Most drafts of a step for a model with states: each takes a slot for the state before it, so that it can be refused.
MOST_DRAFTS = 16


def plan_keeps(blocks: KVBlocks, sequence: Sequence, nodes: list[int]) -> None:
    """Note behind which tokens of an admitted sequence its state, or what windows see, is to be kept.

    For a model with states, note also which one the sequence goes on from.
    """
    checkpoints, size, computed = blocks.checkpoints, blocks.block_size, sequence.num_computed
    leaves, ends, least = len(nodes) * size, (len(sequence.tokens) - 1) // size * size, 0
    if checkpoints is not None:
        if not blocks.enable_prefix_caching:
            return
        if computed:
            sequence.checkpoint = checkpoints.read(nodes[computed // size - 1])
        least = checkpoints.spacing
    worth_it = leaves - computed >= least
    sequence.keeps_at = tuple(at for at in sorted({leaves, ends}) if at > computed and (worth_it or at == ends))


class KeptStates:
    """The states of the sequences of a pool."""

    def __init__(self, blocks: KVBlocks, checkpoints: Checkpoints) -> None:
        self._blocks = blocks
        self._checkpoints = checkpoints

    def keep(self, sequence: Sequence, count: int) -> tuple[Checkpoint, ...]:
        """The states to keep while a prompt's next `count` tokens are computed, as far as there are slots."""
        start, promise = sequence.num_computed, self._checkpoints.promise
        wanted = [at for at in sequence.keeps_at if start < at <= start + count]
        return tuple([Checkpoint(at, slot) for at in wanted if (slot := promise()) is not None])

    def keep_decoded(self, scheduled: list[ScheduledSequence], sequences: Mapping[int, Sequence]) -> None:
        """Have the states kept of sequences that sample, now and then."""
        for item in scheduled:
            tokens = item.start + len(item.token_ids)
            if item.samples and not (item.keeps and item.keeps[-1].tokens == tokens):
                slot = self.roll(sequences[item.seq_id], tokens)
                if slot is not None:
                    item.keeps = (*item.keeps, Checkpoint(tokens, slot))

    def most_drafts(self, start: int) -> int:
        """How many drafts may follow the token at a position, so that no state which is to be kept is passed."""
        spacing = self._checkpoints.spacing
        return spacing - 1 - start % spacing if self._blocks.enable_prefix_caching else MOST_DRAFTS

    def roll(self, sequence: Sequence, tokens: int) -> int | None:
        """A slot for the state of a decoding sequence behind its first `tokens`; None where it is not to be kept."""
        if not self._blocks.enable_prefix_caching or tokens % self._checkpoints.spacing:
            return None
        return self._checkpoints.roll(sequence.rolling)

    def rolled(self, sequence: Sequence, slot: int) -> None:
        """The slot now holds the state behind all computed tokens of the sequence, the last of which ends a block."""
        node = sequence.cache_node
        sequence.rolling = node if self._checkpoints.fill(slot, node, rolls=True) else 0

    def settle(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """A step of the sequence has ended: give the states that were kept in it to their nodes."""
        blocks = self._blocks
        self._let_go(sequence)
        for kept in item.keeps:
            if kept.tokens > sequence.num_computed:  # behind a draft that was refused
                continue
            if kept.tokens == sequence.num_computed and kept.tokens not in sequence.keeps_at:
                self.rolled(sequence, kept.slot)
                continue
            known = PrefixMatch()
            blocks.match(sequence.tokens[: kept.tokens + 1], sequence.cache_salt, known)
            if len(known.nodes) * blocks.block_size == kept.tokens:
                self._checkpoints.fill(kept.slot, known.nodes[-1])

    def _let_go(self, sequence: Sequence) -> None:
        """Let go of the state that the sequence goes on from: it has been read, or never will be."""
        if sequence.checkpoint >= 0:
            self._checkpoints.let_go(sequence.checkpoint)
            sequence.checkpoint = -1

    def leave(self, sequence: Sequence) -> None:
        """A sequence gives back all that it has."""
        self._let_go(sequence)
        if sequence.rolling:
            self._checkpoints.settle(sequence.rolling)
            sequence.rolling = 0
