"""What the next step computes: `schedule(now) -> StepPlan`, then `complete(plan, ...)` with what came of it.

Sequences that decode come first, one token each, unless they wait for prompts (`step_budget.Sharing`). Prompts under
way share what is left of the step's budget (`step_budget`), in order; then waiting sequences are admitted. One is
admitted when all its known tokens have blocks, so a prompt under way is never out of memory. One that does not fit lets
up to `lookahead` others past it, but only `max_bypasses` times: after that nothing behind it is admitted until it fits.

When a decoding sequence finds no block, another is preempted: its blocks are freed, and it computes its tokens again
when it returns, unless `swap` keeps them. The first in order is never a victim, and any sequence alone fits in the
pool, so every preempted sequence comes back. One that was not served in time is ended (`waiting`).

What else may be decided is asked of a policy (`scheduling_policy`), which answers nothing for `fcfs`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from headway.policy.cache.block_manager import BlockManager
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.states import MOST_DRAFTS
from headway.policy.cache.swap import HostPool
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.accounting import Accounting, Part, StepTimes
from headway.policy.step.decisions import Decision
from headway.policy.step.ledger import Phase
from headway.policy.step.order import OrderedSequences
from headway.policy.step.plan import ScheduledSequence, StepPlan, accepted_drafts, state_of, work_of
from headway.policy.step.policies import policy_class
from headway.policy.step.request import FinishReason, Sequence, Status
from headway.policy.step.scheduler_config import SchedulerConfig, StepLimits
from headway.policy.step.sequences import Sequences, Step
from headway.policy.step.step_budget import StepBudget
from headway.policy.step.step_time import StepTimeModel, StepWork

DECISIONS_KEPT = 256
Changed = list[tuple[Sequence, list[int]]]  # sequences with their new tokens


class Scheduler:
    """Decides what each step computes, and applies what came of it.

    Args:
        step_time: predicts steps and hears how long they took; None learns from them.

    Attributes:
        policy: what decides beyond blocks, seats and the budget.
        most_seqs: max_num_seqs at the start; what else the engine has is built for as many.
        sequences: all of them, by number.
        host: the blocks of host memory; None without any.
        decisions: the latest ones.
        decode: gives sequences their tokens in a step; what runs steps in which many decode alike may have its own.

    Raises:
        ValueError: the pool cannot hold one sequence of max_model_len, or there is no such policy.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks, step_time: StepTimeModel | None = None) -> None:
        if (needed := blocks.most_blocks(config.max_model_len)) > blocks.num_blocks:
            raise ValueError(
                f"one sequence of max_model_len ({config.max_model_len}) needs {needed} KV blocks, the pool has "
                f"{blocks.num_blocks}; lower --max-model-len or raise --kv-cache-memory"
            )
        step_time = step_time or StepTimeModel()
        self.config, self.most_seqs = config, config.max_num_seqs
        self.blocks = blocks
        self.host = HostPool(config.swap, step_time) if config.swap.num_blocks else None
        self.block_manager = BlockManager(blocks, self.host)
        self.accounting = Accounting(step_time)
        self.policy = policy_class(config.policy)(config, blocks, self.block_manager, step_time)
        self.sequences = Sequences(config, self.policy, blocks, self.block_manager, self.accounting)
        self.running = self.sequences.running
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._evictions: dict[tuple[str, str], int] = {}  # counted up to the step before
        self._drafts: dict[int, list[int]] = {}
        self.decode: Callable[[list[Sequence], Step], StepWork] = self.decode_each

    @property
    def waiting(self) -> OrderedSequences:
        return self.sequences.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.sequences.by_id)

    @property
    def has_drafts(self) -> bool:
        """Whether the next step is to try drafts."""
        return bool(self._drafts)

    def set_classes(self, classes: ClassTable, weights: Mapping[str, float], limits: StepLimits | None = None) -> None:
        """Set the classes of new requests, and the weights of tenants. Sequences that are there keep their classes.

        Args:
            limits: of the next steps, with at most `most_seqs` sequences and at least as many tokens; None leaves them.
        """
        changed = {} if limits is None else limits.changed
        self.config = replace(self.config, classes=classes, weights=weights, **changed)
        self.sequences.set_config(self.config)

    def add(self, sequence: Sequence, now: int) -> None:
        """Queue a new sequence that fits the context."""
        self.sequences.add(sequence, now)

    def abort(self, sequence: Sequence, now: int) -> None:
        """Drop a sequence in any state and free its blocks."""
        if sequence.status is not Status.FINISHED:
            self.sequences.finish(sequence, FinishReason.ABORT, now)

    def adapter_loaded(self, adapter: str, now: int, done: bool = True) -> list[Sequence]:
        """A load has ended. Where the adapter could not be had, all that wait for it end, and are returned."""
        slots, failed = self.sequences.slots, list[Sequence]()
        assert slots is not None, "there is nothing to load without slots"
        slots.ended(adapter, done)
        if not done:
            failed = [sequence for sequence in self.waiting if sequence.adapter == adapter]
        for sequence in failed:
            self.sequences.finish(sequence, FinishReason.ERROR, now)
        return failed

    # --- a step -------------------------------------------------------------------------------------

    def schedule(self, now: int) -> StepPlan:
        """Decide the next step. The plan is empty when there is nothing to run."""
        step, policy, sequences = self._begin(now), self.policy, self.sequences
        plan = step.plan
        if sequences.slots is not None and len(sequences.waiting):
            sequences.slots.settle(sequences.waiting, self.accounting, now)
        policy.prepare(step)
        if plan.wait_until_ns:
            self.accounting.queue_stands_at(Phase.QUEUE_WINDOW, now)
            self.decisions.append(step.decision)
            return plan
        self._settle_who_decodes(step)
        preempted = len(plan.preempted)
        beside = self.decode(policy.make_room(step.decoding, step), step)
        out_of_blocks, decodes = len(plan.preempted) > preempted, len(plan.scheduled)
        slack_ns = policy.time_for(beside, sequences.running)
        reason = Phase.QUEUE_BLOCKS
        if step.prompts or len(sequences.waiting):
            budget = self._budget_beside(beside, slack_ns)
            if step.prompts:
                self._schedule_prefills(step, budget, may_admit=not out_of_blocks)
                out_of_blocks = len(plan.preempted) > preempted
            if not out_of_blocks:
                reason = self._admit(step, budget)
        if step.left_out and not plan.scheduled:
            left_out = [each for each in step.left_out if each.status is Status.RUNNING]
            beside, decodes = self.decode(policy.make_room(left_out, step), step), len(plan.scheduled)
        if self.block_manager.states is not None:
            self.block_manager.states.keep_decoded(plan.scheduled, sequences.by_id)
        added = plan.scheduled[decodes:]
        plan.work = beside + work_of(added) if added else beside
        if self.blocks.repeated:
            plan.work += StepWork(repeated_context=self.blocks.repeated_tokens)
        if not len(sequences.waiting):
            reason = Phase.QUEUE_CAPACITY
        elif policy.is_outranked(sequences):
            reason = Phase.QUEUE_POLICY
        self._note(step, reason)
        return plan

    def _begin(self, now: int) -> Step:
        """End sequences that have waited too long, and sort those that run into decodes and prompts."""
        sequences = self.sequences
        step = Step(now, sequences, list(sequences.running), [], StepPlan(), Decision(now))
        if sequences.unserved:
            for sequence in sequences.unserved.expired(now):
                step.end(sequence, FinishReason.TIMEOUT)
        if not self.accounting.all_decode(len(step.decoding)):
            running, step.decoding = step.decoding, []
            for sequence in running:
                (step.decoding if sequence.is_decoding else step.prompts).append(sequence)
        return step

    def _settle_who_decodes(self, step: Step) -> None:
        """Take out of the decodes who was preempted or is left out; where prompts are computed alone, take out all."""
        if self.config.sharing.prefill_first and (step.prompts or len(self.sequences.waiting)):
            step.left_out = step.decoding
        if step.plan.preempted:
            step.decoding = [sequence for sequence in step.decoding if sequence.status is Status.RUNNING]
            step.left_out = [sequence for sequence in step.left_out if sequence.status is Status.RUNNING]
        if step.left_out:
            for sequence in step.left_out:
                if sequence.clock_marks is not None:
                    self.accounting.leave(sequence, step.now)
            numbers = {sequence.seq_id for sequence in step.left_out}
            step.decoding = [sequence for sequence in step.decoding if sequence.seq_id not in numbers]

    def _note(self, step: Step, reason: Phase) -> None:
        """Note what was decided, and the reason for which others still wait."""
        self.accounting.queue_stands_at(reason, step.now)
        self.sequences.waiting.measure()
        plan, decision, step_time = step.plan, step.decision, self.accounting.step_time
        if self.host is not None and plan.work.tokens:
            plan.swaps = self.host.take_swaps()
        decision.decoding, decision.prompt_tokens = plan.work.decode_tokens, plan.work.prefill_tokens
        if plan.preempted or plan.swaps:
            decision.note_preempted(plan, self.sequences.by_id)
        if step_time.is_trained:
            decision.predicted_ns = step_time.predict_ns(plan.work)
        decision.left_out = len(step.left_out)
        if (cached := self.blocks.cached).num_evicted != sum((old := self._evictions).values()):
            self._evictions = new = dict(cached.evictions)
            decision.evicted = {why: count - old.get(why, 0) for why, count in new.items() if count != old.get(why)}
        decision.waiting, decision.running = len(self.sequences.waiting), len(self.running)
        decision.queue = reason
        self.decisions.append(decision)

    def _budget_beside(self, decodes: StepWork, slack_ns: float) -> StepBudget:
        """What a step with these decodes has left for prompts.

        The step may last for `slack_ns`. Where that is infinite, as the decodes have no objective, prompts may hold
        them up for max_prefill_stall_ms.
        """
        tokens, least = self.config.max_num_batched_tokens - decodes.decode_tokens, self.blocks.block_size
        step_time, config = self.accounting.step_time, self.config
        max_stall_ns = config.max_prefill_stall_ms * 1e6 if config.enable_chunked_prefill else math.inf
        budget = StepBudget(tokens, step_time, max_stall_ns, least if math.isinf(slack_ns) else 0)
        if decodes.decode_tokens:
            budget.share_with(decodes, slack_ns)
        return budget

    # --- who decodes --------------------------------------------------------------------------------

    def decode_each(self, decoding: list[Sequence], step: Step) -> StepWork:
        """Give these sequences their tokens, in order, preempting others where blocks run out; returns the work."""
        scheduled = step.plan.scheduled
        for sequence in decoding:
            computed = sequence.num_computed
            if computed >= sequence.room and not self._has_room(sequence, step):
                continue
            scheduled.append(ScheduledSequence(sequence.seq_id, computed, [sequence.tokens[-1]], True, 1))
        if self._drafts:
            self._schedule_drafts(step.plan)
        return work_of(scheduled)

    def _has_room(self, sequence: Sequence, step: Step, count: int = 1) -> bool:
        """Find blocks for the next tokens of a sequence; False when it is itself preempted, or was before."""
        while sequence.status is Status.RUNNING:
            if self.block_manager.extend(sequence, count, step.plan):
                _tell(sequence, step)
                return True
            step.preempt(self._victim(step.plan))
        return False

    def _victim(self, plan: StepPlan) -> Sequence:
        """The sequence that is preempted next, of those that have no token of this step yet."""
        scheduled = {item.seq_id for item in plan.scheduled}
        return max((s for s in self.running if s.seq_id not in scheduled), key=self.policy.orders.victims)

    def _schedule_drafts(self, plan: StepPlan) -> None:
        """Have drafts computed beside the newest tokens, as far as the budget and free blocks reach.

        They may be refused, so a block of tokens is left to prompts.
        """
        drafts, self._drafts = self._drafts, {}
        spare = self.config.max_num_batched_tokens - len(plan.scheduled)
        if len(self.sequences.waiting) or not self.accounting.all_decode(len(self.running)):
            spare -= self.blocks.block_size
        spare, states = min(spare, self.policy.most_drafts(work_of(plan.scheduled))), self.block_manager.states
        if states is not None:
            spare = min(spare, MOST_DRAFTS)
        for item in plan.scheduled:
            sequence = self.sequences.by_id[item.seq_id]
            most = min(spare, sequence.max_len - len(sequence.tokens) - 1)
            if states is not None:
                most = min(most, states.most_drafts(item.start))
            proposed = drafts.get(item.seq_id, [])[: max(0, most)]
            if proposed and self.block_manager.extend(sequence, 1 + len(proposed), plan):
                item.token_ids += proposed
                item.samples += len(proposed)
                spare -= len(proposed)

    # --- prompts ------------------------------------------------------------------------------------

    def _schedule_prefills(self, step: Step, budget: StepBudget, may_admit: bool) -> None:
        """Give prompts under way their next chunks; a waiting sequence that comes before one is admitted first."""
        waiting = self.sequences.waiting
        for sequence in waiting.in_turn([sequence for sequence in self.running if not sequence.is_decoding]):
            if may_admit and len(waiting) and waiting.comes_before(waiting.first(), sequence):
                self._admit(step, budget, before=sequence)
            if budget.is_spent:
                break
            if sequence.status is Status.RUNNING:
                self._schedule_chunk(sequence, budget, step)

    def _schedule_chunk(self, sequence: Sequence, budget: StepBudget, step: Step) -> None:
        """Give a prompt its next chunk.

        There are blocks for it, unless others share what its windows have passed, or it is a beam that computes its
        tokens again: then others may be preempted.
        """
        start, wanted = sequence.num_computed, sequence.num_to_compute
        most = min(wanted, self.policy.most_tokens(sequence, budget))
        decodes = sequence.is_decoding  # it goes on, and all before its newest token was in the cache
        asks = sequence.params.prompt_logprobs is not None and sequence.logit_rows(start, most) > 0
        count = budget.fit(start, most, asks, decodes)
        if count < wanted and not self.config.enable_chunked_prefill:
            return
        if count < most:  # tokens of those behind it may take less time, but they are not before it
            budget.tokens = count
        if count == 0:
            return
        if not self.block_manager.extend(sequence, count, step.plan) and not (
            (self.blocks.groups or sequence.is_unreserved) and self._has_room(sequence, step, count)
        ):
            return
        _tell(sequence, step)
        chunk, states = sequence.tokens[start : start + count], self.block_manager.states
        rows = 0 if sequence.params.prompt_logprobs is None else sequence.logit_rows(start, count)
        keeps = () if states is None else states.keep(sequence, count)
        samples = int(count == wanted)
        if sequence.pooling is not None:
            samples, step.plan.pools = 0, True
        step.plan.scheduled.append(ScheduledSequence(sequence.seq_id, start, chunk, decodes, samples, rows, keeps))
        budget.spend(start, count, rows, decodes)
        self.policy.takes(sequence, count)

    # --- admission ----------------------------------------------------------------------------------

    def _admit(self, step: Step, budget: StepBudget, before: Sequence | None = None) -> Phase:
        """Admit waiting sequences in order, or only those who come `before` another; returns why it stopped."""
        policy, sequences, waiting = self.policy, self.sequences, self.sequences.waiting
        passed: list[Sequence] = []
        is_closed = False  # once it is True, only those whom the policy lets pass are admitted
        for sequence in sequences.candidates(1 if self._is_full(budget) else None):
            if before is not None and waiting.comes_before(before, sequence):
                break
            if self._is_full(budget, sequence.seats):
                return Phase.QUEUE_CAPACITY
            if is_closed and not policy.may_pass(sequence):
                continue
            if not policy.may_start(sequence, len(self.running)) or not policy.most_tokens(sequence, budget):
                continue
            wanted = sequence.num_to_compute
            if not self.config.enable_chunked_prefill and budget.fit(0, wanted) < wanted:
                return Phase.QUEUE_CAPACITY
            if self.block_manager.admit(sequence, policy.spare_for(sequence, sequences.spare)):
                sequences.start(sequence, step.now)
                step.decision.admitted.append(sequence.request_id)
                self._schedule_chunk(sequence, budget, step)
                for overtaken in passed:
                    overtaken.times_bypassed += 1
            else:
                passed.append(sequence)
                is_closed = is_closed or len(passed) > self.config.lookahead
            if passed:
                is_closed = is_closed or any(s.times_bypassed >= self.config.max_bypasses for s in passed)
            if is_closed and not policy.lets_past(passed[0]):
                return Phase.QUEUE_BLOCKS
        return Phase.QUEUE_BLOCKS if passed else Phase.QUEUE_POLICY

    def _is_full(self, budget: StepBudget, seats: int = 1) -> bool:
        taken = self.sequences.seats
        return (taken + seats > self.config.max_num_seqs and taken > 0) or budget.is_spent

    # --- results ------------------------------------------------------------------------------------

    def take_out(self, failed: list[Sequence], plan: StepPlan, began: int, ended: int) -> None:
        """End the sequences that made a plan fail, and take them out of it; the rest is then completed as usual.

        The plan was run again in parts between `began` and `ended`. Not all of the failed ones need to be in it.
        """
        self.accounting.record_retry(self.running, began, ended)
        for sequence in failed:
            self.sequences.finish(sequence, FinishReason.ERROR, ended)
        plan.scheduled = [item for item in plan.scheduled if item.seq_id in self.sequences.by_id]
        plan.work = work_of(plan.scheduled)

    def complete(self, plan: StepPlan, tokens: Mapping[int, list[int] | None], times: StepTimes) -> Changed:
        """Apply a step's results.

        Args:
            tokens: new tokens of each item that samples, by its seq_id: the drafts that were accepted, and the token
                drawn after them. With an empty list the newest known token is computed again. None means that the
                logits were not numbers: the sequence ends with an error and leaves nothing in the prefix index.
                Of items that want a vector, only those are named whose vector is none.

        Returns:
            The sequences that have sampled or have finished, with their new tokens up to the one that ends them.
        """
        known_as, idle = self.sequences.by_id, list[Sequence]()
        parts = [(known_as[item.seq_id], item) for item in plan.scheduled]
        if len(parts) < len(self.running):
            ran = {item.seq_id for item in plan.scheduled}
            idle = [sequence for sequence in self.running if sequence.seq_id not in ran]
        self.accounting.record_step(parts, plan.work, idle, times)
        if self.decisions:  # the latest is the step's
            latest = self.decisions[-1]
            latest.plan, latest.times, latest.took_ns = plan, times, times.computed_ns - times.launched_ns
            self.policy.heed(latest.planned_ns, times)
        changed = self.apply(parts, tokens, times)
        if self.blocks.checkpoints is not None:
            self.blocks.checkpoints.end_step()
        self.sequences.waiting.end_step(changed)
        return changed

    def apply(self, parts: list[Part], tokens: Mapping[int, list[int] | None], times: StepTimes) -> Changed:
        """Do what complete() does for each part of a step, once its times are recorded."""
        changed: Changed = []
        size = self.blocks.block_size if self.blocks.enable_prefix_caching else 0
        sampled_ns, states, finish = times.sampled_ns, self.block_manager.states, self.sequences.finish
        for sequence, item in parts:
            sequence.steps += 1
            new, reason = self._take(sequence, item, tokens, sampled_ns)
            if new is not None:
                changed.append((sequence, new))
            if reason is FinishReason.ERROR:
                finish(sequence, reason, sampled_ns)
                continue
            if size and (sequence.num_registered + 1) * size <= sequence.num_computed:
                self.block_manager.register_full(sequence)
            if states is not None:
                states.settle(sequence, item)
            if reason is not None:
                finish(sequence, reason, sampled_ns)
            elif sequence.clock_marks is None and item.samples and sequence.is_decoding:
                self.accounting.join_decode_clock(sequence)
        return changed

    def _take(
        self, sequence: Sequence, item: ScheduledSequence, tokens: Mapping[int, list[int] | None], now: int
    ) -> tuple[list[int] | None, FinishReason | None]:
        """Give a sequence what came of its part of a step.

        Returns:
            Its new tokens, None where it has neither sampled nor ended, and why it ends.
        """
        if sequence.pooling is not None:
            return self._take_vector(sequence, item, tokens.get(item.seq_id, ()), now)
        if not item.samples:
            sequence.num_computed += len(item.token_ids)
            return None, None
        drawn, reason = tokens[item.seq_id], None
        if drawn is None:
            return [], FinishReason.ERROR
        all_tokens = sequence.tokens
        known = len(all_tokens)
        for token in drawn:
            all_tokens.append(token)
            if token in sequence.stop_ids or len(all_tokens) >= sequence.max_len:
                reason = sequence.reason_to_end()
                if reason is not None:
                    drawn = all_tokens[known:]
                    break
        sequence.last_token_ns, sequence.num_computed = now, len(all_tokens) - 1
        if known == sequence.prompt_len and drawn:
            self.policy.first_token(sequence, now)
        if item.samples > 1:
            self.block_manager.trim(sequence)
            sequence.drafts += item.samples - 1
            sequence.accepted_drafts += accepted_drafts(item, drawn)
        return drawn, reason

    def _take_vector(
        self, sequence: Sequence, item: ScheduledSequence, told: Collection[int] | None, now: int
    ) -> tuple[list[int] | None, FinishReason | None]:
        """Do as _take() does for a sequence that is to give a vector; `told` is None where that is not of numbers."""
        sequence.num_computed += len(item.token_ids)
        if told is None:
            return [], FinishReason.ERROR
        if sequence.num_to_compute:
            return None, None
        self.policy.first_token(sequence, now)
        return [], FinishReason.STOP

    def propose(self, seq_id: int, drafts: list[int]) -> None:
        """Have the next step try these drafts, if the sequence decodes in it.

        Drafts of a sequence with penalties are dropped: its logits depend on the tokens before them.
        """
        sequence = self.sequences.by_id.get(seq_id)
        if sequence is not None and drafts and not sequence.params.penalises:
            self._drafts[seq_id] = drafts

    # --- integrity ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify that no block is leaked or held twice. Raises RuntimeError, which names the block."""
        for _ in self.check_by_parts():
            pass

    def check_by_parts(self) -> Iterator[None]:
        """Do check() with pauses; KVBlocks.check_by_parts() says when."""
        yield from self.block_manager.check_by_parts(self.running, self.waiting)


def _tell(sequence: Sequence, step: Step) -> None:
    """Have the plan say all about a sequence that the executor has not heard of since it was last admitted."""
    if not sequence.in_executor:
        step.plan.new.append(state_of(sequence))
        step.decision.told[sequence.seq_id] = sequence.request_id
        sequence.in_executor = True
