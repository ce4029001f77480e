"""Has prompts that begin alike computed one after the other, so that the second finds what the first has computed."""

from __future__ import annotations

from headway.policy.step.order import Order
from headway.policy.step.request import Sequence, Status

_COMPARED_AT_ONCE = 512


class PrefixLeaders:
    """The leaders: for each first block of tokens, a prompt under way that begins with it.

    Args:
        keep_states: prefixes are found only by a checkpoint behind them, so that the leader is asked to keep one.
    """

    def __init__(self, block_size: int, order: Order, keep_states: bool = False) -> None:
        self._block_size = block_size
        self._keep_states = keep_states
        self._order = order
        self._leaders: dict[tuple[str, tuple[int, ...]], Sequence] = {}
        self._common: dict[int, tuple[int, int]] = {}  # by seq_id: the leader's, and the tokens shared with it

    def begins(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        self._common.pop(sequence.seq_id, None)
        if len(sequence.tokens) > self._block_size:
            self._leaders[self._key(sequence)] = sequence

    def ends(self, sequence: Sequence) -> None:
        """A sequence is no longer in the batch, or in the queue."""
        self._common.pop(sequence.seq_id, None)
        key = self._key(sequence)
        if self._leaders.get(key) is sequence:
            del self._leaders[key]

    def is_worth_waiting_for(self, sequence: Sequence) -> bool:
        """Whether another prompt that comes before this one is about to compute what both begin with."""
        leader = self._leaders.get(self._key(sequence))
        if leader is None or leader.status is not Status.RUNNING or leader.num_to_compute <= 1:
            return False
        if sequence.needs_every_token or self._order(sequence) < self._order(leader):
            return False
        shared = min(self._shared(leader, sequence), len(sequence.tokens) - 1) // self._block_size * self._block_size
        if not self._keep_states:
            return leader.num_computed + self._block_size <= shared
        if leader.num_computed < shared and shared not in leader.keeps_at:
            leader.keeps_at = tuple(sorted((shared, *leader.keeps_at)))
        return leader.num_computed < shared

    def _key(self, sequence: Sequence) -> tuple[str, tuple[int, ...]]:
        return sequence.cache_salt, tuple(sequence.tokens[: self._block_size])

    def _shared(self, leader: Sequence, follower: Sequence) -> int:
        """How many tokens both begin with."""
        number, shared = self._common.get(follower.seq_id, (-1, 0))
        if number != leader.seq_id:
            shared = _common_length(leader.tokens, follower.tokens)
            self._common[follower.seq_id] = leader.seq_id, shared
        return shared


def _common_length(left: list[int], right: list[int]) -> int:
    most, at = min(len(left), len(right)), 0
    while at < most and left[at : at + _COMPARED_AT_ONCE] == right[at : at + _COMPARED_AT_ONCE]:
        at += _COMPARED_AT_ONCE
    while at < most and left[at] == right[at]:
        at += 1
    return min(at, most)
