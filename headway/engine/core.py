"""The engine without its process: it takes requests in, runs steps and gives outputs. Single-threaded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from headway.engine.beams import SearchedRequest
from headway.engine.counts import StepCounts, Stepped
from headway.engine.endings import UNSERVED, why_unserved
from headway.engine.executor import Executor, StepOutcome
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest, EngineOutputs, PromptLogprobs, SequenceOutput, SequenceTimings
from headway.engine.pooling import Part, vector_of
from headway.engine.quarantine import Quarantine
from headway.engine.unready import POLL_MS, Unready, waits_in
from headway.policy.step.beam_group import check_beams
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import FinishReason, Sequence, check, sequences_of
from headway.policy.step.scheduler import Scheduler

if TYPE_CHECKING:
    from headway.engine.adapters import Adapters
    from headway.engine.ahead import StepsAhead
    from headway.engine.roofline import StepRoofline

HEADLESS = "this checkpoint has no output layer; it gives embeddings only"
GONE = "the adapter is not here any more, or its folder has changed; load it again"
FAILED = "the engine failed on this request ({}); see the server's log"


class EngineCore:
    """Joins the scheduler and the executor; a loop calls `advance()`, or `step()` for metrics too, while `has_work`.

    Args:
        roofline: knows the least time of steps; None where nobody does.
        steps: plans and runs steps ahead of each other; None for one after the other.

    Attributes:
        hooks: what takes part in steps: a Speculator, Handovers, Offload, AdapterLoads, each beam search under way.
        unready: requests that wait for their grammars, or for what another engine has computed.
        adapters: those that requests may have; None where there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], int] = time.monotonic_ns,
        hooks: Iterable[StepHooks] = (),
        roofline: StepRoofline | None = None,
        steps: StepsAhead | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.steps = steps
        self.hooks = list(hooks)
        self._clock = clock
        self._quarantine = Quarantine(executor, clock, lambda seq_id: self._sequences[seq_id].request_id)
        self._live: dict[str, dict[int, Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}  # all sequences by seq_id
        self._prompt_logprobs: dict[int, list[PromptLogprobs]] = {}  # by seq_id, until its first output
        self._pooled: dict[int, Part] = {}  # by seq_id, until the vector is whole
        self._pending: list[SequenceOutput] = []
        self.unready = Unready()
        self.adapters: Adapters | None = None
        self.roofline, self._counts = roofline, StepCounts(scheduler, roofline)
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
                check_beams(request, self.scheduler, self.executor.vocab_size)
            if request.adapter and (self.adapters is None or not self.adapters.knows(request.adapter)):
                raise ValueError(GONE)
        except ValueError as error:
            self._refuse(request, str(error))
            return
        asked = request.params.structured_outputs
        compiled = None if asked is None else self.executor.prepare(asked.text, request.eos_token_ids)
        if awaited := [*filter(None, [compiled, *[hook.awaited(request) for hook in self.hooks]])]:
            self.unready[request.request_id] = awaited, request, self._clock()
            return
        self._queue(request)

    def _join(self, sequence: Sequence) -> None:
        """Take note of a sequence that the scheduler knows."""
        self._live[sequence.request_id][sequence.index] = sequence
        self._sequences[sequence.seq_id] = sequence

    def _queue(self, request: AddRequest, began_waiting: int = 0) -> None:
        """Queue the choices of a checked request."""
        sequences = sequences_of(request, self.scheduler.config.max_model_len, self.scheduler.config.classes)
        now, self._live[request.request_id] = self._clock(), {}
        for sequence in sequences:
            if began_waiting:
                sequence.ledger.mark(Phase.TRANSPORT, began_waiting)
                sequence.ledger.mark(waits_in(request), now)
            self.scheduler.add(sequence, now)
            self._join(sequence)
        for hook in self.hooks:
            hook.queued(request, sequences)
        if request.params.use_beam_search:
            told = self._output, self._forget, self._join, self._drop
            self.hooks.append(SearchedRequest(request, sequences[0], self.scheduler, self.hooks, *told))

    def _queue_ready(self) -> None:
        """Queue the requests that wait no longer; end those with a grammar that cannot be compiled."""
        for request, began, error in self.unready.take_ready():
            if error is not None:
                self._refuse(request, f"structured_outputs: {error}")
                self._leave(request.request_id)
            else:
                self._queue(request, began)

    def _leave(self, request_id: str) -> None:
        for hook in self.hooks:
            hook.left(request_id)

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
        if request_id in self.unready:
            if (dropped := self.unready.abort(request_id, index, self._clock())) is not None:
                self._pending.append(dropped)
            if request_id not in self.unready:
                self._leave(request_id)
        for hook in [*self.hooks]:
            told = hook.abort(request_id, self._clock())
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
        for hook in self.hooks:
            hook.forget(sequence)
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
        if stepped is not None:
            for hook in self.hooks:
                hook.count(stepped.plan, stepped.changed, stats)
        return EngineOutputs(outputs, stats, self._clock())

    def idle(self) -> EngineOutputs:
        """The state of an engine that has nothing to do, for metrics."""
        return EngineOutputs([], self._counts.take(None, self._received), self._clock())

    def advance(self) -> list[SequenceOutput]:
        """Run one step; its outputs, of which there may be none where nothing could run.

        Raises:
            EngineFault: the step failed, and no single request is at fault.
        """
        if self.unready:
            self._queue_ready()
        outputs, self._pending, self._stepped = self._pending, [], None
        for hook in self.hooks:
            hook.before()
            outputs += [self._output(each, [], None, why) for each, why in hook.ends(self._clock())]
        plan = (self.scheduler.schedule if self.steps is None else self.steps.plan)(self._clock())
        for hook in self.hooks:
            hook.planned(plan, self._clock())
        self._wait_until_ns = plan.wait_until_ns
        for seq_id in plan.expired:
            outputs.append(self._output(self._sequences[seq_id], []))
        for seq_id in plan.preempted:
            self._drop(seq_id)
        changed = self._run(plan, outputs) if plan.scheduled else []
        for hook in [*self.hooks]:
            outputs = hook.after(plan, changed, outputs, self._clock())
        return outputs

    def _run(self, plan: StepPlan, outputs: list[SequenceOutput]) -> list[tuple[Sequence, list[int]]]:
        """Run a plan and apply what comes of it, and add to `outputs` what is said of it; what the step has changed."""
        began = self._clock()
        try:
            outcome = (self.executor if self.steps is None else self.steps).run(plan)
        except Exception as error:
            outcome = self._quarantine.run_again(plan, error, began, self._steps)
            outputs += self._take_out(plan, outcome)
        self._steps += 1
        if outcome.prompt_logprobs or outcome.pooled:
            self._gather(outcome)
        for hook in self.hooks:
            hook.computed(outcome)
        changed = self.scheduler.complete(plan, outcome.tokens, outcome.times)
        for seq_id, drafts in outcome.drafts.items():
            self.scheduler.propose(seq_id, drafts)
        outputs += [self._output(each, new, outcome) for each, new in changed if new or each.finish_reason is not None]
        self._stepped = Stepped(plan, outcome, changed)
        return changed

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
        for hook in self.hooks:
            hook.ended(sequence, output)
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
        for hook in self.hooks:
            yield from hook.check_by_parts()
