"""The engine without its process: it takes requests in, runs steps and gives outputs. Single-threaded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from headway.engine.drafter import Speculator
from headway.engine.executor import Executor, StepOutcome
from headway.engine.explaining import explanation
from headway.engine.memory_counts import MemoryCounts
from headway.engine.messages import (
    AddRequest,
    EngineOutputs,
    EngineStats,
    Explain,
    Explanation,
    PromptLogprobs,
    SequenceOutput,
    SequenceTimings,
)
from headway.engine.pooling import Part, vector_of
from headway.engine.quarantine import Quarantine
from headway.policy.admission.intake import check, sequences_of
from headway.policy.cache.preload import PreloadedPrompt, room_for
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler

if TYPE_CHECKING:
    from headway.engine.roofline import StepRoofline

NOT_NUMBERS = "the model's logits were not numbers (NaN) for this sequence; check the weights and the dtype"
HEADLESS = "this checkpoint has no output layer; it gives embeddings only"
FAILED = "the engine failed on this request ({}); see the server's log"
COMPILATION_POLL_MS = 2
# The longest step is predicted anew, and a step compared with the roofline, after so many steps.
_STEPS_OF_PREDICTION = 16
_YIELDED = {
    "oversized": "its prompt alone takes longer",
    "late": "it has waited too long",
    "overload": "it would make others late",
}


class EngineCore:
    """Joins the scheduler and the executor; the step loop calls `step()` while `has_work`.

    Args:
        speculator: has the scheduler try drafts; None for no drafts.
        roofline: knows the least time of steps; None where nobody does.

    Attributes:
        unready: requests that wait for their grammars, by id: the compilation, the request, and since when it waits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], int] = time.monotonic_ns,
        speculator: Speculator | None = None,
        roofline: StepRoofline | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.speculator = speculator
        self.roofline = roofline
        self._clock = clock
        self._quarantine = Quarantine(executor, clock, lambda seq_id: self._sequences[seq_id].request_id)
        self._live: dict[str, dict[int, Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}  # all sequences by seq_id
        self._prompt_logprobs: dict[int, list[PromptLogprobs]] = {}  # by seq_id, until its first output
        self._pooled: dict[int, Part] = {}  # by seq_id, until the vector is whole
        self._pending: list[SequenceOutput] = []
        self.unready: dict[str, tuple[Future[None], AddRequest, int]] = {}
        self._counted = EngineStats(0, 0, 0.0)
        self._memory = MemoryCounts(scheduler)
        self._received = 0
        self._longest_step_ns, self._steps = 0.0, 0
        self._wait_until_ns = 0

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or bool(self.unready) or self.scheduler.has_work

    @property
    def waits_ms(self) -> int:
        """How long the next step is put off, unless a request comes."""
        if self.unready and not self._pending and not self.scheduler.has_work:
            return COMPILATION_POLL_MS
        left_ns = self._wait_until_ns - self._clock() if self._wait_until_ns and not self._pending else 0
        return max(0, -(-left_ns // 1_000_000))

    # --- requests -----------------------------------------------------------------------------------

    def set_classes(self, classes: ClassTable, weights: dict[str, float]) -> None:
        """Set the classes of new requests and the weights of tenants."""
        self.scheduler.set_classes(classes, weights)

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
        except ValueError as error:
            self._refuse(request, str(error))
            return
        asked = request.params.structured_outputs
        compiled = None if asked is None else self.executor.prepare(asked.text, request.eos_token_ids)
        if compiled is not None:
            self.unready[request.request_id] = compiled, request, self._clock()
            return
        self._queue(request)

    def _queue(self, request: AddRequest, began_compiling: int = 0) -> None:
        """Queue the choices of a checked request."""
        sequences = sequences_of(request, self.scheduler.config.max_model_len, self.scheduler.config.classes)
        now = self._clock()
        for sequence in sequences:
            if began_compiling:
                sequence.ledger.mark(Phase.TRANSPORT, began_compiling)
                sequence.ledger.mark(Phase.GRAMMAR, now)
            self.scheduler.add(sequence, now)
        self._live[request.request_id] = {s.index: s for s in sequences}
        self._sequences.update((s.seq_id, s) for s in sequences)

    def _queue_ready(self) -> None:
        """Queue the requests whose grammars are compiled; end those with a grammar that cannot be."""
        for name, (compiled, request, began) in list(self.unready.items()):
            if not compiled.done():
                continue
            del self.unready[name]
            error = compiled.exception()
            if error is None:
                self._queue(request, began)
            else:
                self._refuse(request, f"structured_outputs: {error}")

    def _refuse(self, request: AddRequest, why: str) -> None:
        self._pending += [
            SequenceOutput(request.request_id, choice.index, [], finish_reason="error", error=why)
            for choice in request.choices
        ]

    def preload(self, prompts: list[PreloadedPrompt], what_fits: bool = False) -> list[str]:
        """Compute prompts one after the other, and keep their blocks for good.

        Args:
            what_fits: leave out prompts that do not fit, or that cannot be computed.

        Returns:
            why prompts were left out: one line for each, which names it.

        Raises:
            ValueError: a prompt does not fit and none may be left out; the message is this line.
        """
        fitting, left_out = room_for(prompts, self.scheduler.blocks, self.scheduler.config.max_model_len)
        for number, prompt in enumerate(fitting):
            if left_out and not what_fits:
                break
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            now = self._clock()
            self.add(
                AddRequest(
                    f"preload-{number}",
                    prompt.token_ids,
                    params,
                    [],
                    cache_salt=prompt.cache_salt,
                    arrival_ns=now,
                    sent_ns=now,
                    pins_prompt=True,
                )
            )
            while self.has_work:
                failed = [output.error for output in self.step().outputs if output.error]
                left_out += [f"{prompt.where}: the prompt cannot be computed: {why}" for why in failed]
        if left_out and not what_fits:
            raise ValueError(left_out[0])
        return left_out

    def explain(self, asked: Explain) -> Explanation:
        """The last steps, and the sequences."""
        return explanation(self.scheduler, asked, self._clock())

    def abort(self, request_id: str, index: int = -1) -> None:
        """Drop one choice, or all with index -1. Unknown ids are fine: the request may just have finished.

        A single choice gets a last output: a stop string was found in it, and its ledger is wanted. When all are
        dropped, nobody listens any more.
        """
        if request_id in self.unready:
            self._abort_unready(request_id, index)
        for sequence in list(self._live.get(request_id, {}).values()):
            if index not in (-1, sequence.index):
                continue
            self.scheduler.abort(sequence, self._clock())
            last = SequenceOutput(request_id, sequence.index, [], cached_tokens=sequence.cached_tokens)
            self._finish_output(last, sequence)
            if index != -1:
                self._pending.append(last)

    def _abort_unready(self, request_id: str, index: int) -> None:
        _, request, began = self.unready[request_id]
        left = [choice for choice in request.choices if index not in (-1, choice.index)]
        if index != -1 and len(left) < len(request.choices):
            now = self._clock()
            waited = {str(Phase.TRANSPORT): began - request.sent_ns, str(Phase.GRAMMAR): now - began}
            timings = SequenceTimings(waited, now, 0, 0)
            self._pending.append(SequenceOutput(request_id, index, [], finish_reason="abort", timings=timings))
        request.resumed = left
        if not left:
            del self.unready[request_id]

    def _forget(self, sequence: Sequence) -> None:
        self._drop(sequence.seq_id)
        if self.speculator is not None:
            self.speculator.forget(sequence.seq_id)
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
        """Run one step; its outputs may be empty where nothing could run.

        Raises:
            EngineFault: the step failed, and no single request is at fault.
        """
        if self.unready:
            self._queue_ready()
        outputs, self._pending = self._pending, []
        plan = self.scheduler.schedule(self._clock())
        self._wait_until_ns = plan.wait_until_ns
        for seq_id in plan.expired:
            sequence = self._sequences[seq_id]
            outputs.append(SequenceOutput(sequence.request_id, sequence.index, []))
            self._finish_output(outputs[-1], sequence)
        for seq_id in plan.preempted:
            self._drop(seq_id)
        if not plan.scheduled:
            return EngineOutputs(outputs, self._stats(0, 0, 0), self._clock())
        outcome = self._quarantine.run(plan)
        num_tokens, prompt_tokens = plan.num_tokens, self._prompt_tokens(plan)
        if outcome.failed_since_ns:
            outputs += self._take_out(plan, outcome)
        for seq_id, part in outcome.prompt_logprobs.items():
            if seq_id in self._sequences:
                self._prompt_logprobs.setdefault(seq_id, []).extend(part)
        for seq_id, pooled in outcome.pooled.items():
            if seq_id in self._sequences:
                self._pooled[seq_id] = self._pooled.get(seq_id, 0.0) + pooled
        changed = self.scheduler.complete(plan, outcome.tokens, outcome.times)
        for seq_id, drafts in outcome.drafts.items():
            self.scheduler.propose(seq_id, drafts)
        outputs += [self._output(sequence, new, outcome) for sequence, new in changed]
        elapsed = outcome.times.sampled_ns - (outcome.failed_since_ns or outcome.times.launched_ns)
        stats = self._stats(elapsed, num_tokens, prompt_tokens)
        stats.generation_tokens = sum([len(new) for _, new in changed])
        stats.scheduled_sequences = len(plan.scheduled)
        stats.moe_mixtures, stats.moe_expert_tokens, stats.moe_experts_touched, stats.moe_busiest_expert_tokens = (
            outcome.routing
        )
        if self.speculator is not None:
            self.speculator.count(plan, changed, stats)
            self.speculator.step_ended(plan, changed, outcome.times)
        decision = self.scheduler.decisions[-1]
        stats.predicted_ns, stats.forward_ns, stats.left_out = (
            decision.predicted_ns,
            decision.took_ns,
            decision.left_out,
        )
        if self._steps % _STEPS_OF_PREDICTION == 0:
            self._longest_step_ns = self.scheduler.longest_step_ns()
            if self.roofline is not None:
                stats.least_ns = decision.least_ns = self.roofline.least_ns(plan)
        self._steps += 1
        stats.slack_ns = max(1.0, decision.slack_ns) if decision.tightest else 0.0
        return EngineOutputs(outputs, stats, self._clock())

    def _prompt_tokens(self, plan: StepPlan) -> int:
        """How many tokens of the plan's chunks begin within a prompt."""
        chunks = (item for item in plan.scheduled if not item.decoding)
        return sum(len(item.token_ids) for item in chunks if item.start < self._sequences[item.seq_id].prompt_len)

    def idle(self) -> EngineOutputs:
        """The state of an engine that has nothing to do, for metrics."""
        return EngineOutputs([], self._stats(0, 0, 0), self._clock())

    def _take_out(self, plan: StepPlan, outcome: StepOutcome) -> list[SequenceOutput]:
        """End all choices of the requests that made a step fail."""
        faults = {self._sequences[seq_id].request_id: name for seq_id, name in outcome.faults.items()}
        failed = [sequence for request_id in faults for sequence in self._live[request_id].values()]
        self.scheduler.take_out(failed, plan, outcome.failed_since_ns, outcome.times.sampled_ns)
        outputs: list[SequenceOutput] = []
        for sequence in failed:
            output = SequenceOutput(sequence.request_id, sequence.index, [], cached_tokens=sequence.cached_tokens)
            output.error = FAILED.format(faults[sequence.request_id])
            self._finish_output(output, sequence)
            outputs.append(output)
        return outputs

    def _output(self, sequence: Sequence, new: list[int], outcome: StepOutcome) -> SequenceOutput:
        logprobs = outcome.logprobs.get(sequence.seq_id)
        output = SequenceOutput(
            sequence.request_id,
            sequence.index,
            new,
            cached_tokens=sequence.cached_tokens,
            logprobs=logprobs[: len(new)] if logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs.pop(sequence.seq_id, None),
            drafts=sequence.drafts,
            accepted_drafts=sequence.accepted_drafts,
        )
        if sequence.finish_reason is not None:
            if sequence.finish_reason == "stop" and sequence.pooling is not None:
                output.vector = vector_of(sequence.pooling, self._pooled[sequence.seq_id], sequence.prompt_len)
            output.error = outcome.reasons.get(sequence.seq_id)
            self._finish_output(output, sequence)
        return output

    def _finish_output(self, output: SequenceOutput, sequence: Sequence) -> None:
        output.finish_reason = sequence.finish_reason
        if sequence.finish_reason == "stop" and sequence.pooling is None:
            output.stop_token_id = sequence.tokens[-1]
        if sequence.finish_reason == "error":
            output.error = output.error or NOT_NUMBERS
        if sequence.finish_reason == "late":
            output.error = _late_message(sequence)
            output.retry_after_s = sequence.retry_after_s
        if sequence.finish_reason == "timeout":
            output.error = self._expired(sequence)
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

    def _expired(self, sequence: Sequence) -> str:
        limit, service = self.scheduler.config.max_queue_time, sequence.service
        if limit <= service.queue_timeout_s:
            return f"it waited longer than {limit:g} s (--max-queue-time)"
        return f"it waited longer than {service.queue_timeout_s:g} s (queue_timeout_s of class {service.name!r})"

    def _stats(self, step_ns: int, scheduled_tokens: int, prompt_tokens: int) -> EngineStats:
        """Gauges now, and counters since the last call."""
        scheduler, counted = self.scheduler, self._counted
        sequences = scheduler.sequences
        prefix = scheduler.blocks.prefix_stats
        stats = EngineStats(
            num_running=len(sequences.running),
            num_waiting=len(sequences.waiting),
            kv_cache_usage=scheduler.blocks.usage,
            step_ns=step_ns,
            prompt_tokens=prompt_tokens,
            prefix_cache_queries=prefix.queries - counted.prefix_cache_queries,
            prefix_cache_hits=prefix.hits - counted.prefix_cache_hits,
            preemptions=sequences.num_preemptions - counted.preemptions,
            scheduled_tokens=scheduled_tokens,
            received=self._received,
            stall_ns={str(phase): ns for phase, ns in scheduler.accounting.take_stalls().items()},
            running_of_class=dict(sequences.running.of_class),
            waiting_of_class=dict(sequences.waiting.of_class),
            longest_step_ns=self._longest_step_ns,
        )
        counted.prefix_cache_queries, counted.prefix_cache_hits = prefix.queries, prefix.hits
        counted.preemptions = sequences.num_preemptions
        self._memory.add_to(stats)
        opened = scheduler.policy.num_windows
        stats.windows, counted.windows = opened - counted.windows, opened
        stats.fairness_lead, stats.fairness_bound = sequences.waiting.lead, sequences.waiting.bound
        return stats

    def check(self) -> None:
        """Verify the integrity of the KV pool.

        Raises:
            RuntimeError: naming the block that leaked.
        """
        self.scheduler.check()

    def check_by_parts(self) -> Iterator[None]:
        """Do check() in parts of less than a millisecond, for an engine that has fallen idle."""
        return self.scheduler.check_by_parts()


def _late_message(sequence: Sequence) -> str:
    due_ms = (sequence.due_ns - sequence.arrival_ns) / 1e6
    return (
        f"the first token would be later than the objective of {due_ms:g} ms, because {_YIELDED[sequence.yielded]}; "
        f"class {sequence.service.name!r} refuses late requests"
    )
