"""Divides the rows of a step among ranks that each have the whole model (context parallelism).

A row is a token that a step computes. All ranks write the keys and values of their rows to the same KV pool, and attend
to those of all. So each row is computed as one rank computes it. Later rows of a prompt attend to more keys and take
longer: ranks get parts that take as long, not parts of as many rows.
"""

from __future__ import annotations

from headway.policy.step.micro_batches import cut
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.step_time import StepTimeModel, StepWork, pairs

_TRIES = 64  # one of so many steps takes the way that seems slower: that may have changed


class ContextShares:
    """Which rows of a step each rank computes; or whether rank 0 computes all, with the threads of all ranks.

    Both ways are tried in turn, until each has been measured for long enough to predict which is quicker.

    Args:
        ranks: how many have the whole model.
        block_size: tokens of a KV block. No two ranks write to the same block.
    """

    def __init__(self, ranks: int, block_size: int) -> None:
        self._ranks, self._block = ranks, block_size
        self._alone, self._shared = StepTimeModel(), StepTimeModel()
        self._taken: tuple[StepTimeModel, StepWork] | None = None
        self._choices = 0

    def divide(self, plan: StepPlan) -> list[list[ScheduledSequence]]:
        """What each rank computes, rank 0 first; only one part where that rank computes all.

        Rank 0 has all rows whose logits are wanted, all decodes, and the last block of each prompt.
        """
        parts, self._taken = self._parts(plan), None
        if len(parts) > 1:
            self._taken = self._choice(plan.work, work_of(parts[0]))
            if self._taken[0] is self._alone:
                return [plan.scheduled]
        return parts

    def observe(self, duration_ns: int) -> None:
        """Learn from the step that was divided last."""
        if self._taken is not None:
            model, work = self._taken
            model.observe(work, duration_ns)

    def _choice(self, whole: StepWork, part: StepWork) -> tuple[StepTimeModel, StepWork]:
        """The way to take, and the work that it makes rank 0 wait for."""
        ways = [(self._shared, part), (self._alone, whole)]
        if not all(model.is_trained for model, _ in ways):
            return min(ways, key=lambda way: way[0].steps_seen)
        self._choices += 1
        ways.sort(key=lambda way: way[0].most_ns(way[1]))
        return ways[self._choices % _TRIES == 0]

    def _parts(self, plan: StepPlan) -> list[list[ScheduledSequence]]:
        """Parts that take equally long, as far as blocks allow; only one where some rank would have no rows."""
        token, pair = self._shared.prefill_costs() if self._shared.is_trained else (0.0, 0.0)
        if not token and not pair:
            token = 1.0

        def cost(start: int, count: int) -> float:
            return count * token + pairs(start, count) * pair

        stays = [bool(item.decoding or item.logit_rows or plan.pools) for item in plan.scheduled]
        costs = [cost(item.start, item.num_tokens) for item in plan.scheduled]
        kept = sum(each for each, remains in zip(costs, stays, strict=True) if remains)
        others = self._ranks - 1
        share = min(sum(costs) / self._ranks, (sum(costs) - kept) / others)
        parts, rank, load = [list[ScheduledSequence]() for _ in range(self._ranks)], 1, 0.0
        for item, remains in zip(plan.scheduled, stays, strict=True):
            last = 0 if remains else (item.start + item.num_tokens - 1) // self._block * self._block
            while rank < self._ranks and item.start < last:
                at = item.start
                while at < last:
                    end = (at // self._block + 1) * self._block
                    if load + (each := cost(at, end - at)) / 2 > share:
                        break
                    load, at = load + each, end
                if at > item.start:
                    first, item = cut(item, at - item.start)
                    parts[rank].append(first)
                if at < last:
                    rank, load = rank + 1, 0.0
            parts[0].append(item)
        return parts if all(parts) else [plan.scheduled]
