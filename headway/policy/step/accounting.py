"""Divides the time of a step among its sequences, and says what each of them spent it on.

A mixed step takes longer for everybody in it than it would without the prompts of the others. So each sequence's
compute is the share of the forward pass that the step would have taken without the others' prompt tokens, as
`step_time` predicts it, and the rest is stall. Compute is rounded down to whole nanoseconds and stall takes the
remainder, so that the parts sum to the step exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.plan import ScheduledSequence, work_of
from headway.policy.step.request import Sequence, Status
from headway.policy.step.step_time import StepTimeModel, StepWork

LEARNT_DECODES = 8
Part = tuple[Sequence, ScheduledSequence]
_PARTS_OF_DECODES = (Phase.SCHEDULE, Phase.DECODE_COMPUTE, Phase.SAMPLING)


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """Readings of the monotonic clock around a step, in nanoseconds."""

    launched_ns: int  # the forward pass began
    computed_ns: int  # its logits were there
    sampled_ns: int  # its tokens were known


class Accounting:
    """Keeps the ledgers of all sequences in the engine.

    Sequences that wait in the queue, or decode in every step, spend the same nanoseconds on the same phases. So there
    is a ledger for all that wait, and one for all that decode: a sequence notes its phases when it joins and is given
    what was added when it leaves, which costs nothing for the steps between. Only those with a prompt under way are
    marked one by one. `stall_ns` adds up the stalls of all sequences by cause since it was last taken.

    Args:
        step_time: divides a step among its sequences, and is told how long each step took.
    """

    def __init__(self, step_time: StepTimeModel) -> None:
        self.step_time = step_time
        self.queue_reason = Phase.QUEUE_CAPACITY
        self.stall_ns = Counter[Phase]()
        self._queue = Ledger()
        self._decode = Ledger()
        self._on_decode_clock = 0
        self._steps = 0

    def take_stalls(self) -> Counter[Phase]:
        taken, self.stall_ns = self.stall_ns, Counter()
        return taken

    # --- joining and leaving the clocks -------------------------------------------------------------

    def begin_waiting(self, sequence: Sequence, now: int) -> None:
        """A new sequence waits; what passed since its hand-over was transport."""
        sequence.ledger.mark(Phase.TRANSPORT, now)
        self._queue.mark(self.queue_reason, now)
        sequence.clock_marks = dict(self._queue.phases_ns)

    def begin_preempted(self, sequence: Sequence, now: int) -> None:
        """A running sequence waits again."""
        self.leave(sequence, now)
        if sequence.output_len == 0:
            self.begin_waiting(sequence, now)

    def begin_lacking(self, sequence: Sequence, now: int) -> None:
        """A waiting sequence lacks a slot for its adapter from now on, and leaves the clock of those that wait."""
        if sequence.clock_marks is not None:
            self._queue.mark(self.queue_reason, now)
            sequence.ledger.mark_parts(self._queue.phases_ns, sequence.clock_marks)
            sequence.clock_marks = None

    def end_lacking(self, sequence: Sequence, now: int) -> None:
        """There is a slot for it, and it waits like others."""
        if sequence.output_len == 0:
            sequence.ledger.mark(Phase.QUEUE_ADAPTER, now)
            self.begin_waiting(sequence, now)

    def leave(self, sequence: Sequence, now: int) -> None:
        """A waiting sequence is admitted, or one has ended: bring its ledger to `now`, whichever clock it was on."""
        marks, sequence.clock_marks = sequence.clock_marks, None
        if sequence.status is Status.WAITING:
            if marks is not None:
                self._queue.mark(self.queue_reason, now)
                sequence.ledger.mark_parts(self._queue.phases_ns, marks)
            elif sequence.slot_wanted_since >= 0 and sequence.output_len == 0:
                sequence.ledger.mark(Phase.QUEUE_ADAPTER, now)
            elif sequence.preemptions:
                self._stall(sequence, Phase.DECODE_STALL_PREEMPTED, now)
        elif marks is not None:
            self._on_decode_clock -= 1
            self._decode.mark(Phase.SCHEDULE, now)
            sequence.ledger.mark_parts(self._decode.phases_ns, marks)
        sequence.ledger.mark(Phase.SCHEDULE, now)

    def so_far(self, sequence: Sequence, now: int) -> tuple[Phase, dict[Phase, int]]:
        """Where a sequence is, and its phases in nanoseconds until now. Nothing is changed by it.

        The time since the last reading of its clock goes to where it is; a step that ends later may divide it
        differently.
        """
        found = Ledger(sequence.ledger.last_ns)
        found.phases_ns = dict(sequence.ledger.phases_ns)
        waits, marks = sequence.status is Status.WAITING, sequence.clock_marks
        if marks is not None:
            found.mark_parts((self._queue if waits else self._decode).phases_ns, marks)
        if waits:
            phase = self.queue_reason if marks is not None else Phase.DECODE_STALL_PREEMPTED
            if sequence.slot_wanted_since >= 0 and sequence.output_len == 0:
                phase = Phase.QUEUE_ADAPTER
            found.mark(phase, now)
            return phase, found.phases_ns
        found.mark(Phase.SCHEDULE, now)
        return (Phase.DECODE_COMPUTE if sequence.output_len else Phase.PREFILL_COMPUTE), found.phases_ns

    def _stall(self, sequence: Sequence, phase: Phase, until: int) -> None:
        length = until - sequence.ledger.last_ns
        if length > 0:
            sequence.ledger.mark(phase, until)
            self.stall_ns[phase] += length

    # --- a step -------------------------------------------------------------------------------------

    def queue_stands_at(self, reason: Phase, now: int) -> None:
        """The scheduler stopped admitting for `reason`; the time before was spent on the reason before."""
        self._queue.mark(self.queue_reason, now)
        self.queue_reason = reason

    def record_retry(self, running: Iterable[Sequence], began: int, ended: int) -> None:
        """A step failed and was run again in parts in this time, which is lost for everybody in the batch."""
        self._decode.mark(Phase.SCHEDULE, began)
        self._decode.mark(Phase.STEP_RETRY, ended)
        self.stall_ns[Phase.STEP_RETRY] += (ended - began) * self._on_decode_clock
        for sequence in running:
            if sequence.clock_marks is None:
                sequence.ledger.mark(Phase.SCHEDULE, began)
                self._stall(sequence, Phase.STEP_RETRY, ended)

    def record_drafting(self, running: Iterable[Sequence], began: int, ended: int) -> None:
        """Drafts were made in this time; everybody in the batch waits for them."""
        self._decode.mark(Phase.SCHEDULE, began)
        self._decode.mark(Phase.DRAFT, ended)
        for sequence in running:
            if sequence.clock_marks is None:
                sequence.ledger.mark(Phase.SCHEDULE, began)
                self._stall(sequence, _stall_of(sequence), ended)

    def record_step(self, parts: list[Part], work: StepWork, idle: list[Sequence], times: StepTimes) -> None:
        """Divide a finished step among the sequences that had a part in it, and the idle ones, which had none.

        Call it before the results are applied, while each sequence is still as it was in the step.

        Args:
            parts: in the step's order; those that decoded in the step before may all be left out.
            work: the work of the whole step.
        """
        forward = times.computed_ns - times.launched_ns
        self._advance_decode_clock(work, forward, times)
        off_clock: list[Part] = []
        if work.tokens > self._on_decode_clock or idle:
            off_clock = [part for part in parts if part[0].clock_marks is None]
        nobody_samples = bool(off_clock) and not (work.decode_tokens or any(item.samples for _, item in parts))
        for sequence, item in off_clock:
            self._mark_prefill(sequence, item, work, forward, times)
            if nobody_samples:
                sequence.ledger.mark(Phase.SCHEDULE, times.sampled_ns)
            self._stall(sequence, _stall_of(sequence), times.sampled_ns)
        for sequence in idle:
            left_out = sequence.is_decoding
            self._stall(sequence, Phase.DECODE_STALL_POLICY if left_out else _stall_of(sequence), times.sampled_ns)
        if forward > 0:  # learn from every step with a prompt in it, and from one in LEARNT_DECODES of the others
            self._steps += 1
            if work.prefill_tokens or self._steps % LEARNT_DECODES == 0:
                self.step_time.observe(work, forward)

    def record_decodes(self, count: int, context: int, steps: Iterable[StepTimes]) -> None:
        """Record steps in which all running sequences decode, as they did in the step before.

        Args:
            count: how many sequences.
            context: keys that they read in the first step; in each further one they read `count` more.
        """
        parts, last_ns = [0, 0, 0], self._decode.last_ns
        for number, times in enumerate(steps):
            forward = times.computed_ns - times.launched_ns
            parts[0] += times.launched_ns - last_ns
            parts[1] += forward
            parts[2] += times.sampled_ns - times.computed_ns
            last_ns = times.sampled_ns
            if forward > 0:
                self._steps += 1
                if self._steps % LEARNT_DECODES == 0:
                    self.step_time.observe(StepWork(0, count, 0, context + number * count), forward)
        self._decode.mark_parts(dict(zip(_PARTS_OF_DECODES, parts, strict=True)))

    def all_decode(self, running: int) -> bool:
        """Whether so many running sequences have all been decoding since a step before."""
        return self._on_decode_clock == running

    def join_decode_clock(self, sequence: Sequence) -> None:
        """The sequence decodes in every step after this one."""
        sequence.clock_marks = dict(self._decode.phases_ns)
        self._on_decode_clock += 1

    def _advance_decode_clock(self, work: StepWork, forward: int, times: StepTimes) -> None:
        clock = self._decode
        clock.mark(Phase.SCHEDULE, times.launched_ns)
        if work.prefill_tokens and work.decode_tokens:
            self._divide_mixed(work, forward, times)
        elif work.drafts:
            self._mark_decodes(work, forward, forward, times.launched_ns)
        else:
            clock.mark(Phase.DECODE_COMPUTE, times.computed_ns)
        clock.mark(Phase.SAMPLING, times.sampled_ns)

    def _divide_mixed(self, work: StepWork, forward: int, times: StepTimes) -> None:
        """Divide a forward pass of decodes and prompts as those who decode have spent it."""
        prompts = forward  # where they end
        alone = StepWork(decode_tokens=work.decode_tokens, decode_context=work.decode_context)
        compute = int(forward * self.step_time.share_without(work, alone))
        if work.logit_rows:
            without_logits = self.step_time.share_without(work, replace(work, logit_rows=0))
            prompts = max(compute, int(forward * without_logits))
        self.stall_ns[Phase.DECODE_STALL_PREFILL] += (prompts - compute) * self._on_decode_clock
        self.stall_ns[Phase.DECODE_STALL_LOGPROBS] += (forward - prompts) * self._on_decode_clock
        self._mark_decodes(work, compute, forward, times.launched_ns)
        self._decode.mark(Phase.DECODE_STALL_PREFILL, times.launched_ns + prompts)
        self._decode.mark(Phase.DECODE_STALL_LOGPROBS, times.computed_ns)

    def _mark_decodes(self, work: StepWork, compute: int, forward: int, began: int) -> None:
        """Divide the decodes' part of a forward pass into that of newest tokens and that of the drafts behind them."""
        if work.drafts:
            tokens = work.decode_tokens - work.drafts
            newest = StepWork(decode_tokens=tokens, decode_context=work.decode_context * tokens // work.decode_tokens)
            alone = int(forward * self.step_time.share_without(work, newest))
            self._decode.mark(Phase.DECODE_COMPUTE, began + min(alone, compute))
            self._decode.mark(Phase.VERIFY, began + compute)
        else:
            self._decode.mark(Phase.DECODE_COMPUTE, began + compute)

    def _mark_prefill(
        self, sequence: Sequence, item: ScheduledSequence, work: StepWork, forward: int, times: StepTimes
    ) -> None:
        own = work_of([item])
        alone = replace(own, decode_tokens=work.decode_tokens, decode_context=work.decode_context)
        computed = times.launched_ns + int(forward * self.step_time.share_without(work, alone))
        sequence.ledger.mark(Phase.SCHEDULE, times.launched_ns)
        if item.decoding:
            sequence.ledger.mark(Phase.DECODE_COMPUTE, computed)
        elif sequence.output_len > 0:
            self._stall(sequence, Phase.DECODE_STALL_RECOMPUTE, computed)
        else:
            sequence.ledger.mark(Phase.PREFILL_COMPUTE, computed)
        self._stall(sequence, _stall_of(sequence), times.computed_ns)
        if item.samples:
            sequence.ledger.mark(Phase.SAMPLING, times.sampled_ns)


def _stall_of(sequence: Sequence) -> Phase:
    """The phase in which a sequence waits for others.

    It is a decode stall once the sequence has a token of output, also while its tokens are computed again.
    """
    return Phase.DECODE_STALL_PREFILL if sequence.output_len > 0 else Phase.PREFILL_STALL
