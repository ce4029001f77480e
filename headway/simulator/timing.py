"""How long simulated steps take: always the same, as the cost model says, or as if something cost nothing."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment
from headway.cost.work import Operation
from headway.policy.accounting import StepTimes
from headway.policy.plan import ScheduledSequence, StepPlan, work_of

CONTEXT = 16
MOST_KNOWN = 10_000


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
    two window sizes a decode's work is linear in its context. The mean is rounded to multiples of CONTEXT, so
    that most steps are alike to one before, and are not computed again.
    """

    deployment: Deployment
    _windows: list[int] = field(init=False)
    _known: dict[tuple[Chunk, ...], tuple[int, int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        windows = self.deployment.shape.sliding_windows
        self._windows = sorted({window for window in windows if window is not None})

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times(). The host's time comes before the step is launched."""
        chunks = tuple(self.chunks(plan.scheduled))
        parts = self._known.get(chunks)
        if parts is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            parts = self._known[chunks] = self._parts(chunks)
        host_ns, forward_ns, sampling_ns = parts
        return StepTimes(now + host_ns, now + host_ns + forward_ns, now + host_ns + forward_ns + sampling_ns)

    def _parts(self, chunks: tuple[Chunk, ...]) -> tuple[int, int, int]:
        """Nanoseconds of the host, of the forward pass, and of sampling."""
        step = self.deployment.step(chunks)
        sampling_s = sum([part.seconds for part in step.parts if part.name == Operation.SAMPLING])
        return round(step.host_s * 1e9), round((step.device_s - sampling_s) * 1e9), round(sampling_s * 1e9)

    def chunks(self, scheduled: list[ScheduledSequence]) -> list[Chunk]:
        """The work of a step as the cost model takes it."""
        contexts, chunks = [item.start for item in scheduled if item.decoding and item.samples == 1], list[Chunk]()
        if len(contexts) < len(scheduled):
            for item in scheduled:
                if not item.decoding or item.samples > 1:
                    rows = min(len(item.token_ids), item.samples + item.logit_rows)
                    chunks.append(Chunk(len(item.token_ids), item.start, rows))
        return self._decodes(contexts) + chunks

    def _decodes(self, contexts: list[int]) -> list[Chunk]:
        alike: dict[int, list[int]] = {0: contexts}
        if self._windows:
            alike = {}
            for context in contexts:
                alike.setdefault(bisect_right(self._windows, context), []).append(context)
        return [
            Chunk(1, round(sum(each) / len(each) / CONTEXT) * CONTEXT, 1, len(each)) for each in alike.values() if each
        ]


@dataclass(frozen=True, slots=True)
class DecodesFirst:
    """Nobody waits for another's prompt: a step takes as long as its decodes alone, or as its longest prompt chunk."""

    timing: Timing

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times()."""
        decodes = [item for item in plan.scheduled if item.decoding]
        alone = decodes or [max(plan.scheduled, key=lambda item: item.num_tokens)]
        return self.timing.times(replace(plan, scheduled=alone, work=work_of(alone)), now)


@dataclass(frozen=True, slots=True)
class OfCachedPrompts:
    """Of each chunk of a prompt only the last token takes time, as if the others were in the prefix cache."""

    timing: Timing

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times()."""
        items = [item if item.decoding else _last_token(item) for item in plan.scheduled]
        return self.timing.times(replace(plan, scheduled=items, work=work_of(items)), now)


def _last_token(chunk: ScheduledSequence) -> ScheduledSequence:
    start = chunk.start + chunk.num_tokens - 1
    return ScheduledSequence(
        chunk.seq_id, start, chunk.token_ids[-1:], False, min(1, chunk.samples), min(1, chunk.logit_rows)
    )
