"""How long steps take on a machine, learnt from steps that an engine has recorded there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.recording import Arrival, End, Item, Step
from headway.policy.step.step_time import StepTimeModel, StepWork
from headway.simulator.recording import Recording

Floats = npt.NDArray[np.float64]
FEWEST_STEPS = 50
SPELL = 20  # steps that are held up alike, in the mean


class TooFewSteps(ValueError):
    """There are too few steps to learn from."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that followed another, with work left to do between them."""

    work: StepWork
    sequences: int
    between_ns: int  # nanoseconds from the end of the last step until this one was launched
    # forward_ns, sampling_ns: nanoseconds until its logits were there, and from then until its tokens were known.
    forward_ns: int
    sampling_ns: int


@dataclass(slots=True)
class Learnt:
    """Each part of a step is linear in its work, and spread as in the steps that it was learnt from; nanoseconds.

    A machine is slow for a while, not for a step. So the spread is drawn in spells of steps that followed each other,
    of geometric length (the stationary bootstrap of Politis and Romano, 1994).

    Args:
        between, sampling: nanoseconds between two steps, and of sampling: for a step, and for each of its sequences.
        forward: nanoseconds of the forward pass for each of `StepWork.features`.
        ratios: measured over fitted time of each part, shape [steps, 3], in the order of time; for [steps that only
            decode, steps with prompts]. Those of one step stay together, because a delay often holds up all parts.
    """

    between: Floats
    forward: Floats
    sampling: Floats
    ratios: tuple[Floats, Floats]
    rng: np.random.Generator
    _last: list[int] = field(init=False, default_factory=lambda: [-1, -1])  # the row that was drawn last, by kind

    @classmethod
    def of(cls, steps: list[RecordedStep], seed: int = 0) -> Learnt:
        """Learn from recorded steps. Raises TooFewSteps."""
        if len(steps) < FEWEST_STEPS:
            raise TooFewSteps(f"{len(steps)} steps are too few to learn from; ask for more, at least {FEWEST_STEPS}")
        took = np.array([(step.between_ns, step.forward_ns, step.sampling_ns) for step in steps], dtype=float)
        sequences = np.array([(1.0, step.sequences) for step in steps])
        features = sequences, np.array([step.work.features() for step in steps]), sequences
        between, forward, sampling = (_fitted(of_part, took[:, part]) for part, of_part in enumerate(features))
        said = [of_part @ fit for of_part, fit in zip(features, (between, forward, sampling), strict=True)]
        ratios = took / np.maximum(1.0, np.stack(said, axis=1))
        with_prompts = np.array([step.work.prefill_tokens > 0 for step in steps])
        decodes, prompts = ratios[~with_prompts], ratios[with_prompts]
        spread = decodes if len(decodes) else ratios, prompts if len(prompts) else ratios
        return cls(between, forward, sampling, spread, np.random.default_rng(seed))

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return self._times(plan.work, len(plan.scheduled), now)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self._times(work, work.decode_tokens, now)

    def _times(self, work: StepWork, count: int, now: int) -> StepTimes:
        between, forward, sampling = (
            round(float(each)) for each in self._drawn(work.prefill_tokens > 0) * self.mean_parts(work, count)
        )
        return StepTimes(now + between, now + between + forward, now + between + forward + sampling)

    def mean_parts(self, work: StepWork, count: int) -> Floats:
        """The parts of a step with that many sequences, without the spread."""
        sequences = (1.0, count)
        return np.array([self.between @ sequences, self.forward @ work.features(), self.sampling @ sequences])

    def _drawn(self, kind: int) -> Floats:
        rows, last = self.ratios[kind], self._last[kind]
        goes_on = last >= 0 and self.rng.random() >= 1 / SPELL
        self._last[kind] = (last + 1) % len(rows) if goes_on else int(self.rng.integers(len(rows)))
        return rows[self._last[kind]]

    def slower(self, steps: list[RecordedStep]) -> float:
        """How many times as long other steps took, in all, as what is learnt says of their work."""
        means = [rows.mean(axis=0) for rows in self.ratios]
        said = sum(
            float(means[step.work.prefill_tokens > 0] @ self.mean_parts(step.work, step.sequences)) for step in steps
        )
        return sum(step.between_ns + step.forward_ns + step.sampling_ns for step in steps) / said


def teach(step_time: StepTimeModel, steps: list[RecordedStep]) -> None:
    """Give a scheduler's own step-time model what it knew in the engine that recorded the steps."""
    for step in steps:
        step_time.observe(step.work, step.forward_ns)


def steps_of(recording: Recording, began_ns: int, ended_ns: int) -> list[RecordedStep]:
    """The steps that were recorded between two times."""
    return list(_steps(recording, began_ns, ended_ns))


def _steps(recording: Recording, began_ns: int, ended_ns: int) -> Iterator[RecordedStep]:
    prompts: dict[int, int] = {}  # tokens of each
    present: set[int] = set()
    last_ns = 0  # when the step before was done, where it left something to do
    for record in recording.records:
        if isinstance(record, Arrival):
            prompts[record.seq_id] = record.prompt_len
            present.add(record.seq_id)
        elif isinstance(record, End):  # sequences that end with a step stand before it
            present.discard(record.seq_id)
        elif isinstance(record, Step) and record.times is not None:
            launched, computed, sampled = record.times
            if last_ns and began_ns <= record.now < ended_ns and record.retry is None:
                work = work_of([_scheduled(item, prompts[item.seq_id]) for item in record.items])
                parts = launched - last_ns, computed - launched, sampled - computed
                yield RecordedStep(work, len(record.items), *parts)
            last_ns = sampled if present else 0


def _scheduled(item: Item, prompt_len: int) -> ScheduledSequence:
    decodes = item.tokens == item.samples and item.start >= prompt_len
    return ScheduledSequence(item.seq_id, item.start, [0] * item.tokens, decodes, item.samples)


def _fitted(features: Floats, took: Floats) -> Floats:
    """Least squares of the relative error, without a feature that would take less than no time."""
    weights = 1.0 / np.maximum(took, max(1.0, float(np.median(took)) / 10))
    used = [column for column in range(features.shape[1]) if features[:, column].any()]
    found = np.zeros(features.shape[1])
    while used:
        solved, *_ = np.linalg.lstsq(features[:, used] * weights[:, None], took * weights, rcond=None)
        if solved.min() >= 0:
            found[used] = solved
            return found
        del used[int(np.argmin(solved))]
    return found
