"""The sequences of an engine: which wait and which run, how they come and go, and what each step did to them.

`Scheduler` decides; this carries out the decisions, keeps the ledgers, and applies the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from headway.policy.accounting import Accounting, StepTimes
from headway.policy.block_manager import BlockManager
from headway.policy.decisions import Decision
from headway.policy.fairness import FairSequences
from headway.policy.kv_blocks import KVBlocks
from headway.policy.order import ORDERS, OrderedSequences
from headway.policy.plan import StepPlan, work_of
from headway.policy.prefix_index import PrefixMatch
from headway.policy.request import FinishReason, Sequence, Status
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.service_class import ClassTable
from headway.policy.slo import SloPolicy
from headway.policy.step_time import StepTimeModel
from headway.policy.stopping import finish_reason
from headway.policy.swap import HostPool
from headway.policy.waiting import Unserved

DECISIONS_KEPT = 256


class Sequences:
    """Owns the waiting and running sequences and the block pool.

    Args:
        step_time: predicts steps and hears how long they took; None learns from them.

    Attributes:
        sequences: all of them, by the number that each gets here and that plans name it by.
        slo: the state of the policy `slo`; None with another policy.
        fair: `waiting`, where tenants take turns; else None.
        host: the blocks of host memory; None without any.
        decisions: the latest ones.

    Raises:
        ValueError: when the pool cannot hold one sequence of max_model_len.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks, step_time: StepTimeModel | None = None) -> None:
        if (needed := blocks.most_blocks(config.max_model_len)) > blocks.num_blocks:
            raise ValueError(
                f"one sequence of max_model_len ({config.max_model_len}) needs {needed} KV blocks, the pool has "
                f"{blocks.num_blocks}; lower --max-model-len or raise --kv-cache-memory"
            )
        step_time = step_time or StepTimeModel()
        self.config = config
        self.blocks = blocks
        self.host = HostPool(config.swap, step_time) if config.swap.num_blocks else None
        self.block_manager = BlockManager(blocks, self.host)
        self.orders = ORDERS[config.policy]
        self.accounting = Accounting(step_time)
        self.running = OrderedSequences(self.orders.running)
        self.sequences: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self.slo = (
            SloPolicy(config, self.orders, step_time, self.block_manager, blocks) if config.policy == "slo" else None
        )
        self.fair: FairSequences | None = None
        self.waiting = self._queue()
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._unserved = Unserved(config.max_queue_time)
        self._next_seq_id = 0
        self._drafts: dict[int, list[int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or len(self.running))

    @property
    def has_drafts(self) -> bool:
        """The next step is to try some."""
        return bool(self._drafts)

    def set_classes(self, classes: ClassTable, weights: Mapping[str, float]) -> None:
        """New requests are of these classes, and sequences that are there keep theirs; tenants have these weights."""
        self.config = replace(self.config, classes=classes, weights=weights)
        if self.slo is not None:
            self.slo.shares.set_classes(classes)
        if self.fair is not None and weights:
            self.fair.weights = weights
        elif self.fair is not None or weights:
            there, self.waiting = list(self.waiting), self._queue()
            for sequence in there:
                self.waiting.add(sequence)

    def _queue(self) -> OrderedSequences:
        """An empty queue: `fair` where tenants have weights."""
        orders, weights = self.orders, self.config.weights
        self.fair = FairSequences(orders, weights, self.config.max_model_len) if weights else None
        if self.slo is not None:
            self.slo.promises.fair = self.fair
        return OrderedSequences(orders.admission) if self.fair is None else self.fair

    # --- arrivals and departures --------------------------------------------------------------------

    def add(self, sequence: Sequence, now: int) -> None:
        """Queue a new sequence that fits the context."""
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self.sequences[sequence.seq_id] = sequence
        if self.slo is not None:
            self.slo.arrives(sequence, now)
        self.accounting.begin_waiting(sequence, now)
        self.waiting.add(sequence)
        if sequence.output_len == 0:
            self._unserved.add(sequence)

    def abort(self, sequence: Sequence, now: int) -> None:
        """Drop a sequence in any state and free its blocks."""
        if sequence.status is not Status.FINISHED:
            self.finish(sequence, FinishReason.ABORT, now)

    def finish(self, sequence: Sequence, reason: FinishReason, now: int) -> None:
        self.accounting.leave(sequence, now)
        if reason is FinishReason.ERROR:
            self.block_manager.withdraw(sequence)
        if self.slo is not None:
            self.slo.leaves(sequence, reason)
        (self.running if sequence.status is Status.RUNNING else self.waiting).remove(sequence)
        del self.sequences[sequence.seq_id]
        self._unserved.discard(sequence)
        if sequence.pins_prompt:
            self._pin_prompt(sequence)
        self.block_manager.release(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def _pin_prompt(self, sequence: Sequence) -> None:
        known = PrefixMatch()
        self.blocks.pin(self.blocks.match(sequence.tokens[: sequence.num_computed + 1], sequence.cache_salt, known))
        if self.blocks.checkpoints is not None:
            self.blocks.checkpoints.pin(known.nodes)
        if self.slo is not None:
            self.slo.shares.set_classes(self.config.classes)  # whose shares are of what is left

    def _start(self, sequence: Sequence, now: int) -> None:
        """Let a waiting sequence run that has got its blocks."""
        self.accounting.leave(sequence, now)
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.times_bypassed = 0
        self._unserved.discard(sequence)
        self.running.add(sequence)
        if self.slo is not None:
            self.slo.begins(sequence)
        if self.fair is not None:
            self.fair.admitted(sequence, self.running)

    def _preempt(self, victim: Sequence, plan: StepPlan, now: int) -> None:
        self.accounting.begin_preempted(victim, now)
        if self.slo is not None:
            self.slo.leaves(victim)
        self.running.remove(victim)
        self.block_manager.preempt(victim)
        victim.status = Status.WAITING
        victim.preemptions += 1
        victim.times_bypassed = self.config.max_bypasses  # it has been served already: nobody overtakes it
        self.num_preemptions += 1
        self.waiting.add(victim)
        plan.preempted.append(victim.seq_id)

    def _rekey(self, sequence: Sequence, **changes: Any) -> None:
        """Change fields that the order depends on."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        for name, value in changes.items():
            setattr(sequence, name, value)
        queue.add(sequence)

    # --- results ------------------------------------------------------------------------------------

    def take_out(self, failed: list[Sequence], plan: StepPlan, began: int, ended: int) -> None:
        """End the sequences that made a plan fail, and take them out of it; the rest is then completed as usual.

        The plan was run again in parts between `began` and `ended`. Not all of the failed ones need to be in it.
        """
        self.accounting.record_retry(self.running, began, ended)
        for sequence in failed:
            self.finish(sequence, FinishReason.ERROR, ended)
        plan.scheduled = [item for item in plan.scheduled if item.seq_id in self.sequences]
        plan.work = work_of(plan.scheduled)

    def complete(
        self, plan: StepPlan, tokens: Mapping[int, list[int] | None], times: StepTimes
    ) -> list[tuple[Sequence, list[int]]]:
        """Apply a step's results.

        Args:
            tokens: new tokens of each item that samples, by its seq_id: the drafts that were accepted, and the token
                drawn after them. With an empty list the newest known token is computed again. None means that the
                logits were not numbers: the sequence ends with an error and leaves nothing in the prefix index.
                Of items that want a vector, only those are named whose vector is none.

        Returns:
            The sequences that have sampled or have finished, with their new tokens up to the one that ends them.
        """
        known_as = self.sequences
        sequences = [known_as[item.seq_id] for item in plan.scheduled]
        idle = self._idle_beside(sequences)
        self.accounting.record_step(sequences, plan, idle, times)
        self._heed(times)
        changed: list[tuple[Sequence, list[int]]] = []
        fair = self.fair
        size = self.blocks.block_size if self.blocks.enable_prefix_caching else 0
        sampled_ns, checkpoints = times.sampled_ns, self.blocks.checkpoints
        for sequence, item in zip(sequences, plan.scheduled, strict=True):
            sequence.steps += 1
            reason, samples = None, item.samples
            if not samples:
                sequence.num_computed += len(item.token_ids)
                if sequence.pooling is not None:
                    reason = self._end_of_pooled(sequence, tokens.get(item.seq_id, ()), sampled_ns)
                    if reason is not None:
                        changed.append((sequence, []))
                    if reason is FinishReason.ERROR:
                        self.finish(sequence, reason, sampled_ns)
                        continue
            elif (drawn := tokens[item.seq_id]) is None:
                changed.append((sequence, []))
                self.finish(sequence, FinishReason.ERROR, sampled_ns)
                continue
            else:
                mine = sequence.tokens
                known = len(mine)
                for token in drawn:
                    mine.append(token)
                    if token in sequence.stop_ids or len(mine) >= sequence.max_len:
                        reason = finish_reason(sequence, token)
                        if reason is not None:
                            drawn = mine[known:]
                            break
                sequence.last_token_ns = sampled_ns
                if sequence.yielded and known == sequence.prompt_len:
                    self._forgive(sequence, sampled_ns)
                changed.append((sequence, drawn))
                sequence.num_computed = len(mine) - 1
                if samples > 1:
                    self.block_manager.trim(sequence)
                if fair is not None:
                    fair.charge(sequence)
            if size and (sequence.num_registered + 1) * size <= sequence.num_computed:
                self.block_manager.register_full(sequence)
            if checkpoints is not None:
                self.block_manager.settle(sequence, item)
            if reason is not None:
                self.finish(sequence, reason, sampled_ns)
            elif sequence.clock_marks is None and samples and sequence.is_decoding:
                self.accounting.join_decode_clock(sequence)
        if checkpoints is not None:
            checkpoints.end_step()
        if fair is not None:
            fair.measure()
        return changed

    def _end_of_pooled(self, sequence: Sequence, told: Collection[int] | None, now: int) -> FinishReason | None:
        """Whether a sequence ends that a vector is wanted of: None in place of tokens says that it is no numbers."""
        if told is None:
            return FinishReason.ERROR
        if sequence.num_to_compute:
            return None
        self._forgive(sequence, now)
        return FinishReason.STOP

    def _forgive(self, sequence: Sequence, now: int) -> None:
        """A sequence has its first token; one that had yielded may be in time after all."""
        if now <= sequence.due_ns:
            sequence.yielded = ""

    def _heed(self, times: StepTimes) -> None:
        """Note how long the step of the latest decision took, and learn from it."""
        if self.decisions:
            decision = self.decisions[-1]
            decision.took_ns = times.computed_ns - times.launched_ns
            if self.slo is not None:
                self.slo.promises.heed(decision.planned_ns, times.launched_ns, times.computed_ns, times.sampled_ns)

    def propose(self, seq_id: int, drafts: list[int]) -> None:
        """Have the next step try these drafts, if the sequence decodes in it.

        Drafts of a sequence with penalties are dropped: its logits depend on the tokens before them. So are those of
        models with recurrent layers, whose states cannot go back behind drafts that were refused.
        """
        if self.blocks.checkpoints is not None:
            return
        if seq_id in self.sequences and drafts and not self.sequences[seq_id].params.penalises:
            self._drafts[seq_id] = drafts

    def _idle_beside(self, sequences: list[Sequence]) -> list[Sequence]:
        """The running sequences that have no part in a step of these."""
        if len(sequences) == len(self.running):
            return []
        ran = {sequence.seq_id for sequence in sequences}
        return [sequence for sequence in self.running if sequence.seq_id not in ran]

    def check(self) -> None:
        """Verify that no block is leaked or held twice.

        Raises:
            RuntimeError: naming the block.
        """
        for _ in self.check_by_parts():
            pass

    def check_by_parts(self) -> Iterator[None]:
        """check() with pauses, as KVBlocks.check_by_parts()."""
        yield from self.blocks.check_by_parts(sequence.held_blocks for sequence in self.running)
        if any(sequence.held_blocks for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        if self.blocks.checkpoints is not None:
            self.blocks.checkpoints.check(sum(sequence.checkpoint >= 0 for sequence in self.running))
        if self.host is not None:
            self.host.check(sequence.swapped for sequence in self.waiting)
