"""A log of the steps of a simulation, with a column for each figure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headway.policy.step.accounting import StepTimes
from headway.policy.step.step_time import StepWork


def _times() -> array[int]:
    return array("q")


def _counts() -> array[int]:
    return array("i")


@dataclass(slots=True)
class StepLog:
    """A row for each step that ran.

    Args:
        planned_ns, launched_ns, computed_ns, sampled_ns: when.
        tokens: computed.
        sequences: sequences that had a part in it.
        running, waiting: sequences at its end.
        blocks: blocks that sequences hold at its end.
        preempted: sequences.
        engines_lost: engines that died in a step, which is not in the log.
    """

    planned_ns: array[int] = field(default_factory=_times)
    launched_ns: array[int] = field(default_factory=_times)
    computed_ns: array[int] = field(default_factory=_times)
    sampled_ns: array[int] = field(default_factory=_times)
    tokens: array[int] = field(default_factory=_counts)
    sequences: array[int] = field(default_factory=_counts)
    running: array[int] = field(default_factory=_counts)
    waiting: array[int] = field(default_factory=_counts)
    blocks: array[int] = field(default_factory=_counts)
    preempted: array[int] = field(default_factory=_counts)
    engines_lost: int = 0

    def __len__(self) -> int:
        return len(self.sampled_ns)

    def add(
        self,
        planned_ns: int,
        work: StepWork,
        sequences: int,
        preempted: int,
        times: StepTimes,
        running: int,
        waiting: int,
        blocks: int,
    ) -> None:
        """A step has run, and its results were applied."""
        self.planned_ns.append(planned_ns)
        self.launched_ns.append(times.launched_ns)
        self.computed_ns.append(times.computed_ns)
        self.sampled_ns.append(times.sampled_ns)
        self.tokens.append(work.tokens)
        self.sequences.append(sequences)
        self.running.append(running)
        self.waiting.append(waiting)
        self.blocks.append(blocks)
        self.preempted.append(preempted)
