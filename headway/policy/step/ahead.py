"""Plans a step while the one before it runs: the same sequences decode in it, and nothing is to be decided.

What the running step draws is not known then, so the plan has UNKNOWN in the place of each such token, and the executor
takes it from its own draw. A sequence that the running step ends by its length has no part in the plan. One that ends
by a token is taken out when that is known: what was computed of it is dropped, and nobody hears of it.
"""

from __future__ import annotations

from headway.policy.step.decisions import Decision
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import UNKNOWN, ScheduledSequence, StepPlan, work_of
from headway.policy.step.scheduler import Scheduler


class Lookahead:
    """Plans what comes behind a scheduler's step before that has ended.

    A subclass of Scheduler has no such steps, as its steps may do more: those of a recording say what was drawn.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def may_follow(self, plan: StepPlan) -> bool:
        """Whether a step may be planned behind this one: everybody decodes, and each token is drawn from logits alone.

        Else the step's results decide what comes next.
        """
        scheduler = self._scheduler
        running, number = scheduler.running, len(plan.scheduled)
        return (
            type(scheduler) is Scheduler
            and number == plan.num_tokens == plan.work.decode_tokens == len(running)
            and not (scheduler.has_drafts or scheduler.config.weights)
            and admits_nobody(scheduler)
            and scheduler.blocks.checkpoints is None
            and not any(each.params.without_drafts or each.params.logprobs is not None for each in running)
            and scheduler.policy.is_steady(running)
        )

    def behind(self, plan: StepPlan) -> StepPlan | None:
        """The step behind one that has not ended, and that may be followed; None where that needs a look."""
        scheduler, by_id = self._scheduler, self._scheduler.sequences.by_id
        going = [item for item in plan.scheduled if item.start + 2 < by_id[item.seq_id].max_len]
        growing = [by_id[item.seq_id] for item in going if item.start + 1 >= by_id[item.seq_id].room]
        takes = len(going) if scheduler.policy.lends_blocks else len(growing)
        gives_seats = len(going) < len(plan.scheduled) and len(scheduler.waiting) > 0
        if not going or gives_seats or takes * scheduler.blocks.tables > scheduler.blocks.num_free:
            return None
        ahead = StepPlan([ScheduledSequence(item.seq_id, item.start + 1, [UNKNOWN], True, 1) for item in going])
        for sequence in growing:
            scheduler.block_manager.extend(sequence, 2, ahead)
        return ahead

    def begin(self, ahead: StepPlan, now: int) -> None:
        """The step before has ended: the plan's tokens are known now, and those that have ended are taken out."""
        scheduler, by_id = self._scheduler, self._scheduler.sequences.by_id
        ahead.scheduled = [item for item in ahead.scheduled if item.seq_id in by_id]
        ahead.tables = [change for change in ahead.tables if change.seq_id in by_id]
        for item in ahead.scheduled:
            item.token_ids = [by_id[item.seq_id].tokens[-1]]
        ahead.work = work_of(ahead.scheduled)
        if not ahead.scheduled:
            return
        scheduler.policy.steady_steps(1)
        scheduler.accounting.queue_stands_at(Phase.QUEUE_CAPACITY, now)
        step_time = scheduler.accounting.step_time
        decision = Decision(now, len(ahead.scheduled), 0, len(scheduler.waiting), len(scheduler.running))
        decision.queue = Phase.QUEUE_CAPACITY
        if step_time.is_trained:
            decision.predicted_ns = step_time.predict_ns(ahead.work)
        scheduler.decisions.append(decision)


def admits_nobody(scheduler: Scheduler) -> bool:
    """Whether no step has room for those who wait, if anybody does, until a sequence ends."""
    sequences = scheduler.sequences
    is_full = sequences.seats >= scheduler.config.max_num_seqs and not sequences.unserved
    return not len(sequences.waiting) or (is_full and scheduler.policy.queue_waits_for_seats)
