"""Divides a step among the stages of a pipeline, so that all of them work at the same time.

A stage works on one micro-batch of a step while the next stage works on the one before (GPipe, Huang et al., 2019). So
`count` micro-batches pass `stages` stages in count + stages - 1 turns, and each stage is idle in stages - 1 of these.
More of them leave stages idle for less time, but every stage reads all of its weights for each of them. So a step with
few tokens is not divided: the stages take turns. Where the next step can begin before a step has ended, none is idle.
"""

from __future__ import annotations

import msgspec

from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.step_time import StepTimeModel, StepWork

# Micro-batches have a multiple of so many tokens, but for the last one: products take as many rows at a time.
ROWS = 16
_MOST = 16


class MicroBatches:
    """How many parts steps are divided into, by how long parts of that size have taken on this machine.

    Args:
        stages: of the pipeline, one after the other.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self._turn = stages, StepTimeModel()

    def divide(self, plan: StepPlan, is_followed: bool = False) -> list[StepPlan]:
        """The micro-batches of a step, in their order; the step itself where one is best.

        Args:
            is_followed: stages begin with the next step as soon as the first of these has ended, so that as many as
                there are stages leave none of them idle.
        """
        count = self._count(plan.work, is_followed) if self._stages > 1 else 1
        return [plan] if count == 1 else divided(plan, count)

    def observe(self, work: StepWork, count: int, turns: int, duration_ns: int) -> None:
        """Learn from a step that was divided into so many, and took so many turns."""
        self._turn.observe(_part(work, count), duration_ns // turns)

    def _count(self, work: StepWork, is_followed: bool) -> int:
        most = max(1, min(_MOST, work.tokens // ROWS))
        if not self._turn.is_trained:
            return 1
        counts = [1, min(most, self._stages)] if is_followed else range(1, most + 1)
        return min(counts, key=lambda count: self._turns(count, is_followed) * self._turn.most_ns(_part(work, count)))

    def _turns(self, count: int, is_followed: bool) -> int:
        return max(count, self._stages) if is_followed else count + self._stages - 1


def _part(work: StepWork, count: int) -> StepWork:
    return StepWork(*(each // count for each in msgspec.structs.astuple(work)))


def divided(plan: StepPlan, count: int) -> list[StepPlan]:
    """At most so many plans of equally many tokens, that do one after the other what the plan does.

    Chunks of prompts are cut where they have to be, but for those of which each token has results.
    """
    size = -(-plan.num_tokens // count // ROWS) * ROWS
    batches, done = [list[ScheduledSequence]() for _ in range(count)], 0
    for item in plan.scheduled:
        is_whole = item.decoding or item.logit_rows or plan.pools
        while not is_whole and done % size + item.num_tokens > size:
            first, item = cut(item, size - done % size)
            batches[done // size].append(first)
            done += first.num_tokens
        batches[(done + item.num_tokens // 2) // size].append(item)
        done += item.num_tokens
    first_batch, *others = [batch for batch in batches if batch]
    return [
        msgspec.structs.replace(plan, scheduled=first_batch, work=work_of(first_batch)),
        *(StepPlan(batch, work=work_of(batch), pools=plan.pools) for batch in others),
    ]


def cut(item: ScheduledSequence, at: int) -> tuple[ScheduledSequence, ScheduledSequence]:
    """The first tokens of a chunk, and the rest of it."""
    end = item.start + at
    before, behind = (tuple(kept for kept in item.keeps if (kept.tokens <= end) is first) for first in (True, False))
    change = msgspec.structs.replace
    return (
        change(item, token_ids=item.token_ids[:at], samples=0, keeps=before),
        change(item, start=end, token_ids=item.token_ids[at:], keeps=behind),
    )
