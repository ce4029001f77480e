"""Executors of several processes: rank 0 runs its part of plans, while the others run theirs.

With stages, rank 0 is in the last one. It is then given a step, divided into micro-batches, by the stages before it one
after the other, and these work on the next ones meanwhile. With context parallelism, parts are rows, where a step has
many, and rank 0 computes all others alone.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.executor import EngineFault, StepOutcome
from headway.engine.ranks import Followers, Pool, Step
from headway.engine.runner import Runner
from headway.kernels.cpu.context import ContextKernels
from headway.kernels.cpu.rank_board import MOST_AHEAD
from headway.kernels.interface import KernelTime
from headway.policy.step.accounting import StepTimes
from headway.policy.step.context_shares import ContextShares
from headway.policy.step.micro_batches import MicroBatches
from headway.policy.step.plan import UNKNOWN, ScheduledSequence, StepPlan, work_of
from headway.policy.step.sampling_params import SamplingParams


def executor_of(runner: Runner, followers: Followers, pool: Pool, config: EngineConfig) -> RankedExecutor:
    """The executor of this process's runner and all others, which have loaded then.

    Raises:
        ValueError: another rank could not load its part, or is gone.
    """
    followers.allocate(pool)
    if config.context_parallel_size > 1:
        return ContextExecutor(runner, followers, ContextShares(config.context_parallel_size, config.block_size))
    stages = config.pipeline_parallel_size
    return RankedExecutor(runner, followers) if stages == 1 else StagedExecutor(runner, followers, stages)


class RankedExecutor:
    """An Executor of ranks that work on each step together.

    Args:
        runner: of this process.
    """

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner, self._followers = runner, followers
        self._forgotten: list[int] = []
        self._recovers = False
        weakref.finalize(self, followers.end)

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def generates(self) -> bool:
        return self._runner.generates

    def prepare(self, grammar: str, eos_token_ids: Collection[int]) -> Future[None] | None:
        return self._runner.prepare(grammar, eos_token_ids)

    def look(self) -> None:
        if self._followers.fault:
            raise EngineFault(self._followers.fault)

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step in all ranks. A step that fails here is ended in all before it raises."""
        self.look()
        self._send(plan)
        self._runner.begin_together()
        return self._run(plan)

    def _run(self, plan: StepPlan) -> StepOutcome:
        """Run this rank's part of a step that the others run."""
        try:
            outcome = self._runner.run(plan)
            self._followers.check()
            return outcome
        except BaseException:
            self._followers.settle()
            raise

    def _send(self, plan: StepPlan, begins: bool = True, parts: Sequence[list[ScheduledSequence]] = ()) -> None:
        """Have the other ranks run a step, or a part of one, with what they have to know before it. See Step."""
        self._followers.send(Step(plan, begins, self._forgotten, self._recovers, [*parts]))
        self._forgotten, self._recovers = [], False

    def timed(self, wanted: bool | None) -> list[KernelTime]:
        """See Executor; those of this process."""
        return self._runner.timed(wanted)

    def forget(self, seq_id: int) -> None:
        self._runner.forget(seq_id)
        self._forgotten.append(seq_id)

    def recover(self) -> None:
        self._runner.recover_together()
        self._recovers = True


