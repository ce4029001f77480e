"""What the policy `slo` adds to a scheduler: what it knows of the sequences that come, run and go.

Nothing starves. A decoding sequence that was left out of steps for MOST_LEFT_OUT_NS gets its next token before all
others that are left out, one such sequence in each step. A prompt behind all promises has starved when it has been
there for the `starvation_s` of its class. The starved are served to their end one at a time, in the order in which that
time was over: with a block of the prompt or a token in every step, and with the first seat and the first blocks that
are given back.
One that has starved may take more of a step's prompt tokens than a block: all where no other prompt is promised, else
STARVED_SHARE of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from headway.policy.block_manager import BlockManager
from headway.policy.fairness import FairSequences
from headway.policy.kv_blocks import KVBlocks
from headway.policy.order import BEHIND_ALL, OrderedSequences, Orders
from headway.policy.output_lengths import OutputLengths
from headway.policy.prefix_batching import PrefixLeaders
from headway.policy.promises import LOOKED_AT, STARVED_SHARE, Outlook, Promises, Yield, is_promised
from headway.policy.request import NEVER, FinishReason, Sequence, Status
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.shares import Shares
from headway.policy.step_budget import StepBudget
from headway.policy.step_time import StepTimeModel, StepWork
from headway.policy.window import Window

WINDOW_LOOKS_AT = 16  # waiting sequences; with more of them an idle engine begins at once


class SloPolicy:
    """Is told of each arrival, start and end, and asked before each step.

    Args:
        orders: of the policy.
        blocks: the pool that `manager` takes them from.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        orders: Orders,
        step_time: StepTimeModel,
        manager: BlockManager,
        blocks: KVBlocks,
    ) -> None:
        self.promises = Promises(step_time, config.max_num_batched_tokens, manager.known_tokens)
        self.window = Window(step_time)
        sizes = config.kept_free(blocks.num_blocks), blocks.most_blocks(config.max_model_len)
        self.shares = Shares(config.classes, config.max_num_seqs, blocks, *sizes)
        self._wanted = manager.wanted
        self._config = config
        self._step_time = step_time
        self._blocks = blocks
        self._lengths = OutputLengths()
        self._leaders = PrefixLeaders(blocks.block_size, orders.admission, blocks.checkpoints is not None)
        self._orders = orders
        self._starved: Sequence | None = None
        self._open_until_ns = NEVER  # without a promise only those may start whose first tokens are planned by then

    # --- who comes and goes -------------------------------------------------------------------------

    def arrives(self, sequence: Sequence, now: int) -> None:
        sequence.expected_len = sequence.prompt_len + self._lengths.expected(sequence)
        self.shares.waiting[sequence.service.name] += 1
        if sequence.index == 0:
            self.window.arrived(now)

    def begins(self, sequence: Sequence) -> None:
        """A sequence was admitted."""
        self.promises.begins(sequence)
        self._leaders.begins(sequence)
        self.shares.waiting[sequence.service.name] -= 1
        self.shares.running[sequence.service.name] += 1

    def leaves(self, sequence: Sequence, reason: FinishReason | None = None) -> None:
        """A sequence is preempted, or ends for a reason. Its status has not changed yet."""
        name = sequence.service.name
        self._leaders.ends(sequence)
        if sequence.status is Status.RUNNING:
            self.shares.running[name] -= 1
            self.shares.waiting[name] += reason is None
        else:
            self.shares.waiting[name] -= 1
            if not self.shares.waiting.total():
                self.window.close()
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.pooling is None:
            self._lengths.ended(sequence)

    # --- before a step ------------------------------------------------------------------------------

    def starved(self, prompts: list[Sequence], waiting: OrderedSequences, now: int) -> Sequence | None:
        """The sequence that goes first from now on: of those behind all promises the one that has starved first.

        Args:
            prompts: of those who run.
        """
        if self._starved is not None and self._starved.status is not Status.FINISHED:
            return None
        self._starved, first_ns = None, now
        behind = (sequence for sequence in prompts if sequence.is_behind)
        for sequence in chain(behind, first_of_ranks(waiting)):
            starved_ns = sequence.arrival_ns + int(sequence.service.starvation_s * 1e9)
            if starved_ns <= first_ns:
                self._starved, first_ns = sequence, starved_ns - 1
        return self._starved

    def past(self, head: list[Sequence], waiting: OrderedSequences) -> list[Sequence]:
        """Those that may pass the head of the queue: behind all promises, the first of each class with a share."""
        if not self.shares.classes:
            return []
        firsts = (
            waiting.first_like(sequence)
            for sequence in first_of_ranks(waiting)
            if sequence.service.name in self.shares.classes
        )
        return [sequence for sequence in firsts if sequence not in head]

    def may_start(self, sequence: Sequence, num_running: int) -> bool:
        """Whether a sequence may be admitted beside this many, if there are blocks."""
        if num_running + self.shares.seats_kept_from(sequence.service.name) >= self._config.max_num_seqs:
            return False
        name = sequence.service.name
        if name in self.shares.most and not self._fits_in_bound(sequence):
            return False
        if sequence.has_starved:
            return True
        is_held_up = sequence.planned_ns > self._open_until_ns and not is_promised(sequence)
        if is_held_up and not self.shares.has_seat_left(sequence.service.name):
            return False
        if sequence.output_len:
            return True
        return self.promises.has_room_for(sequence) and not self._follows(sequence)

    def _fits_in_bound(self, sequence: Sequence) -> bool:
        """Whether its class may use the blocks, which it leaves to the one that has starved if that is of the class."""
        name, first = sequence.service.name, self._starved
        if first is not None and first.status is Status.WAITING and first.service.name == name:
            return self.shares.may_use(name, self._wanted(first)) and self.shares.may_use(name, self._wanted(sequence))
        return self.shares.may_use(name, self._wanted(sequence))

    def _follows(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for another prompt that begins alike."""
        return self._blocks.enable_prefix_caching and self._leaders.is_worth_waiting_for(sequence)

    def window_until(self, waiting: OrderedSequences, now: int) -> int:
        """When an engine in which nothing runs should begin with those who wait; 0 for now."""
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
        in_order = waiting.before(BEHIND_ALL, LOOKED_AT)
        if prompts:
            order = self._orders.admission
            in_order += [(order(sequence), sequence) for sequence in prompts if not sequence.is_behind]
            in_order.sort()
        return self.promises.yielding([sequence for _, sequence in in_order], decoding, now)

    def owed(self, prompts: list[Sequence], fair: FairSequences) -> list[Sequence]:
        """Those that have yielded and are owed to their tenants, of those who run and of the first who wait."""
        running = [sequence for sequence in prompts if sequence.has_yielded and fair.is_owed(sequence)]
        return running + [sequence for sequence in fair.owed() if sequence.has_yielded]

    def outlook(self, decoding: list[Sequence], prompts: list[Sequence], urgent: Sequence | None, now: int) -> Outlook:
        """The limits that promises set to the step."""
        outlook = self.promises.outlook(decoding, prompts, urgent, now)
        self._open_until_ns = 0 if outlook.left_out else NEVER
        if urgent is not None:
            self._open_until_ns = urgent.planned_ns
        return outlook

    def most_tokens(self, sequence: Sequence, budget: StepBudget) -> int:
        """Of its prompt in a step that has this left."""
        if not self._config.enable_chunked_prefill:
            return sequence.num_to_compute
        most = min(sequence.num_to_compute, self.shares.tokens_for(sequence.service.name, budget))
        if sequence.has_starved and self.promises.are_prompts_promised:
            share = int(STARVED_SHARE * budget.fit(0, self._config.max_num_batched_tokens))
            most = min(most, max(self._blocks.block_size, share))
        return most

    def slack_beside(self, decodes: StepWork, outlook: Outlook) -> float:
        """Nanoseconds that a step with these decodes may take; one that has starved gets a block of tokens in it."""
        if not self._config.enable_chunked_prefill:
            return math.inf
        first = self._starved
        if first is None or first.status is Status.FINISHED or first.is_decoding:
            return outlook.slack_ns
        if first.status is Status.WAITING and self.shares.running.total() >= self._config.max_num_seqs:
            return outlook.slack_ns
        block = self._step_time.prefill_ns(self._blocks.block_size, first.num_computed)
        return max(outlook.slack_ns, self._step_time.predict_ns(decodes) + block)


def first_of_ranks(waiting: OrderedSequences) -> Iterator[Sequence]:
    """The first sequence of each rank that waits behind all promises."""
    rank = 0
    while (first := waiting.first_from((*BEHIND_ALL, rank))) is not None:
        yield first
        rank = first.rank + 1
