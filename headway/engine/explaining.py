"""What the engine tells of its steps and sequences, to whoever looks into a server. Only done when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice, takewhile

from headway.engine.allocators import held
from headway.engine.messages import Explain, ExplainedStep, Explanation, LiveSequence, StepPart
from headway.policy.step.accounting import Accounting
from headway.policy.step.decisions import Decision
from headway.policy.step.request import NEVER, Sequence
from headway.policy.step.scheduler import Scheduler


def explanation(
    scheduler: Scheduler, asked: Explain, now: int, kernels: Iterable[tuple[str, int, int]] = ()
) -> Explanation:
    """The last steps, and the first sequences: those that run, then those that wait, each in their order.

    Args:
        now: the time, in nanoseconds of the engine's clock.
        kernels: those that were timed, oldest first.
    """
    newest = takewhile(lambda each: each.planned_ns > asked.after_ns, reversed(scheduler.decisions))
    last = list(islice(newest, asked.most))[::-1]
    names = _names(scheduler) if asked.with_parts else None
    steps = [_step(each, asked.with_words, names) for each in last]
    there = chain(scheduler.sequences.running, scheduler.sequences.waiting)
    sequences = [_live(each, scheduler.accounting, now) for each in islice(there, asked.most_sequences)]
    since_ns = steps[0].planned_ns if steps else NEVER
    told = [each for each in kernels if each[1] >= since_ns]
    memory = held() if asked.with_memory else {}
    return Explanation(steps, sequences, scheduler.blocks.cached.num_cached, told, memory)


def _names(scheduler: Scheduler) -> dict[int, str]:
    """The ids of requests by the numbers of their sequences, as far as they are known."""
    told = {seq_id: name for each in scheduler.decisions for seq_id, name in each.told.items()}
    return told | {seq_id: sequence.request_id for seq_id, sequence in scheduler.sequences.items()}


def _step(decision: Decision, with_words: bool, names: dict[int, str] | None) -> ExplainedStep:
    step = ExplainedStep(
        decision.planned_ns,
        decision.in_words() if with_words else "",
        decision.decoding,
        decision.prompt_tokens,
        decision.took_ns,
        decision.predicted_ns,
        decision.least_ns,
    )
    if names is not None and decision.plan is not None and decision.times is not None:
        times = decision.times
        step.launched_ns, step.computed_ns, step.sampled_ns = times.launched_ns, times.computed_ns, times.sampled_ns
        step.waiting, step.running = decision.waiting, decision.running
        step.parts = [
            StepPart(item.seq_id, names.get(item.seq_id, ""), item.start, item.num_tokens, item.decoding)
            for item in decision.plan.scheduled
        ]
    return step


def _live(sequence: Sequence, accounting: Accounting, now: int) -> LiveSequence:
    phase, phases_ns = accounting.so_far(sequence, now)
    due_ns = sequence.last_token_ns + sequence.tpot_ns if sequence.output_len else sequence.due_ns
    return LiveSequence(
        sequence.request_id,
        sequence.index,
        sequence.service.name,
        sequence.arrival_ns,
        str(phase),
        {str(each): length for each, length in phases_ns.items() if length},
        sequence.prompt_len,
        sequence.num_computed,
        sequence.output_len,
        sum(len(table.held) for table in sequence.tables),
        due_ns - now if due_ns < NEVER else None,
    )
