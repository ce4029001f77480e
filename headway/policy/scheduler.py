"""What the next step computes: a function of state, `schedule(now) -> StepPlan`, `complete(plan, ...)`.

Sequences that decode come first, one token each; prompts under way share what is left of the step's
budget (`step_budget`: tokens, and the time for which others wait) in order; then waiting sequences are
admitted. A waiting sequence is admitted when all its known
tokens have blocks, so a prompt under way is never out of memory. One that does not fit lets up to
`lookahead` others past it, but only `max_bypasses` times: after that nothing behind it is admitted
until it fits. When a decoding sequence finds no block, the last in order is preempted: its blocks are
freed and it computes its tokens again when it returns. The first in order is never a victim, and any
sequence alone fits in the pool, so every preempted sequence comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headway.policy.accounting import Accounting, ScheduledSequence, StepTimes, work_of
from headway.policy.kv_blocks import KVBlocks
from headway.policy.ledger import Phase
from headway.policy.request import FinishReason, Sequence, Status
from headway.policy.step_budget import StepBudget
from headway.policy.waiting import ORDERS, OrderedSequences


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Args:
        max_num_seqs: sequences that may run at once.
        max_num_batched_tokens: tokens of one step; at least max_num_seqs, so that decoding never waits.
        max_model_len: longest sequence; the pool must hold one of it.
        lookahead: waiting sequences examined behind the first that does not fit.
        max_bypasses: times a sequence that does not fit may be overtaken.
        max_prefill_stall_ms: for which a step's prompts may hold up others in it, where these do not take longer
            themselves; may be infinite. Whole prompts, without chunked prefill, are not bounded.

    Raises:
        ValueError: when the limits contradict each other; the message names both.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    lookahead: int = 16
    max_bypasses: int = 32
    max_prefill_stall_ms: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_prefill_stall_ms >= 0:
            raise ValueError(f"max_prefill_stall_ms is {self.max_prefill_stall_ms:g}; it must be 0 or more")
        if self.policy not in ORDERS:
            raise ValueError(f"scheduling policy {self.policy!r} is unknown; choose one of {', '.join(ORDERS)}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}); raise the first or lower the second"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a whole prompt must fit in a step: raise max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) to max_model_len ({self.max_model_len}) or lower the latter"
            )


@dataclass(slots=True)
class StepPlan:
    """One step: each scheduled sequence with its tokens, and the blocks to copy before it runs."""

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class Scheduler:
    """Owns the waiting and running sequences and the block pool.

    Raises:
        ValueError: when the pool cannot hold one sequence of max_model_len.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks) -> None:
        if blocks.blocks_for(config.max_model_len) > blocks.num_blocks:
            raise ValueError(
                f"one sequence of max_model_len ({config.max_model_len}) needs "
                f"{blocks.blocks_for(config.max_model_len)} KV blocks, the pool has {blocks.num_blocks}; "
                f"lower --max-model-len or raise --kv-cache-memory"
            )
        order = ORDERS[config.policy]
        self.config = config
        self.blocks = blocks
        self.accounting = Accounting()
        self.waiting = OrderedSequences(order)
        self.running = OrderedSequences(order)
        self.num_preemptions = 0
        self._watermark = max(1, blocks.num_blocks // 100)
        self._next_ordinal = 0

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running))

    # --- arrivals and departures --------------------------------------------------------------------

    def add(self, sequence: Sequence, now: int) -> None:
        """Queue a new sequence.

        Raises:
            ValueError: when its prompt leaves no room for a token within max_model_len.
        """
        if sequence.prompt_len >= self.config.max_model_len:
            raise ValueError(
                f"the prompt has {sequence.prompt_len} tokens; with a context of {self.config.max_model_len} "
                f"at most {self.config.max_model_len - 1} are possible"
            )
        sequence.max_len = min(sequence.max_len, self.config.max_model_len)
        sequence.ordinal = self._next_ordinal
        self._next_ordinal += 1
        self.accounting.begin_waiting(sequence, now)
        self.waiting.add(sequence)

    def abort(self, sequence: Sequence, now: int) -> None:
        """Drop a sequence in any state and free its blocks."""
        if sequence.status is not Status.FINISHED:
            self.finish(sequence, FinishReason.ABORT, now)

    def finish(self, sequence: Sequence, reason: FinishReason, now: int) -> None:
        self.accounting.finish(sequence, now)
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        self._free(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = sequence.num_registered = sequence.cache_node = 0

    # --- a step -------------------------------------------------------------------------------------

    def schedule(self, now: int) -> StepPlan:
        """Decide the next step. An empty plan means there is nothing to run."""
        plan = StepPlan()
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        others = len(self.running) > len(decoding)
        self._schedule_decodes(decoding, plan, now)
        budget = self._budget_beside(plan.scheduled)
        if others:
            self._schedule_prefills(plan, budget)
        if not len(self.waiting):
            reason = Phase.QUEUE_CAPACITY
        elif plan.preempted:
            reason = Phase.QUEUE_BLOCKS
        else:
            reason = self._admit(plan, budget, now)
        self.accounting.queue_stands_at(reason, now)
        return plan

    def _budget_beside(self, decodes: list[ScheduledSequence]) -> StepBudget:
        """What the step has left for prompts."""
        config = self.config
        stall_ms = config.max_prefill_stall_ms if config.enable_chunked_prefill else math.inf
        budget = StepBudget(
            config.max_num_batched_tokens - len(decodes),
            self.accounting.step_time,
            stall_ms * 1e6,
            self.blocks.block_size,
        )
        if decodes:
            budget.share_with(work_of(decodes))
        return budget

    def _schedule_decodes(self, decoding: list[Sequence], plan: StepPlan, now: int) -> None:
        """Give every decoding sequence its token, in order, preempting from the end where blocks run out."""
        for sequence in decoding:
            while sequence.status is Status.RUNNING and not self._make_room(sequence, 1, plan):
                self._preempt(self.running.last(), plan, now)
            if sequence.status is Status.RUNNING:
                plan.scheduled.append(ScheduledSequence(sequence, sequence.num_computed, 1, True, True))

    def _schedule_prefills(self, plan: StepPlan, budget: StepBudget) -> None:
        """Continue prompts under way; their blocks are already theirs."""
        for sequence in self.running:
            if budget.is_spent:
                break
            if not sequence.is_decoding:
                self._schedule_chunk(sequence, budget, plan)

    def _schedule_chunk(self, sequence: Sequence, budget: StepBudget, plan: StepPlan) -> None:
        start, wanted = sequence.num_computed, sequence.num_to_compute
        count = budget.fit(start, wanted)
        if count == 0 or (count < wanted and not self.config.enable_chunked_prefill):
            return
        if self._make_room(sequence, count, plan):
            plan.scheduled.append(ScheduledSequence(sequence, start, count, sequence.is_decoding, count == wanted))
            budget.spend(start, count)

    def _make_room(self, sequence: Sequence, count: int, plan: StepPlan) -> bool:
        """Give the sequence blocks of its own for its next `count` tokens; False when none are free."""
        blocks, table = self.blocks, sequence.block_table
        size, start = blocks.block_size, sequence.num_computed
        first = start // size
        shared = first < len(table) and blocks.references[table[first]] > 1
        missing = (start + count + size - 1) // size - len(table)
        if missing <= 0 and not shared:
            return True
        if max(0, missing) + shared > blocks.num_free:
            return False
        if shared:
            (copy,) = blocks.allocate(1)
            plan.copies.append((table[first], copy))
            blocks.release([table[first]])
            table[first] = copy
        if missing > 0:
            table.extend(blocks.allocate(missing))
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan, now: int) -> None:
        self.accounting.begin_preempted(victim, now)
        self.running.remove(victim)
        self._free(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        victim.times_bypassed = self.config.max_bypasses  # it has been served already: nobody overtakes it
        self.num_preemptions += 1
        self.waiting.add(victim)
        plan.preempted.append(victim)

    # --- admission ----------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: StepBudget, now: int) -> Phase:
        """Admit waiting sequences in order; returns why it stopped."""
        passed: list[Sequence] = []
        for sequence in self._candidates():
            if budget.is_spent or len(self.running) >= self.config.max_num_seqs:
                return Phase.QUEUE_CAPACITY
            if not self.config.enable_chunked_prefill and sequence.num_to_compute > budget.tokens:
                return Phase.QUEUE_CAPACITY
            if self._take_blocks(sequence):
                self._start(sequence, budget, plan, now)
                for overtaken in passed:
                    overtaken.times_bypassed += 1
            else:
                passed.append(sequence)
                if sequence.times_bypassed >= self.config.max_bypasses or len(passed) > self.config.lookahead:
                    return Phase.QUEUE_BLOCKS
            if any(s.times_bypassed >= self.config.max_bypasses for s in passed):
                return Phase.QUEUE_BLOCKS
        return Phase.QUEUE_BLOCKS if passed else Phase.QUEUE_POLICY

    def _candidates(self) -> list[Sequence]:
        """The head of the queue: as many as could be admitted or examined in one step."""
        seats = self.config.max_num_seqs - len(self.running)
        most = max(1, seats) + self.config.lookahead + 1
        candidates: list[Sequence] = []
        for sequence in self.waiting:
            if len(candidates) == most:
                break
            if not self._waits_for_parent(sequence):
                candidates.append(sequence)
        return candidates

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        """A further choice of a request waits until the first one has computed the prompt they share."""
        parent = sequence.parent
        if parent is None or parent.status is Status.FINISHED:
            return False
        return parent.num_computed < sequence.prompt_len - 1

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Find blocks for all known tokens: shared with the parent or a cached prefix where possible."""
        blocks = self.blocks
        prefix = self._known_prefix(sequence)
        fresh_copy = 1 if self._can_fork(sequence) else 0
        missing = blocks.blocks_for(len(sequence.tokens)) - len(prefix) + fresh_copy
        revived = sum(1 for block in prefix if blocks.references[block] == 0)
        spare = self._watermark if len(self.running) else 0
        if missing + revived + spare > blocks.num_free:
            return False
        blocks.share(prefix)
        sequence.block_table = prefix
        if self._can_fork(sequence):
            sequence.num_computed = sequence.prompt_len - 1
        else:
            sequence.num_computed = len(prefix) * blocks.block_size
            sequence.num_registered = len(prefix)
            sequence.cache_node = blocks.node_of(prefix[-1]) if prefix else 0
        if missing - fresh_copy > 0:
            sequence.block_table.extend(blocks.allocate(missing - fresh_copy))
        return True

    def _can_fork(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        return parent is not None and parent.status is Status.RUNNING and sequence.output_len == 0

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        if self._can_fork(sequence) and sequence.parent is not None:
            return sequence.parent.block_table[: self.blocks.blocks_for(sequence.prompt_len)]
        if sequence.params.prompt_logprobs is not None and sequence.output_len == 0:
            return []  # every prompt token's logits are wanted, so every one is computed
        return self.blocks.match(sequence.tokens, sequence.cache_salt)

    def _start(self, sequence: Sequence, budget: StepBudget, plan: StepPlan, now: int) -> None:
        if sequence.preemptions == 0:
            sequence.cached_tokens = sequence.num_computed
            self.blocks.prefix_stats.queries += sequence.prompt_len
            self.blocks.prefix_stats.hits += sequence.num_computed
        self.accounting.begin_running(sequence, now)
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.parent = None
        sequence.times_bypassed = 0
        self.running.add(sequence)
        self._schedule_chunk(sequence, budget, plan)

    # --- results ------------------------------------------------------------------------------------

    def complete(
        self,
        plan: StepPlan,
        sampled: Callable[[ScheduledSequence], int | None],
        times: StepTimes,
    ) -> list[ScheduledSequence]:
        """Apply a step's results: `sampled(item)` is the new token of an item that samples.

        A None in its place means that no token could be drawn (the logits were not numbers); the
        sequence then finishes with an error. Returns the items that have a new token or have finished.
        """
        ran = {id(item.sequence) for item in plan.scheduled}
        idle = [s for s in self.running if id(s) not in ran] if len(ran) < len(self.running) else []
        self.accounting.record_step(plan.scheduled, idle, times)
        changed = []
        size = self.blocks.block_size if self.blocks.enable_prefix_caching else 0
        for item in plan.scheduled:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            if size and (sequence.num_registered + 1) * size <= sequence.num_computed:
                self._register_full_blocks(sequence)
            if item.samples:
                changed.append(item)
                self._append(sequence, sampled(item), times.sampled_ns)
        return changed

    def _append(self, sequence: Sequence, token: int | None, now: int) -> None:
        if token is None:
            self.finish(sequence, FinishReason.ERROR, now)
            return
        sequence.tokens.append(token)
        reason = finish_reason(sequence, token)
        if reason is not None:
            self.finish(sequence, reason, now)
        elif sequence.clock_marks is None:
            self.accounting.join_decode_clock(sequence)

    def _register_full_blocks(self, sequence: Sequence) -> None:
        size = self.blocks.block_size
        while (sequence.num_registered + 1) * size <= sequence.num_computed:
            at = sequence.num_registered
            parent: int | str = sequence.cache_node if at else sequence.cache_salt
            content = tuple(sequence.tokens[at * size : (at + 1) * size])
            sequence.cache_node = self.blocks.register(sequence.block_table[at], parent, content)
            sequence.num_registered += 1

    def check(self) -> None:
        """Verify that no block is leaked or held twice.

        Raises:
            RuntimeError: naming the block.
        """
        for _ in self.check_by_parts():
            pass

    def check_by_parts(self) -> Iterator[None]:
        """check() with pauses, as KVBlocks.check_by_parts()."""
        yield from self.blocks.check_by_parts(sequence.block_table for sequence in self.running)
        if any(sequence.block_table for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")


def finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Why a sequence ends with `token` as its newest, or None when it goes on."""
    if token in sequence.stop_ids and sequence.output_len > sequence.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.tokens) >= sequence.max_len else None
