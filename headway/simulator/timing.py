"""How long simulated steps take: always the same, or as the cost model says."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment
from headway.cost.work import Operation
from headway.policy.accounting import StepTimes
from headway.policy.plan import ScheduledSequence, StepPlan


class Timing(Protocol):
    """Says when the parts of a step are done."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """Of a step that was planned at `now`."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every step takes the same time. Nanoseconds."""

    step_ns: int

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times()."""
        return StepTimes(now, now + self.step_ns, now + self.step_ns)


@dataclass(slots=True)
class Predicted:
    """Steps take as long as the cost model says of a deployment.

    Sequences that decode count as one chunk of their mean context, apart by the windows that they have filled: between
    two window sizes a decode's work is linear in its context.
    """

    deployment: Deployment
    _windows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        windows = self.deployment.shape.sliding_windows
        self._windows = sorted({window for window in windows if window is not None})

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times(). The host's time comes before the step is launched."""
        step = self.deployment.step(self.chunks(plan.scheduled))
        sampling_s = sum([part.seconds for part in step.parts if part.name == Operation.SAMPLING])
        launched = now + round(step.host_s * 1e9)
        sampled = launched + round(step.device_s * 1e9)
        return StepTimes(launched, sampled - round(sampling_s * 1e9), sampled)

    def chunks(self, scheduled: list[ScheduledSequence]) -> list[Chunk]:
        """The work of a step as the cost model takes it."""
        contexts, chunks = list[int](), list[Chunk]()
        for item in scheduled:
            if item.decoding and item.samples == 1:
                contexts.append(item.start)
            else:
                rows = min(len(item.token_ids), item.samples + item.logit_rows)
                chunks.append(Chunk(len(item.token_ids), item.start, rows))
        return self._decodes(contexts) + chunks

    def _decodes(self, contexts: list[int]) -> list[Chunk]:
        alike: dict[int, list[int]] = {0: contexts}
        if self._windows:
            alike = {}
            for context in contexts:
                alike.setdefault(bisect_right(self._windows, context), []).append(context)
        return [Chunk(1, round(sum(each) / len(each)), 1, len(each)) for each in alike.values() if each]
