"""What the next step computes: `schedule(now) -> StepPlan`, then `complete(plan, ...)` with what came of it.

Sequences that decode come first, one token each, unless they wait for prompts (`step_budget.Sharing`). Prompts under
way share what is left of the step's budget (`step_budget`), in order; then waiting sequences are admitted. One is
admitted when all its known tokens have blocks, so a prompt under way is never out of memory. One that does not fit lets
up to `lookahead` others past it, but only `max_bypasses` times: after that nothing behind it is admitted until it fits.

When a decoding sequence finds no block, another is preempted: its blocks are freed, and it computes its tokens again
when it returns, unless `swap` keeps them. The first in order is never a victim, and any sequence alone fits in the
pool, so every preempted sequence comes back. Where classes have shares of the pool (`shares`), only those go whose
class has more than its own. A sequence of a better priority takes the place of a running one (`victims`), and one that
was not served in time is ended (`waiting`). Three functions say who comes first and who must go (`order`). The
`block_manager` takes blocks for sequences and gives them back.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

from headway.policy.checkpoints import Checkpoint
from headway.policy.decisions import Decision
from headway.policy.kv_blocks import KVBlocks
from headway.policy.ledger import Phase
from headway.policy.plan import ScheduledSequence, StepPlan, state_of, work_of
from headway.policy.promises import Outlook, Yield
from headway.policy.request import FinishReason, Sequence, Status
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.sequences import Sequences
from headway.policy.slo import SloPolicy
from headway.policy.step_budget import StepBudget
from headway.policy.step_time import StepTimeModel, StepWork, pairs
from headway.policy.victims import RunningRanks, victims_for


class Scheduler(Sequences):
    """Decides what each step computes.

    Args:
        step_time: as of Sequences.

    Raises:
        ValueError: when the pool cannot hold one sequence of max_model_len.
    """

    def __init__(self, config: SchedulerConfig, blocks: KVBlocks, step_time: StepTimeModel | None = None) -> None:
        super().__init__(config, blocks, step_time)
        self._max_stall_ns = config.max_prefill_stall_ms * 1e6 if config.enable_chunked_prefill else math.inf
        self._ranks, self._ranks_version = RunningRanks((), {}), -1
        self._evictions: Counter[tuple[str, str]] = Counter()  # until the step before
        self._watermark = config.kept_free(blocks.num_blocks)

    def schedule(self, now: int) -> StepPlan:
        """Decide the next step. The plan is empty when there is nothing to run."""
        plan, decision = StepPlan(), Decision(now)
        for sequence in self._unserved.expired(now):
            self.finish(sequence, FinishReason.TIMEOUT, now)
            plan.expired.append(sequence.seq_id)
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        prompts: list[Sequence] = []
        if len(decoding) < len(self.running):
            prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        outlook = Outlook()
        if self.slo is not None:
            outlook = self._look_ahead(self.slo, decoding, prompts, plan, decision, now)
            if plan.wait_until_ns:
                return plan
        if not self.config.sharing.decodes(bool(prompts) or len(self.waiting) > 0):
            outlook.left_out = decoding
        if self.orders.displaces and len(self.waiting) and len(self.running):
            self._displace(plan, now, outlook)
        if self.lends_blocks:
            self._give_back(plan, decision, now, outlook)
        displaced = len(plan.preempted)
        if displaced:
            decoding = [sequence for sequence in decoding if sequence.status is Status.RUNNING]
        if outlook.left_out:
            decoding = self._leave_out(outlook.left_out, decoding, now)
        self._schedule_decodes(decoding, plan, now)
        out_of_blocks = len(plan.preempted) > displaced
        if self._drafts:
            self._schedule_drafts(plan, outlook)
        beside, decodes = work_of(plan.scheduled), len(plan.scheduled)
        slack_ns = math.inf
        if self.slo is not None:
            slack_ns = self.slo.slack_beside(beside, outlook)
            self.slo.shares.begin_step(self.running)
        budget = self._budget_beside(beside, slack_ns)
        if prompts:
            self._schedule_prefills(plan, budget, now, may_admit=not out_of_blocks)
            out_of_blocks = len(plan.preempted) > displaced
        reason = Phase.QUEUE_BLOCKS if out_of_blocks else self._admit(plan, budget, now)
        if outlook.left_out and not plan.scheduled:
            self._schedule_decodes([s for s in outlook.left_out if s.status is Status.RUNNING], plan, now)
        if self.blocks.checkpoints is not None:
            self._keep_decoded(plan)
        added = plan.scheduled[decodes:]
        plan.work = beside + work_of(added) if added else beside
        if not len(self.waiting):
            reason = Phase.QUEUE_CAPACITY
        elif self.orders.displaces and self._is_outranked(self.waiting.first()):
            reason = Phase.QUEUE_POLICY
        self.accounting.queue_stands_at(reason, now)
        if self.fair is not None:
            self.fair.measure()
        if self.host is not None and plan.scheduled:
            plan.swaps = self.host.take_swaps()
        decision.note(plan, outlook, self.sequences, self.accounting.step_time)
        if self.blocks.cached.num_evicted != self._evictions.total():
            decision.evicted = self.blocks.cached.evictions - self._evictions
            self._evictions = self.blocks.cached.evictions.copy()
        decision.waiting, decision.running, decision.queue = len(self.waiting), len(self.running), reason
        self.decisions.append(decision)
        return plan

    def longest_step_ns(self) -> float:
        """What a step takes with as much of everything as there may be; 0 where that cannot be predicted as yet."""
        config, step_time = self.config, self.accounting.step_time
        if not step_time.is_trained:
            return 0.0
        tokens, seats, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
        work = StepWork(tokens, seats, pairs(max(0, length - tokens), tokens), seats * length)
        return step_time.predict_ns(work)

    def _look_ahead(
        self,
        slo: SloPolicy,
        decoding: list[Sequence],
        prompts: list[Sequence],
        plan: StepPlan,
        decision: Decision,
        now: int,
    ) -> Outlook:
        """See which promises can be kept, and let the others yield."""
        plan.wait_until_ns = 0 if len(self.running) else slo.window_until(self.waiting, now)
        if plan.wait_until_ns:
            self.accounting.queue_stands_at(Phase.QUEUE_WINDOW, now)
            decision.window_ns = plan.wait_until_ns - now
            self.decisions.append(decision)
            return Outlook()
        starved = slo.starved(prompts, self.waiting, now)
        if starved is not None:
            self._rekey(starved, has_starved=True)
        if self.fair is not None:
            for sequence in slo.owed(prompts, self.fair):
                self._rekey(sequence, yielded="", renewed_ns=0)
        yields, urgent = slo.yielding(decoding, prompts, self.waiting, now)
        for each in yields:
            decision.yielded.append((each.sequence.request_id, each.reason))
            self._yield(each, plan, now)
        return slo.outlook(decoding, prompts, urgent, now)

    def _budget_beside(self, decodes: StepWork, slack_ns: float) -> StepBudget:
        """What a step with these decodes has left for prompts. It may last as long as they have time, or where they
        have no objective (infinite), prompts may hold them up for max_prefill_stall_ms.
        """
        tokens, least = self.config.max_num_batched_tokens - decodes.decode_tokens, self.blocks.block_size
        step_time = self.accounting.step_time
        budget = StepBudget(tokens, step_time, self._max_stall_ns, least if math.isinf(slack_ns) else 0)
        if decodes.decode_tokens:
            budget.share_with(decodes, slack_ns)
        return budget

    def _leave_out(self, left_out: list[Sequence], decoding: list[Sequence], now: int) -> list[Sequence]:
        """The decoding sequences of this step, less those that are left out."""
        for sequence in left_out:
            self.accounting.leave_out(sequence, now)
        numbers = {sequence.seq_id for sequence in left_out}
        return [sequence for sequence in decoding if sequence.seq_id not in numbers]

    def _yield(self, each: Yield, plan: StepPlan, now: int) -> None:
        """Plan a sequence as if it came now and its work were free, or end it where its class wants that."""
        sequence = each.sequence
        renewed_ns = now + sequence.due_ns - sequence.arrival_ns + int(sequence.work_ns)
        self._rekey(sequence, yielded=sequence.yielded or each.reason, renewed_ns=renewed_ns)
        if sequence.service.when_late == "refuse":
            sequence.retry_after_s = max(1, math.ceil(each.backlog_ns / 1e9))
            self.finish(sequence, FinishReason.LATE, now)
            plan.expired.append(sequence.seq_id)

    def _schedule_decodes(self, decoding: list[Sequence], plan: StepPlan, now: int) -> None:
        """Give every decoding sequence its token, in order, preempting others where blocks run out."""
        if self.lends_blocks:
            decoding = self._make_room(decoding, plan, now)
        scheduled = plan.scheduled
        for sequence in decoding:
            computed = sequence.num_computed
            if computed >= sequence.room and not self._has_room(sequence, plan, now):
                continue
            scheduled.append(ScheduledSequence(sequence.seq_id, computed, [sequence.tokens[-1]], True, 1))

    def _has_room(self, sequence: Sequence, plan: StepPlan, now: int, count: int = 1) -> bool:
        """Find blocks for the next tokens of a sequence; False when it is itself preempted, or was before."""
        while sequence.status is Status.RUNNING:
            if self.block_manager.extend(sequence, count, plan):
                _tell(sequence, plan)
                return True
            self._preempt(self._victim(plan), plan, now)
        return False

    def _schedule_drafts(self, plan: StepPlan, outlook: Outlook) -> None:
        """Have drafts computed beside the newest tokens, as far as the budget and free blocks reach.

        They may be refused, so a block of tokens is left to prompts, and all the time where one is promised.
        """
        drafts, self._drafts = self._drafts, {}
        spare = self.config.max_num_batched_tokens - len(plan.scheduled)
        if len(self.waiting) or not self.accounting.all_decode(len(self.running)):
            spare -= self.blocks.block_size
        if self.slo is not None:
            spare = min(spare, self.slo.promises.drafts_within(work_of(plan.scheduled), outlook.slack_ns))
        for item in plan.scheduled:
            sequence = self.sequences[item.seq_id]
            most = min(spare, sequence.max_len - len(sequence.tokens) - 1)
            proposed = drafts.get(item.seq_id, [])[: max(0, most)]
            if proposed and self.block_manager.extend(sequence, 1 + len(proposed), plan):
                item.token_ids += proposed
                item.samples += len(proposed)
                spare -= len(proposed)

    def _keep_decoded(self, plan: StepPlan) -> None:
        """Have the states kept of sequences that sample, now and then."""
        for item in plan.scheduled:
            tokens = item.start + len(item.token_ids)
            if item.samples and not (item.keeps and item.keeps[-1].tokens == tokens):
                slot = self.block_manager.roll(self.sequences[item.seq_id], tokens)
                if slot is not None:
                    item.keeps = (*item.keeps, Checkpoint(tokens, slot))

    def _victim(self, plan: StepPlan) -> Sequence:
        """The next to be preempted, of those who have no token of this step yet."""
        scheduled = {item.seq_id for item in plan.scheduled}
        return max((s for s in self.running if s.seq_id not in scheduled), key=self.orders.victims)

    def _schedule_prefills(self, plan: StepPlan, budget: StepBudget, now: int, may_admit: bool) -> None:
        """Give prompts under way their next chunks; a waiting sequence that comes before one is admitted first."""
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        for sequence in prompts if self.fair is None else self.fair.in_turn(prompts):
            if may_admit and len(self.waiting) and self.waiting.comes_before(self.waiting.first(), sequence):
                self._admit(plan, budget, now, before=sequence)
            if budget.is_spent:
                break
            if sequence.status is Status.RUNNING:
                self._schedule_chunk(sequence, budget, plan, now)

    def _schedule_chunk(self, sequence: Sequence, budget: StepBudget, plan: StepPlan, now: int) -> None:
        """Give a prompt its next chunk.

        There are blocks for it, but where others share what its windows have passed: then these may have to go.
        """
        start, wanted = sequence.num_computed, sequence.num_to_compute
        most = self._most_of(sequence, budget)
        decodes = sequence.is_decoding  # it goes on, and all before its newest token was in the cache
        count = budget.fit(start, most, sequence.logit_rows(start, most) > 0, decodes)
        if count < wanted and not self.config.enable_chunked_prefill:
            return
        if count < most:  # tokens of those behind it may take less time, but they are not before it
            budget.tokens = count
        if count == 0:
            return
        if not self.block_manager.extend(sequence, count, plan) and not (
            self.blocks.groups and self._has_room(sequence, plan, now, count)
        ):
            return
        _tell(sequence, plan)
        chunk, rows = sequence.tokens[start : start + count], sequence.logit_rows(start, count)
        keeps = self.block_manager.keep_states(sequence, count) if sequence.keeps_at else ()
        samples = int(count == wanted)
        if sequence.pooling is not None:
            samples, plan.pools = 0, True
        item = ScheduledSequence(sequence.seq_id, start, chunk, decodes, samples, rows, keeps)
        plan.scheduled.append(item)
        budget.spend(start, count, rows, decodes)
        if self.slo is not None:
            self.slo.shares.give_tokens(sequence.service.name, count)

    def _most_of(self, sequence: Sequence, budget: StepBudget) -> int:
        """Tokens of a prompt that the step may take, as far as there is room."""
        return sequence.num_to_compute if self.slo is None else self.slo.most_tokens(sequence, budget)

    # --- admission ----------------------------------------------------------------------------------

    def _running_ranks(self) -> RunningRanks:
        """The ranks of the running sequences, computed anew only when one has come or gone."""
        if self._ranks_version != self.running.version:
            self._ranks = RunningRanks.of(self.running, self.orders)
            self._ranks_version = self.running.version
        return self._ranks

    def _is_outranked(self, sequence: Sequence) -> bool:
        return self._running_ranks().outrank(self.orders.level(sequence), sequence.arrival_ns)

    def _displace(self, plan: StepPlan, now: int, outlook: Outlook) -> None:
        """Preempt running sequences for waiting ones that rank above them, which are then admitted like any other.

        With objectives this is done only when a prompt is urgent.
        """
        if (self.slo is not None and not outlook.urgent) or self.waiting.first_key() > self._running_ranks().last:
            return
        order, last = self.orders.admission, self._running_ranks().last
        seats, promised = self.config.max_num_seqs - len(self.running), 0
        last_first = [s for s in sorted(self.running, key=self.orders.victims, reverse=True) if self._may_go(s)]
        for candidate in self._candidates():
            if order(candidate) > last:
                return
            if not self._may_start(candidate, len(self.running) - 1):
                return
            missing = self.block_manager.wanted(candidate) + self._spare + promised - self.blocks.num_free
            victims = victims_for(candidate, last_first, self.orders, seats, missing, self.blocks.references)
            if victims is None:
                return
            for victim in victims:
                if victim in outlook.left_out:
                    outlook.left_out.remove(victim)
                if self._may_go(victim):
                    victim.displacements += 1
                    self._preempt(victim, plan, now)
            last_first = [sequence for sequence in last_first if sequence.status is Status.RUNNING]
            seats += len(victims) - 1
            promised += self.block_manager.wanted(candidate)

    @property
    def lends_blocks(self) -> bool:
        """Classes have shares of blocks, or bounds."""
        return self.slo is not None and bool(self.slo.shares.blocks or self.slo.shares.most)

    def _may_go(self, sequence: Sequence) -> bool:
        """Its class has more than its share of blocks, or there are no shares."""
        return self.slo is None or not self.slo.shares.blocks or self.slo.shares.is_over(sequence.service.name)

    def _give_back(self, plan: StepPlan, decision: Decision, now: int, outlook: Outlook) -> None:
        """Preempt borrowers for the first waiting sequence of each class that fits in its share of blocks."""
        assert self.slo is not None
        shares, seen = self.slo.shares, set[str]()
        seats = self.config.max_num_seqs - len(self.running)
        if not any(shares.waiting[name] for name in shares.blocks):
            return
        for candidate in self._candidates() if seats > 0 else []:
            name = candidate.service.name
            if name in seen or name not in shares.blocks:
                continue
            seen.add(name)
            while shares.has_blocks_left(name, wanted := self.block_manager.wanted(candidate)):
                missing = wanted + shares.blocks_kept_from(name) - self.blocks.num_free
                if missing <= 0 or not self._may_start(candidate, len(self.running)):
                    break
                last_first = sorted(self.running, key=self.orders.victims, reverse=True)
                kept = candidate.prefix_match.blocks if candidate.prefix_match is not None else []
                victims = shares.borrowers(last_first, missing, set(kept))
                if not victims:
                    break
                for victim in victims:  # whose own class may now wait for what is left of its share
                    if victim in outlook.left_out:
                        outlook.left_out.remove(victim)
                    decision.gave_back.append((victim.request_id, name))
                    self._preempt(victim, plan, now)

    def _make_room(self, decoding: list[Sequence], plan: StepPlan, now: int) -> list[Sequence]:
        """Preempt until all who decode have blocks for their next tokens, within bounds; returns who is left.

        Who goes is of a class that would exceed its bound, or else of one that has more than its share.
        """
        assert self.slo is not None
        shares = self.slo.shares
        if not shares.most and len(decoding) * self.blocks.tables <= self.blocks.num_free:
            return decoding
        growing = [(sequence, count) for sequence in decoding if (count := self.block_manager.growth(sequence))]
        while True:
            growth = Counter[str]()
            for sequence, count in growing:
                growth[sequence.service.name] += count
            full = {name for name in shares.most if not shares.may_use(name, growth[name])}
            victims = [s for s in self.running if s.service.name in full]
            if not victims and growth.total() <= self.blocks.num_free:
                return [sequence for sequence in decoding if sequence.status is Status.RUNNING]
            over = [
                s for s in self.running if not s.has_starved and shares.is_over(s.service.name, growth[s.service.name])
            ]
            self._preempt(max(victims or over or self.running, key=self.orders.victims), plan, now)
            growing = [each for each in growing if each[0].status is Status.RUNNING]

    def _admit(self, plan: StepPlan, budget: StepBudget, now: int, before: Sequence | None = None) -> Phase:
        """Admit waiting sequences in order, or only those who come `before` another; returns why it stopped."""
        passed: list[Sequence] = []
        is_closed = False  # but for those who fit in their class's share of blocks
        for sequence in self._candidates(1 if self._is_full(budget) else None):
            if before is not None and self.waiting.comes_before(before, sequence):
                break
            if self._is_full(budget):
                return Phase.QUEUE_CAPACITY
            if is_closed and not self._fits_in_share(sequence):
                continue
            if not self._may_start(sequence, len(self.running)) or not self._most_of(sequence, budget):
                continue
            wanted = sequence.num_to_compute
            if not self.config.enable_chunked_prefill and budget.fit(0, wanted) < wanted:
                return Phase.QUEUE_CAPACITY
            if self.block_manager.admit(sequence, self._spare_for(sequence)):
                self._start(sequence, now)
                self._schedule_chunk(sequence, budget, plan, now)
                for overtaken in passed:
                    overtaken.times_bypassed += 1
            else:
                passed.append(sequence)
                is_closed = is_closed or len(passed) > self.config.lookahead
            is_closed = is_closed or any(s.times_bypassed >= self.config.max_bypasses for s in passed)
            if is_closed and (not self.lends_blocks or passed[0].has_starved):
                return Phase.QUEUE_BLOCKS
        return Phase.QUEUE_BLOCKS if passed else Phase.QUEUE_POLICY

    def _is_full(self, budget: StepBudget) -> bool:
        return len(self.running) >= self.config.max_num_seqs or budget.is_spent

    def _candidates(self, most: int | None = None) -> list[Sequence]:
        """The head of the queue: `most` of it, or as many as could be admitted or examined in one step."""
        if most is None:
            most = max(1, self.config.max_num_seqs - len(self.running)) + self.config.lookahead + 1
        head = list(islice((s for s in self.waiting if not self._waits_for_parent(s)), most))
        if self.slo is not None:
            head += [s for s in self.slo.past(head, self.waiting) if not self._waits_for_parent(s)]
        return head

    def _waits_for_parent(self, sequence: Sequence) -> bool:
        """A further choice of a request waits until the first one has computed the prompt they share."""
        parent = sequence.parent
        if parent is None or parent.status is Status.FINISHED:
            return False
        return parent.num_computed < sequence.prompt_len - 1

    @property
    def _spare(self) -> int:
        """Blocks that admission leaves to those who run."""
        return self._watermark if len(self.running) else 0

    def _spare_for(self, sequence: Sequence) -> int:
        """As _spare, and the blocks that are reserved for other classes."""
        if self.slo is None or not self.slo.shares.blocks or sequence.has_starved or not len(self.running):
            return self._spare
        kept = self.slo.shares.blocks_kept_from(sequence.service.name)
        return kept if self._fits_in_share(sequence) else kept + self._spare

    def _fits_in_share(self, sequence: Sequence) -> bool:
        """Its class keeps within its share of blocks when the sequence is admitted."""
        name, slo = sequence.service.name, self.slo
        return slo is not None and slo.shares.has_blocks_left(name, self.block_manager.wanted(sequence))

    def _may_start(self, sequence: Sequence, num_running: int) -> bool:
        return self.slo is None or self.slo.may_start(sequence, num_running)


def _tell(sequence: Sequence, plan: StepPlan) -> None:
    """Have the plan say all about a sequence that the executor has not heard of since it was last admitted."""
    if not sequence.in_executor:
        plan.new.append(state_of(sequence))
        sequence.in_executor = True
