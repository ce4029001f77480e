"""The engine without its process: it takes requests in, runs steps and gives outputs. Single-threaded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headway.engine.counts import StepCounts, Stepped
from headway.engine.drafter import Speculator
from headway.engine.endings import UNSERVED, why_unserved
from headway.engine.executor import Executor, StepOutcome
from headway.engine.messages import AddRequest, EngineOutputs, PromptLogprobs, SequenceOutput, SequenceTimings
from headway.engine.pooling import Part, vector_of
from headway.engine.quarantine import Quarantine
from headway.engine.unready import POLL_MS, Unready, waits_in
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Sequence, check, sequences_of
from headway.policy.step.scheduler import Scheduler

if TYPE_CHECKING:
    from headway.engine.beams import BeamSearches
    from headway.engine.offload import Offload
    from headway.engine.roofline import StepRoofline

HEADLESS = "this checkpoint has no output layer; it gives embeddings only"
FAILED = "the engine failed on this request ({}); see the server's log"


class EngineCore:
    """Joins the scheduler and the executor; a loop calls `advance()`, or `step()` for metrics too, while `has_work`.

    Args:
        speculator: has the scheduler try drafts; None for no drafts.
        roofline: knows the least time of steps; None where nobody does.
        offload: loads what is kept of a prompt beyond the pool; None where nothing is.

    Attributes:
        unready: requests that wait for their grammars, or for what is loaded of their prompts.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], int] = time.monotonic_ns,
        speculator: Speculator | None = None,
        roofline: StepRoofline | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.speculator = speculator
        self.offload = offload
        self._clock = clock
        self._quarantine = Quarantine(executor, clock, lambda seq_id: self._sequences[seq_id].request_id)
        self._live: dict[str, dict[int, Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}  # all sequences by seq_id
        self._prompt_logprobs: dict[int, list[PromptLogprobs]] = {}  # by seq_id, until its first output
        self._pooled: dict[int, Part] = {}  # by seq_id, until the vector is whole
        self._pending: list[SequenceOutput] = []
        self._beams: BeamSearches | None = None  # made with the first of them
        self.unready = Unready()
        self._counts = StepCounts(scheduler, roofline)
        self._stepped: Stepped | None = None  # the last step, if one was run
        self._received = self._steps = self._wait_until_ns = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or bool(self.unready) or self.scheduler.has_work

    @property
    def waits_ms(self) -> int:
        """How long the next step is put off, unless a request comes."""
        if self.unready and not self._pending and not self.scheduler.has_work:
            return POLL_MS
        left_ns = self._wait_until_ns - self._clock() if self._wait_until_ns and not self._pending else 0
        return max(0, -(-left_ns // 1_000_000))

    # --- requests -----------------------------------------------------------------------------------

    def add(self, request: AddRequest) -> None:
        """Queue every choice of a request; one that can't be served is answered with an error output."""
        self._received += 1
        limit = self.scheduler.config.max_model_len
        if request.seed is None:
            request.seed = secrets.randbits(63)
        try:
            if request.request_id in self._live or request.request_id in self.unready:
                raise ValueError(f"a request with id {request.request_id!r} is running already")
            check(request, limit, self.executor.vocab_size)
            if request.pooling is None and not self.executor.generates:
                raise ValueError(HEADLESS)
            if request.params.use_beam_search:
                self._check_beams(request)
        except ValueError as error:
            self._refuse(request, str(error))
            return
        asked = request.params.structured_outputs
        compiled = None if asked is None else self.executor.prepare(asked.text, request.eos_token_ids)
        if compiled is not None:
            self.unready[request.request_id] = compiled, request, self._clock()
            return
        if self.offload is None or not self._loads(request):
            self._queue(request)

    def _loads(self, request: AddRequest, began: int = 0) -> bool:
        """Whether the request waits for something that is loaded now."""
        assert self.offload is not None
        loading = self.offload.begin(request)
        if loading is not None:
            self.unready[request.request_id] = loading, request, began or self._clock()
        return loading is not None

    def _check_beams(self, request: AddRequest) -> None:
        from headway.engine.beams import BeamSearches, check_beams

        check_beams(request, self.scheduler, self.executor.vocab_size)
        if self._beams is None:
            self._beams = BeamSearches(self.scheduler, self._output, self._forget, self._join, self._drop)

    def _join(self, sequence: Sequence) -> None:
        """Take note of a sequence that has forked from another of its request."""
        self._live[sequence.request_id][sequence.index] = sequence
        self._sequences[sequence.seq_id] = sequence

    def _queue(self, request: AddRequest, unready_ns: int = 0) -> None:
        """Queue the choices of a checked request, which was unready from `unready_ns` on, unless that is 0."""
        sequences = sequences_of(request, self.scheduler.config.max_model_len, self.scheduler.config.classes)
        now = self._clock()
        for sequence in sequences:
            if unready_ns:
                sequence.ledger.mark(Phase.TRANSPORT, unready_ns)
                sequence.ledger.mark(waits_in(request), now)
            self.scheduler.add(sequence, now)
        if self.offload is not None:
            self.offload.give(request.request_id, sequences[0])
        self._live[request.request_id] = {s.index: s for s in sequences}
        self._sequences.update((s.seq_id, s) for s in sequences)
        if request.params.use_beam_search and self._beams is not None:
            self._beams.add(request, sequences[0])

    def _queue_ready(self) -> None:
        """Queue the requests that have what they waited for; end those with a grammar that cannot be compiled."""
        for request, began, error in self.unready.take_ready():
            if error is not None:
                self._refuse(request, f"structured_outputs: {error}")
            elif self.offload is None or not self._loads(request, began):
                self._queue(request, began)

    def _refuse(self, request: AddRequest, why: str) -> None:
        self._pending += [
            SequenceOutput(request.request_id, choice.index, [], finish_reason="error", error=why)
            for choice in request.choices
        ]

    def abort(self, request_id: str, index: int = -1) -> None:
        """Drop one choice, or all with index -1. Unknown ids are fine: the request may just have finished.

        A single choice gets a last output: a stop string was found in it, and its ledger is wanted. When all are
        dropped, nobody listens any more.
        """
        if request_id in self.unready and (dropped := self.unready.abort(request_id, index, self._clock())) is not None:
            self._pending.append(dropped)
        if self.offload is not None and request_id not in self.unready:
            self.offload.forget(request_id)
        if self._beams is not None and request_id in self._beams:
            told = self._beams.abort(request_id, self._clock())
            self._pending += told if index != -1 else []
        for sequence in list(self._live.get(request_id, {}).values()):
            if index not in (-1, sequence.index):
                continue
            self.scheduler.abort(sequence, self._clock())
            last = self._output(sequence, [])
            if index != -1:
                self._pending.append(last)

    def _forget(self, sequence: Sequence) -> None:
        self._drop(sequence.seq_id)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        del self._sequences[sequence.seq_id]
        choices = self._live[sequence.request_id]
        choices.pop(sequence.index, None)
        if not choices:
            self._live.pop(sequence.request_id, None)

    def _drop(self, seq_id: int) -> None:
        """Forget a sequence, and what was computed of it."""
        self.executor.forget(seq_id)
        self._prompt_logprobs.pop(seq_id, None)
        self._pooled.pop(seq_id, None)

    # --- steps --------------------------------------------------------------------------------------

    def step(self) -> EngineOutputs:
        """Do as advance() does, and say what is counted of the step."""
        outputs, stepped = self.advance(), self._stepped
        stats = self._counts.take(stepped, self._received)
        if self.speculator is not None and stepped is not None:
            self.speculator.count(stepped.plan, stepped.changed, stats)
        return EngineOutputs(outputs, stats, self._clock())

    def idle(self) -> EngineOutputs:
        """The state of an engine that has nothing to do, for metrics."""
        return EngineOutputs([], self._counts.take(None, self._received), self._clock())

    def advance(self) -> list[SequenceOutput]:
        """Run one step; its outputs, of which there may be none where nothing could run.

        Raises:
            EngineFault: the step failed, and no single request is at fault.
        """
        outputs = self._advance()
        return self._beams.end(outputs, self._clock()) if self._beams else outputs

    def _advance(self) -> list[SequenceOutput]:
        if self.unready:
            self._queue_ready()
        outputs, self._pending = self._pending, []
        self._stepped = None
        if self.speculator is not None:
            self.speculator.propose()
        plan = self.scheduler.schedule(self._clock())
        self._wait_until_ns = plan.wait_until_ns
        for seq_id in plan.expired:
            outputs.append(self._output(self._sequences[seq_id], []))
        for seq_id in plan.preempted:
            self._drop(seq_id)
        if not plan.scheduled:
            return outputs + self._beams.go_on(plan, [], self._clock()) if self._beams else outputs
        began = self._clock()
        try:
            outcome = self.executor.run(plan)
        except Exception as error:
            outcome = self._quarantine.run_again(plan, error, began, self._steps)
            outputs += self._take_out(plan, outcome)
        self._steps += 1
        if outcome.prompt_logprobs or outcome.pooled:
            self._gather(outcome)
        if self._beams:
            self._beams.take(outcome)
        changed = self.scheduler.complete(plan, outcome.tokens, outcome.times)
        told = self._beams.only_others(changed) if self._beams else changed
        for seq_id, drafts in outcome.drafts.items():
            self.scheduler.propose(seq_id, drafts)
        outputs += [self._output(sequence, new, outcome) for sequence, new in told]
        if self.speculator is not None:
            self.speculator.step_ended(plan, changed)
        if self._beams:
            outputs += self._beams.go_on(plan, changed, outcome.times.sampled_ns)
        self._stepped = Stepped(plan, outcome, changed)
        return outputs

    def _gather(self, outcome: StepOutcome) -> None:
        """Keep what belongs to prompts until the first output of their sequences."""
        for seq_id, part in outcome.prompt_logprobs.items():
            if seq_id in self._sequences:
                self._prompt_logprobs.setdefault(seq_id, []).extend(part)
        for seq_id, pooled in outcome.pooled.items():
            if seq_id in self._sequences:
                self._pooled[seq_id] = self._pooled.get(seq_id, 0.0) + pooled

    def _take_out(self, plan: StepPlan, outcome: StepOutcome) -> list[SequenceOutput]:
        """End all choices of the requests that made a step fail."""
        faults = {self._sequences[seq_id].request_id: name for seq_id, name in outcome.faults.items()}
        failed = [sequence for request_id in faults for sequence in self._live[request_id].values()]
        self.scheduler.take_out(failed, plan, outcome.failed_since_ns, outcome.times.sampled_ns)
        whys = [FAILED.format(faults[sequence.request_id]) for sequence in failed]
        return [self._output(sequence, [], None, why) for sequence, why in zip(failed, whys, strict=True)]

    def _output(
        self, sequence: Sequence, new: list[int], outcome: StepOutcome | None = None, error: str | None = None
    ) -> SequenceOutput:
        """What is said of a sequence after a step that has given it new tokens or has ended it."""
        seq_id, reason = sequence.seq_id, sequence.finish_reason
        output = SequenceOutput(
            sequence.request_id,
            sequence.index,
            new,
            reason,
            cached_tokens=sequence.cached_tokens,
            drafts=sequence.drafts,
            accepted_drafts=sequence.accepted_drafts,
        )
        if outcome is not None and (outcome.logprobs or self._prompt_logprobs):
            logprobs = outcome.logprobs.get(seq_id)
            output.logprobs = None if logprobs is None else logprobs[: len(new)]
            output.prompt_logprobs = self._prompt_logprobs.pop(seq_id, None)
        if reason is None:
            return output
        if reason is FinishReason.STOP and sequence.pooling is None:
            output.stop_token_id = sequence.tokens[-1]
        elif reason is FinishReason.STOP and sequence.pooling is not None:
            output.vector = vector_of(sequence.pooling, self._pooled[seq_id], sequence.prompt_len)
        elif reason in UNSERVED:
            output.error = error or (outcome.reasons.get(seq_id) if outcome is not None else None)
            output.error = output.error or why_unserved(sequence, self.scheduler.config.max_queue_time)
            output.retry_after_s = sequence.retry_after_s
        ledger = sequence.ledger
        output.timings = SequenceTimings(
            {str(phase): ns for phase, ns in ledger.phases_ns.items() if ns},
            ledger.last_ns,
            sequence.steps,
            sequence.preemptions,
            sequence.yielded,
            sequence.passed_over,
        )
        self._forget(sequence)
        return output

    def check(self) -> None:
        """Verify the integrity of the KV pool, and of a draft model's.

        Raises:
            RuntimeError: naming the block that leaked.
        """
        for _ in self.check_by_parts():
            pass

    def check_by_parts(self) -> Iterator[None]:
        """Do check() in parts of less than a millisecond, for an engine that has fallen idle."""
        yield from self.scheduler.check_by_parts()
        if self.speculator is not None:
            yield from self.speculator.check_by_parts()
