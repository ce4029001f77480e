"""What the policy `slo` adds to a scheduler: all that it has to know of those who come, run and go."""

from __future__ import annotations

import heapq
from itertools import islice, takewhile

from headway.policy.block_manager import BlockManager
from headway.policy.order import OrderedSequences, Orders
from headway.policy.output_lengths import OutputLengths
from headway.policy.prefix_batching import PrefixLeaders
from headway.policy.promises import LOOKED_AT, Outlook, Promises, Yield, is_promised
from headway.policy.request import FinishReason, Sequence, Status
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.shares import Shares
from headway.policy.step_time import StepTime
from headway.policy.window import Window

WINDOW_LOOKS_AT = 16  # waiting sequences; with more of them an idle engine begins at once


class SloPolicy:
    """Told of each arrival, start and end; asked before each step.

    Args:
        orders: of the policy.
        manager: of the block pool, of so many blocks of block_size tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        orders: Orders,
        step_time: StepTime,
        manager: BlockManager,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.promises = Promises(step_time, config.max_num_batched_tokens, manager.known_tokens)
        self.window = Window(step_time)
        self.shares = Shares(config.classes, config.max_num_seqs, config.max_num_batched_tokens, num_blocks)
        self._seats = config.max_num_seqs
        self._lengths = OutputLengths()
        self._leaders = PrefixLeaders(block_size, orders.admission)
        self._orders = orders
        self._starved: Sequence | None = None
        self._is_crowded = False  # what has no promise would have to be left out

    # --- who comes and goes -------------------------------------------------------------------------

    def arrives(self, sequence: Sequence, now: int) -> None:
        sequence.expected_len = sequence.prompt_len + self._lengths.expected(sequence)
        self.shares.waiting[sequence.service.name] += 1
        if sequence.index == 0:
            self.window.arrived(now)

    def begins(self, sequence: Sequence) -> None:
        """It was admitted."""
        self.promises.begins(sequence)
        self._leaders.begins(sequence)
        self.shares.waiting[sequence.service.name] -= 1
        self.shares.running[sequence.service.name] += 1

    def leaves(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """It is preempted, or ends for a reason; its status is still the one before."""
        name = sequence.service.name
        if sequence.status is Status.RUNNING:
            self._leaders.ends(sequence)
            self.shares.running[name] -= 1
            self.shares.waiting[name] += reason is None
        else:
            self.shares.waiting[name] -= 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._lengths.ended(sequence)

    # --- before a step ------------------------------------------------------------------------------

    def starved(self, waiting: OrderedSequences, now: int) -> Sequence | None:
        """Who has waited longest among those behind all promises, if it is too long.

        One at a time goes first, and is served to its end.
        """
        if self._starved is not None and self._starved.status is not Status.FINISHED:
            return None
        self._starved, rank = None, 0
        while (first := waiting.first_from((1, rank))) is not None:
            if now - first.arrival_ns >= first.service.starvation_s * 1e9:
                self._starved = first
                return first
            rank = first.rank + 1
        return None

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        """Whether it may be admitted now, if there are blocks."""
        if num_running + self.shares.seats_kept_from(sequence.service.name) >= self._seats:
            return False
        if sequence.has_starved:
            return True
        if self._is_crowded and not is_promised(sequence):
            return False
        if sequence.output_len:
            return True
        return self.promises.has_room_for(sequence) and not self._leaders.is_worth_waiting_for(sequence)

    def window_until(self, waiting: OrderedSequences, now: int) -> int:
        """When an engine in which nothing runs is to begin with those who wait; 0 for now."""
        if 0 < len(waiting) <= WINDOW_LOOKS_AT:
            there = list(waiting)
            if not any(sequence.preemptions or sequence.output_len for sequence in there):
                until = self.window.until(there, self.promises.prefill_ns(there[0]), now)
                if until > now:
                    return until
        return 0

    def yielding(
        self, decoding: list[Sequence], prompts: list[Sequence], waiting: OrderedSequences, now: int
    ) -> tuple[list[Yield], Sequence | None]:
        """Which prompts yield, and which one is urgent, as Promises.yielding(); of the queue its head is looked at.

        Args:
            decoding, prompts: those who run, in order.
        """
        self.window.close()
        begun = (sequence for sequence in prompts if not sequence.is_behind)
        queue = islice(takewhile(lambda sequence: not sequence.is_behind, waiting), LOOKED_AT)
        in_order = heapq.merge(begun, queue, key=self._orders.admission)
        return self.promises.yielding(in_order, decoding, now)

    def outlook(self, decoding: list[Sequence], prompts: list[Sequence], urgent: Sequence | None, now: int) -> Outlook:
        """What the step has to heed."""
        outlook = self.promises.outlook(decoding, prompts, urgent, now)
        self._is_crowded = bool(outlook.left_out) or urgent is not None
        return outlook
