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
    """A row for each step that ran."""

    # planned_ns, launched_ns, computed_ns, sampled_ns: when.
    planned_ns: array[int] = field(default_factory=_times)
    launched_ns: array[int] = field(default_factory=_times)
    computed_ns: array[int] = field(default_factory=_times)
    sampled_ns: array[int] = field(default_factory=_times)
    tokens: array[int] = field(default_factory=_counts)  # computed
    sequences: array[int] = field(default_factory=_counts)  # sequences that had a part in it
    # running, waiting: sequences at its end.
    running: array[int] = field(default_factory=_counts)
    waiting: array[int] = field(default_factory=_counts)
    blocks: array[int] = field(default_factory=_counts)  # blocks that sequences hold at its end
    preempted: array[int] = field(default_factory=_counts)  # sequences
    engines_lost: int = 0  # engines that died in a step, which is not in the log

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

    def add_decodes(
        self, planned_ns: int, steps: list[StepTimes], sequences: int, running: int, waiting: int, held: list[int]
    ) -> None:
        """Steps have run, one after the other, in which as many sequences decoded.

        Args:
            planned_ns: when the first was planned.
            running: sequences at the end of the last.
            held: blocks at the end of each.
        """
        count, sampled_ns = len(steps), [times.sampled_ns for times in steps]
        alike = [sequences] * count
        self.planned_ns.extend([planned_ns, *sampled_ns[:-1]])
        self.launched_ns.extend([times.launched_ns for times in steps])
        self.computed_ns.extend([times.computed_ns for times in steps])
        self.sampled_ns.extend(sampled_ns)
        self.tokens.extend(alike)
        self.sequences.extend(alike)
        self.running.extend([*alike[:-1], running])
        self.waiting.extend([waiting] * count)
        self.blocks.extend(held)
        self.preempted.extend([0] * count)
