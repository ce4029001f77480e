"""How long simulated steps take: always the same, as the cost model says, or as if something cost nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from headway.cost.attention import Chunk, append_alike, read_once
from headway.cost.timing import Deployment
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, StepPlan, work_of
from headway.policy.step.step_time import StepWork

CONTEXT = 16
MOST_KNOWN = 2_000  # steps, and as many before them: few more fit in a processor's cache
_NO_WORK = StepWork()


class Timing(Protocol):
    """Says when the parts of a step are done."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """The times of a step that was planned at `now`."""


@runtime_checkable
class DecodeTiming(Timing, Protocol):
    """A timing that needs no plan of a step in which all sequences decode."""

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        """The times of a step in which all sequences decode, as times() gives them.

        Args:
            contexts: the tokens that each sequence has computed; a call costs time for each.
        """


@runtime_checkable
class BesideTiming(DecodeTiming, Protocol):
    """A timing that needs no parts in the plan of a step for sequences that decode beside those of the plan."""

    def times_beside(self, plan: StepPlan, beside: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        """The times of a step, as times() gives them.

        Args:
            plan: with the work of the whole step.
            beside: the work of the sequences beside the plan.
            contexts: the tokens that each of these has computed; a call costs time for each.
        """


@runtime_checkable
class ForeseenTiming(DecodeTiming, Protocol):
    """A timing that may be asked for steps that are not taken after all: it always says the same of a step."""

    def next_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int, most: int) -> list[StepTimes]:
        """The times of the steps from this one on, at least of one and at most of so many.

        Each is planned when the one before has ended, and has a token more of each sequence in its context.
        """


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every step takes the same time. Nanoseconds."""

    step_ns: int

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return StepTimes(now, now + self.step_ns, now + self.step_ns)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return StepTimes(now, now + self.step_ns, now + self.step_ns)

    def next_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int, most: int) -> list[StepTimes]:
        took = self.step_ns
        return [StepTimes(now + at * took, now + (at + 1) * took, now + (at + 1) * took) for at in range(most)]


