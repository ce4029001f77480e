"""Makes recorded decisions again: the same scheduler, told the same at the same times, plans the same steps.

Tokens are made up. Blocks of tokens with the same number are the same, so that the prefix cache finds what it found.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.pooling import PoolingParams
from headway.policy.step.recording import (
    NOT_NUMBERS,
    AdapterLoaded,
    Arrival,
    End,
    Item,
    NewClasses,
    Proposal,
    Record,
    Step,
)
from headway.policy.step.request import FinishReason, Sequence
from headway.policy.step.sampling_params import SamplingParams
from headway.policy.step.scheduler import Scheduler
from headway.simulator.recording import Recording

_STOP = -1
Changed = list[tuple[Sequence, list[int]]]  # sequences with their new tokens


class DifferentStep(ValueError):
    """The scheduler decides otherwise than the one that was recorded did."""

    def __init__(self, number: int, recorded: Step, plan: StepPlan) -> None:
        super().__init__(f"step {number} was recorded as {recorded}, and is now {plan}")
        self.number, self.recorded, self.plan = number, recorded, plan


def replay(recording: Recording) -> int:
    """Make all decisions again; returns the number of steps.

    Raises:
        DifferentStep: the first that is another now.
    """
    return sum(isinstance(record, Step) for record, _ in Replay(recording).run())


class Replay:
    """Makes the decisions of a recording again, one after the other.

    Attributes:
        scheduler: the one that makes them.
        classes: the classes that there are.
    """

    def __init__(self, recording: Recording) -> None:
        self._records = recording.records
        self._ends = {record.seq_id: record for record in recording.records if isinstance(record, End)}
        self._sequences: dict[int, Sequence] = {}
        self._tokens: dict[int, list[int]] = {}  # tokens of each sequence, to its end and further
        engine = recording.engine
        self._size = engine.block_size
        config = engine.scheduler_config()
        self.classes = config.classes
        self.scheduler = Scheduler(config, engine.kv_blocks())

    def run(self) -> Iterator[tuple[Record, Changed]]:
        """Each record, and what it has changed of sequences, once its decisions are made again.

        Raises:
            DifferentStep: the first that is another now.
        """
        steps = 0
        for record in self._records:
            changed: Changed = []
            if isinstance(record, Arrival):
                self._arrive(record)
            elif isinstance(record, Step):
                steps += 1
                changed = self._step(steps, record)
            elif isinstance(record, NewClasses):
                self.classes = record.table()
                self.scheduler.set_classes(self.classes, record.weights, record.step_limits())
            elif isinstance(record, Proposal):
                self.scheduler.propose(record.seq_id, self._next_tokens(record.seq_id, record.drafts))
            elif isinstance(record, AdapterLoaded):
                failed = self.scheduler.adapter_loaded(record.adapter, record.now, record.done)
                changed = [(sequence, []) for sequence in failed]
            elif record.reason is FinishReason.ABORT:
                changed = [(self._sequences[record.seq_id], [])]
                self.scheduler.abort(self._sequences[record.seq_id], record.now)
            yield record, changed

    def _arrive(self, arrival: Arrival) -> None:
        tokens = self._tokens[arrival.seq_id] = self._tokens_of(arrival)
        sequence = Sequence(
            request_id=str(arrival.seq_id),
            index=arrival.index,
            params=SamplingParams(prompt_logprobs=0 if arrival.wants_logits else None),
            tokens=tokens[: arrival.known],
            prompt_len=arrival.prompt_len,
            max_len=arrival.max_len,
            stop_ids=frozenset({_STOP}),
            seed=0,
            priority=arrival.priority,
            service=self.classes.named(arrival.service_class) if arrival.service_class else self.classes.default_class,
            tenant=arrival.tenant,
            rank=self.classes.rank(arrival.service_class),
            due_ns=arrival.due_ns,
            tpot_ns=arrival.tpot_ns,
            arrival_ns=arrival.arrival_ns,
            pins_prompt=arrival.pins_prompt,
            pooling=PoolingParams(arrival.pools) if arrival.pools else None,
            parent=None if arrival.parent is None else self._sequences[arrival.parent],
            adapter=arrival.adapter,
        )
        sequence.ledger.began_ns = sequence.ledger.last_ns = arrival.sent_ns
        self._sequences[arrival.seq_id] = sequence
        self.scheduler.add(sequence, arrival.now)

    def _tokens_of(self, arrival: Arrival) -> list[int]:
        """Make up tokens: those of numbered blocks are the block's number, others differ for each sequence."""
        end = self._ends.get(arrival.seq_id)
        numbers = arrival.blocks + (end.blocks if end is not None else [])
        tokens = [number for number in numbers for _ in range(self._size)]
        tokens += [_STOP - 1 - arrival.seq_id] * (arrival.max_len - len(tokens))
        if end is not None and end.reason is FinishReason.STOP and not arrival.pools:
            tokens[end.length - 1] = _STOP
        return tokens

    def _step(self, number: int, recorded: Step) -> Changed:
        plan = self.scheduler.schedule(recorded.now)
        decided = [(item.seq_id, item.start, item.num_tokens, item.samples) for item in plan.scheduled]
        wanted = [(item.seq_id, item.start, item.tokens, item.samples) for item in recorded.items]
        if (decided, plan.preempted, plan.expired) != (wanted, recorded.preempted, recorded.expired):
            raise DifferentStep(number, recorded, plan)
        changed: Changed = [(self._sequences[seq_id], []) for seq_id in plan.expired]
        if recorded.times is None:
            return changed
        if recorded.retry is not None:
            failed = [self._sequences[seq_id] for seq_id in recorded.retry.failed]
            self.scheduler.take_out(failed, plan, recorded.retry.began, recorded.retry.ended)
        tokens = {item.seq_id: self._drawn(item) for item in recorded.items if item.samples or item.new == NOT_NUMBERS}
        return changed + self.scheduler.complete(plan, tokens, StepTimes(*recorded.times))

    def _drawn(self, item: Item) -> list[int] | None:
        if item.new == NOT_NUMBERS:
            return None
        return self._next_tokens(item.seq_id, item.new)

    def _next_tokens(self, seq_id: int, count: int) -> list[int]:
        known = len(self._sequences[seq_id].tokens)
        return self._tokens[seq_id][known : known + count]