class ContextExecutor(RankedExecutor):
    """An Executor of ranks that each have the whole model, and compute some rows of long steps into one KV pool.

    Rank 0 runs all other steps by itself, with the threads of all ranks. The others know sequences for one step each,
    so that what rank 0 does meanwhile does not matter to them.

    Args:
        shares: divide steps among the ranks.
    """

    def __init__(self, runner: Runner, followers: Followers, shares: ContextShares) -> None:
        super().__init__(runner, followers)
        self.shares = shares

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step, in all ranks where it is divided. One that fails here is ended in all before it raises."""
        self.look()
        began_ns, (own, *others) = time.monotonic_ns(), self.shares.divide(plan)
        outcome = self._run_shared(plan, own, others) if others else self._runner.run(plan)
        if self._followers.serves:  # before that, kernels are compiled
            self.shares.observe(time.monotonic_ns() - began_ns)
        return outcome

    def _run_shared(
        self, plan: StepPlan, own: list[ScheduledSequence], others: list[list[ScheduledSequence]]
    ) -> StepOutcome:
        """Run a step of which the others compute some rows, behind its copies: they may write where these do."""
        runner, change = self._runner, msgspec.structs.replace
        assert isinstance(runner.kernels, ContextKernels)
        if plan.swaps or plan.copies:
            runner.copy_blocks(plan)
        theirs = {item.seq_id for part in others for item in part}
        known = [sequence for sequence in runner.apply(plan) if sequence.seq_id in theirs]
        told = [change(each, params=SamplingParams(), tokens=[], stop_ids=frozenset()) for each in known]
        self._send(StepPlan(new=told), parts=others)
        self._forgotten = [*theirs]
        with runner.kernels.sharing(self._followers.threads):
            return self._run(change(plan, scheduled=own, swaps=[], copies=[], work=work_of(own)))

    def forget(self, seq_id: int) -> None:
        """See Executor. The other ranks forget by themselves."""
        self._runner.forget(seq_id)


@dataclass(eq=False, slots=True)
class Flight:
    """A step under way through the stages."""

    parts: list[StepPlan]  # its micro-batches
    sent: int = 0  # how many of them have gone to the stages before this one
    follows: bool = False  # the first of them while these still worked on the step before
    # Sequences that have ended since it was submitted, and may be in it.
    forgotten: list[int] = field(default_factory=list)


class StagedExecutor(RankedExecutor):
    """An AheadExecutor of stages: while this one works on a micro-batch, those before it work on the next ones.

    So do they on the next step, as soon as the tokens of one of its micro-batches have been drawn.

    Args:
        runner: of this process, which is in the last of so many `stages`.

    Attributes:
        runs_ahead: whether states of recurrent layers do not forbid that steps are submitted.
        micro_batches: divide steps among the stages.
        divided_into: how many micro-batches the last step was, and as long as how many turns of a stage it took.
    """

    def __init__(self, runner: Runner, followers: Followers, stages: int) -> None:
        super().__init__(runner, followers)
        self.runs_ahead = runner.model.config.shape.state is None
        self.micro_batches, self.divided_into = MicroBatches(stages), (1, stages)
        self._before = stages - 1
        self._flights: deque[Flight] = deque()

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step in all ranks. A step that fails here is ended in all before it raises."""
        return self.collect(self._submit(plan, self.micro_batches.divide(plan)))

    def submit(self, plan: StepPlan) -> Flight:
        """See AheadExecutor. It goes to the stages while the step before is collected."""
        plan.work = work_of(plan.scheduled)
        return self._submit(plan, self.micro_batches.divide(plan, is_followed=True))

    def _submit(self, plan: StepPlan, parts: list[StepPlan]) -> Flight:
        if plan.scheduled[0].token_ids[0] != UNKNOWN:
            self._end_dropped()
        self._flights.append(Flight(parts))
        return self._flights[-1]

    def collect(self, submitted: Flight) -> StepOutcome:
        """See AheadExecutor. What is still unknown of a step, now that the one before has ended, has ended with it."""
        self.look()
        began_ns, drawn = time.monotonic_ns(), dict[int, list[int] | None]()
        for part in submitted.parts[submitted.sent :]:
            part.scheduled = [item for item in part.scheduled if item.token_ids[0] != UNKNOWN]
        submitted.parts[submitted.sent :] = [part for part in submitted.parts[submitted.sent :] if part.scheduled]
        outcomes, count = list[StepOutcome](), len(submitted.parts)
        try:
            for number, part in enumerate(submitted.parts):
                self._send_ahead(number + min(self._before, MOST_AHEAD), drawn)
                if number == 0:
                    self._runner.begin_together()
                outcomes.append(self._runner.run(part))
                self._followers.check()
                drawn |= outcomes[-1].tokens
        except BaseException:
            self._followers.settle()
            while self._flights:
                self._end_flight()
            raise
        self._end_flight()
        turns = count if submitted.follows else count + self._before
        self.divided_into = count, turns
        if self._followers.serves:  # before that, kernels are compiled
            work = work_of([item for part in submitted.parts for item in part.scheduled])
            self.micro_batches.observe(work, count, turns, time.monotonic_ns() - began_ns)
        return _joined(outcomes)

    def _send_ahead(self, last: int, drawn: dict[int, list[int] | None]) -> None:
        """Send micro-batches up to that of this number, counted from the first flight's first one.

        Those of the next step are sent as far as their tokens are drawn.
        """
        for flight in self._flights:
            for part in flight.parts[flight.sent : max(0, last + 1)]:
                items = [item for item in part.scheduled if item.token_ids[0] == UNKNOWN]
                if not all(item.seq_id in drawn for item in items):
                    return
                for item in items:
                    item.token_ids = [*(drawn[item.seq_id] or [0])]  # one whose logits are bad has ended
                self._send(part, begins=flight.sent == 0)
                flight.follows = flight.follows or flight is not self._flights[0]
                flight.sent += 1
            last -= len(flight.parts)

    def _end_dropped(self) -> None:
        """Do this stage's part of steps that nobody collects, as all of their sequences have ended."""
        while self._flights:
            flight = self._flights[0]
            for part in flight.parts[: flight.sent]:
                self._runner.run(part)
            self._end_flight()

    def _end_flight(self) -> None:
        for seq_id in self._flights.popleft().forgotten:
            super().forget(seq_id)

    def forget(self, seq_id: int) -> None:
        """See Executor. A sequence is known until all steps that may have it have ended."""
        if self._flights:
            self._flights[-1].forgotten.append(seq_id)
        else:
            super().forget(seq_id)


def _joined(outcomes: list[StepOutcome]) -> StepOutcome:
    """What micro-batches come to together."""
    first, times = outcomes[0], outcomes[-1].times
    for other in outcomes[1:]:
        first.take(other)
    first.times = StepTimes(first.times.launched_ns, times.computed_ns, times.sampled_ns)
    return first
