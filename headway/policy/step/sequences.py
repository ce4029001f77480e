"""The sequences of an engine: which wait, which run, and how they come and go. Also a step while it is decided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headway.policy.cache.adapters import AdapterSlots
from headway.policy.cache.block_manager import BlockManager
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.prefix_index import PrefixMatch
from headway.policy.objectives.fairness import FairSequences
from headway.policy.step.accounting import Accounting
from headway.policy.step.decisions import Decision
from headway.policy.step.ledger import Ledger
from headway.policy.step.order import OrderedSequences, Orders
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Sequence, Status
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.waiting import Unserved


class Listener(Protocol):
    """The scheduling policy as sequences see it: it has their orders, and is told who comes and goes."""

    orders: Orders

    def arrives(self, sequence: Sequence, now: int) -> None: ...

    def starts(self, sequence: Sequence) -> None: ...

    def leaves(self, sequence: Sequence, reason: FinishReason | None) -> None: ...

    def set_config(self, config: SchedulerConfig) -> None: ...

    def past(self, head: list[Sequence], waiting: OrderedSequences) -> list[Sequence]: ...


class Sequences(Mapping[int, Sequence]):
    """All sequences, by the number that each gets here and that names it in plans.

    Args:
        policy: is told who comes and goes.

    Attributes:
        waiting: sequences that wait; a `FairSequences` where tenants have weights.
        running: sequences that have blocks.
        unserved: sequences that have never run and may not wait for ever.
        num_preemptions: how many preemptions there were since the start.
        seats: how many of max_num_seqs those who run have.
        slots: those of adapters; None without any.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Listener,
        blocks: KVBlocks,
        block_manager: BlockManager,
        accounting: Accounting,
    ) -> None:
        self.block_manager = block_manager
        self.blocks = blocks
        self.by_id: dict[int, Sequence] = {}
        self.running = OrderedSequences(policy.orders.running)
        self.num_preemptions = self.seats = 0
        self._policy = policy
        self._config = config
        self._accounting = accounting
        self._watermark = config.kept_free(blocks.num_blocks)
        self.unserved = Unserved()
        self.slots = AdapterSlots(config.max_loras, config.max_bypasses) if config.max_loras else None
        self._next_seq_id = 0
        self.waiting = self._queue()

    def __getitem__(self, seq_id: int) -> Sequence:
        return self.by_id[seq_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_id)

    def __len__(self) -> int:
        return len(self.by_id)

    def _queue(self) -> OrderedSequences:
        orders, weights = self._policy.orders, self._config.weights
        if weights:
            return FairSequences(orders, weights, self._config.max_model_len)
        return OrderedSequences(orders.admission)

    def set_config(self, config: SchedulerConfig) -> None:
        """Take other classes, and weights of tenants, who take turns where there are any."""
        self._config, weights = config, config.weights
        self._policy.set_config(config)
        if isinstance(self.waiting, FairSequences) and weights:
            self.waiting.weights = weights
        elif isinstance(self.waiting, FairSequences) or weights:
            waiting, self.waiting = list(self.waiting), self._queue()
            for sequence in waiting:
                self.waiting.add(sequence)

    # --- who may come next --------------------------------------------------------------------------

    def candidates(self, most: int | None = None) -> list[Sequence]:
        """The head of the queue: `most` of it, or as many as could be admitted or examined in one step."""
        if most is None:
            most = max(1, self._config.max_num_seqs - len(self.running)) + self._config.lookahead + 1
        head: list[Sequence] = []
        for sequence in self.waiting:
            if sequence.slot_wanted_since >= 0:
                continue
            if sequence.parent is None or not _waits_for_parent(sequence.parent, sequence):
                head.append(sequence)
                if len(head) == most:
                    break
        if past := self._policy.past(head, self.waiting):
            past = [each for each in past if each.slot_wanted_since < 0]
            head += [each for each in past if each.parent is None or not _waits_for_parent(each.parent, each)]
        return head

    @property
    def spare(self) -> int:
        """How many blocks admission leaves to those who run."""
        return self._watermark if len(self.running) else 0

    # --- arrivals and departures --------------------------------------------------------------------

    def add(self, sequence: Sequence, now: int) -> None:
        """Queue a new sequence that fits the context."""
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.by_id[sequence.seq_id] = sequence
        self._policy.arrives(sequence, now)
        self._accounting.begin_waiting(sequence, now)
        self.waiting.add(sequence)
        most_s = min(self._config.max_queue_time, sequence.service.queue_timeout_s)
        if most_s < math.inf and sequence.output_len == 0:
            self.unserved.add(sequence, most_s)

    def start(self, sequence: Sequence, now: int) -> None:
        """Let a waiting sequence run, which has got its blocks."""
        self._accounting.leave(sequence, now)
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.times_bypassed = 0
        if self.unserved:
            self.unserved.discard(sequence)
        self.running.add(sequence)
        self.seats += sequence.seats
        if sequence.adapter and self.slots is not None:
            self.slots.enter(sequence)
        self._policy.starts(sequence)
        self.waiting.admitted(sequence, self.running)

    def fork(self, source: Sequence, index: int, now: int) -> Sequence:
        """Let a further sequence of a request run, beside one that runs and lends it a seat. It has no blocks yet."""
        fork = replace(
            source,
            index=index,
            ledger=Ledger(now),
            seats=1,
            seq_id=self._next_seq_id,
            tables=[],
            room=0,
            in_executor=False,
            clock_marks=None,
        )
        self._next_seq_id += 1
        self.by_id[fork.seq_id] = fork
        self._policy.arrives(fork, now)
        if fork.adapter and self.slots is not None:
            self.slots.enter(fork)
        self._policy.starts(fork)
        self.running.add(fork)
        return fork

    def preempt(self, victim: Sequence, plan: StepPlan, now: int) -> None:
        """Take the blocks of a running sequence, which waits again, and have the plan say so."""
        self._accounting.begin_preempted(victim, now)
        self._policy.leaves(victim, None)
        self.running.remove(victim)
        self.seats -= victim.seats
        if victim.adapter and self.slots is not None:
            self.slots.leave(victim)
        self.block_manager.preempt(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        victim.times_bypassed = self._config.max_bypasses  # it has been served already: nobody overtakes it
        self.num_preemptions += 1
        self.waiting.add(victim)
        plan.preempted.append(victim.seq_id)

    def finish(self, sequence: Sequence, reason: FinishReason, now: int) -> None:
        """End a sequence in any state and free its blocks."""
        self._accounting.leave(sequence, now)
        if reason is FinishReason.ERROR:
            self.block_manager.withdraw(sequence)
        self._policy.leaves(sequence, reason)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.seats -= sequence.seats
            if sequence.adapter and self.slots is not None:
                self.slots.leave(sequence)
        else:
            self.waiting.remove(sequence)
        del self.by_id[sequence.seq_id]
        if self.unserved:
            self.unserved.discard(sequence)
        if sequence.pins_prompt:
            self._pin_prompt(sequence)
        if sequence.hands_over and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.block_manager.hand_over(sequence)
        self.block_manager.release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _pin_prompt(self, sequence: Sequence) -> None:
        known = PrefixMatch()
        self.blocks.pin(self.blocks.match(sequence.tokens[: sequence.num_computed + 1], sequence.cache_salt, known))
        if self.blocks.checkpoints is not None:
            self.blocks.checkpoints.pin(known.nodes)
        self._policy.set_config(self._config)

    def rekey(self, sequence: Sequence, **changes: Any) -> None:
        """Change fields that the order depends on."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        for name, value in changes.items():
            setattr(sequence, name, value)
        queue.add(sequence)


def _waits_for_parent(parent: Sequence, sequence: Sequence) -> bool:
    """A further choice of a request waits until the first one, its parent, has computed the prompt they share."""
    return parent.status is not Status.FINISHED and parent.num_computed < sequence.prompt_len - 1


@dataclass(slots=True)
class Step:
    """A step that is being decided."""

    now: int  # the time, in nanoseconds of the engine's clock
    sequences: Sequences
    decoding: list[Sequence]  # running sequences that are to get a token, in order
    prompts: list[Sequence]  # running sequences with a prompt under way, in order
    plan: StepPlan  # what an executor is to do
    decision: Decision  # what is noted of the reasons
    # Sequences of `decoding` that get no token unless the step would be empty.
    left_out: list[Sequence] = field(default_factory=list)

    def preempt(self, victim: Sequence) -> None:
        """Take the blocks of a running sequence, which waits again."""
        self.sequences.preempt(victim, self.plan, self.now)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence that is not served."""
        self.sequences.finish(sequence, reason, self.now)
        self.plan.expired.append(sequence.seq_id)

    def wait_until(self, then: int) -> None:
        """Run nothing before `then`, unless somebody comes."""
        self.plan.wait_until_ns, self.decision.window_ns = then, then - self.now