@dataclass(slots=True)
class Predicted:
    """Steps take as long as the cost model says of a deployment.

    Sequences that decode count as one chunk of their mean context, apart by the windows that they have filled: between
    two window sizes a decode's work is linear in its context. The mean is rounded to multiples of CONTEXT, so
    that most steps are alike to one before, and are not computed again.
    """

    deployment: Deployment
    cached: int = 0  # tokens that each sequence has before its own, in the prefix cache
    alike: int = 1  # sequences that each one stands for
    _windows: list[int] = field(init=False)
    _known: dict[tuple[Chunk, ...], tuple[int, int, int]] = field(init=False, default_factory=dict)
    _known_before: dict[tuple[Chunk, ...], tuple[int, int, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        windows = self.deployment.shape.sliding_windows
        self._windows = sorted({window for window in windows if window is not None})

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """The host's time comes before the step is launched."""
        return self.times_beside(plan, _NO_WORK, list, now)

    def times_beside(self, plan: StepPlan, beside: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        repeated = plan.work.repeated_context
        return self.times_of(tuple(self.chunks(plan.scheduled, repeated, beside, contexts)), now)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        if self._windows:
            decodes = self._decodes([each + self.cached for each in contexts()], work.repeated_context)
            return self.times_of(tuple(decodes), now)
        count = work.decode_tokens
        context = work.decode_context + count * (self.cached - 1)
        return self.times_of((self._decodes_of(count, context, work.repeated_context),), now)

    def next_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int, most: int) -> list[StepTimes]:
        steps: list[StepTimes] = []
        count, context, repeated = work.decode_tokens, work.decode_context, work.repeated_context
        of_each = [each + self.cached for each in contexts()] if self._windows else []
        context += count * (self.cached - 1)
        parts, alike_until = (0, 0, 0), -1  # steps up to that context are as long as the one before
        for number in range(most):
            if of_each:
                parts = self._known_parts(tuple(self._decodes([each + number for each in of_each], repeated)))
            elif context > alike_until:
                chunk = self._decodes_of(count, context, repeated)
                parts, alike_until = self._known_parts((chunk,)), (chunk.context + CONTEXT // 2) * count - 1
            launched, computed = now + parts[0], now + parts[0] + parts[1]
            now, context = computed + parts[2], context + count
            steps.append(StepTimes(launched, computed, now))
        return steps

    def times_of(self, chunks: tuple[Chunk, ...], now: int) -> StepTimes:
        """The times of a step of these chunks."""
        return _times(self._known_parts(chunks), now)

    def _known_parts(self, chunks: tuple[Chunk, ...]) -> tuple[int, int, int]:
        parts = self._known.get(chunks)
        if parts is None:
            if len(self._known) >= MOST_KNOWN:
                self._known_before, self._known = self._known, {}
            parts = self._known[chunks] = self._known_before.get(chunks) or self._parts(chunks)
        return parts

    def _of_all(self, chunks: tuple[Chunk, ...]) -> Sequence[Chunk]:
        """The chunks with the sequences that each one stands for."""
        return chunks if self.alike == 1 else [replace(each, sequences=self.alike * each.sequences) for each in chunks]

    def _parts(self, chunks: tuple[Chunk, ...]) -> tuple[int, int, int]:
        """Nanoseconds of the host, of the forward pass, and of sampling."""
        host_s, device_s, sampling_s = self.deployment.step_s(self._of_all(chunks))
        return round(host_s * 1e9), round((device_s - sampling_s) * 1e9), round(sampling_s * 1e9)

    def chunks(
        self,
        scheduled: list[ScheduledSequence],
        repeated: int = 0,
        beside: StepWork = _NO_WORK,
        contexts_beside: Callable[[], list[int]] = list,
    ) -> list[Chunk]:
        """The work of a step as the cost model takes it.

        Args:
            repeated: the step's StepWork.repeated_context.
            beside: the work of further sequences, which decode beside those scheduled.
            contexts_beside: the tokens that each of these has computed.
        """
        cached = self.cached
        contexts = [item.start + cached for item in scheduled if item.decoding and item.samples == 1]
        chunks: list[Chunk] = []
        if len(contexts) < len(scheduled):
            for item in scheduled:
                if not item.decoding or item.samples > 1:
                    rows = min(len(item.token_ids), item.samples + item.logit_rows)
                    append_alike(chunks, Chunk(len(item.token_ids), item.start + cached, rows))
        if self._windows:
            contexts += [each + cached for each in contexts_beside()]
            return self._decodes(contexts, repeated) + chunks
        if not (count := len(contexts) + beside.decode_tokens):
            return chunks
        context = sum(contexts) + beside.decode_context + beside.decode_tokens * (cached - 1)
        return [self._decodes_of(count, context, repeated / count * count), *chunks]

    def _decodes(self, contexts: list[int], repeated: int) -> list[Chunk]:
        """A chunk for the decodes between two sizes of windows."""
        alike: dict[int, list[int]] = {}
        for context in contexts:
            alike.setdefault(bisect_right(self._windows, context), []).append(context)
        share = repeated / len(contexts) if repeated else 0.0
        return [self._decodes_of(len(each), sum(each), share * len(each)) for each in alike.values()]

    def _decodes_of(self, count: int, context: int, repeated: float) -> Chunk:
        """The decodes of so many sequences with so many tokens in all, as one chunk.

        What some of them have in common counts as if all had, and less of it, so that as much is not read again.
        """
        mean = round(context / count / CONTEXT) * CONTEXT
        common = self.cached + (int(repeated / (count - 1)) if count > 1 and repeated else 0)
        return Chunk(1, mean, 1, count, min(mean, read_once(common)))


def _times(parts: tuple[int, int, int], now: int) -> StepTimes:
    """The times of a step that is planned now, of the nanoseconds of the host, the forward pass and the sampling."""
    launched, forward, sampling = now + parts[0], parts[1], parts[2]
    return StepTimes(launched, launched + forward, launched + forward + sampling)


@dataclass(slots=True)
class Staged(Predicted):
    """The steps of all batches of a pipeline: each goes through the slowest stage after those planned before it."""

    stages_ns: int = field(init=False, default=0)  # how long stages were busy, all together
    _free_ns: int = field(init=False, default=0)  # the slowest stage
    _paces: dict[tuple[Chunk, ...], int] = field(init=False, default_factory=dict)

    def next_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int, most: int) -> list[StepTimes]:
        return [self.decode_times(work, contexts, now)]  # another batch's step may come before the one behind it

    def times_of(self, chunks: tuple[Chunk, ...], now: int) -> StepTimes:
        begun = max(now, self._free_ns)
        if chunks not in self._paces:
            self._paces[chunks] = round(1e9 * self.deployment.pace(self.deployment.step(self._of_all(chunks))))
        self._free_ns = begun + self._paces[chunks]
        times = Predicted.times_of(self, chunks, begun)
        self.stages_ns += times.sampled_ns - begun
        return times


@dataclass(slots=True)
class _PartialTiming(ABC):
    """Steps take as long as `timing` says of steps with other prompts in them."""

    timing: DecodeTiming

    @abstractmethod
    def _parts(self, plan: StepPlan) -> list[ScheduledSequence]:
        """The parts of the plan that take time."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        parts = self._parts(plan)
        return self.timing.times(replace(plan, scheduled=parts, work=work_of(parts)), now)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self.timing.decode_times(work, contexts, now)


class DecodesFirst(_PartialTiming):
    """No sequence waits for another's prompt: a step takes as long as its decodes, or as its longest prompt chunk."""

    def _parts(self, plan: StepPlan) -> list[ScheduledSequence]:
        decodes = [item for item in plan.scheduled if item.decoding]
        return decodes or [max(plan.scheduled, key=lambda item: item.num_tokens)]


class CachedPrompts(_PartialTiming):
    """Only the last token of each prompt chunk takes time, as if the others were in the prefix cache."""

    def _parts(self, plan: StepPlan) -> list[ScheduledSequence]:
        return [item if item.decoding else _last_token(item) for item in plan.scheduled]


@dataclass(slots=True)
class ReceivedPrompts(_PartialTiming):
    """Only the last token of each prompt takes time, as another server computed it, unless it was preempted here."""

    preempted: set[int] = field(default_factory=set)  # seq_ids

    def _parts(self, plan: StepPlan) -> list[ScheduledSequence]:
        lost = self.preempted
        lost.update(plan.preempted)
        return [item if item.decoding or item.seq_id in lost else _last_token(item) for item in plan.scheduled]


def _last_token(chunk: ScheduledSequence) -> ScheduledSequence:
    start = chunk.start + chunk.num_tokens - 1
    return ScheduledSequence(
        chunk.seq_id, start, chunk.token_ids[-1:], False, min(1, chunk.samples), min(1, chunk.logit_rows)
    )
