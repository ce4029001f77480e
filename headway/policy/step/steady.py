"""Takes steps in which the same sequences decode and nothing is to be decided, without a look at each sequence.

While nobody waits, has a prompt under way or could be left out, a step gives everybody a token. What `schedule` and
`complete` do then for each sequence is the same in every step, unless the sequence needs a block, fills one, or ends.
So only those are looked at; the others are brought up to date when the run of such steps is over. Step times are learnt
and clocks are advanced in each step. Afterwards everything is as after as many calls of `schedule` and `complete`.

An executor needs plans, and there are none. This is for simulations, which know what will be drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from headway.policy.cache.states import KeptStates
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.step_time import StepWork

_NEVER = 2**40  # more tokens than any block ends at


# What is drawn of a sequence: a token, which does not end it; how often; and the token that is drawn after that.
Draws = tuple[int, int, int]


class SteadyDecodes:
    """A run of such steps. Call `work_of_step`, then `complete` for each, and `catch_up` at the end.

    Attributes:
        num_steps: how many steps were taken.
    """

    def __init__(self, scheduler: Scheduler, draws: Callable[[Sequence], Draws]) -> None:
        self.num_steps = 0
        self._scheduler = scheduler
        self._block_size = scheduler.blocks.block_size if scheduler.blocks.enable_prefix_caching else _NEVER
        self._sequences: list[Sequence | None] = list(scheduler.running)  # None has ended
        self._draws = list(map(draws, scheduler.running))
        self._known = [0] * len(self._draws)  # the step up to which each has been brought up to date
        self._count, self._context = len(self._draws), len(self._draws)
        # Before which step sequences need blocks, and after which something is to be done with their tokens.
        self._growing: defaultdict[int, list[int]] = defaultdict(list)
        self._due: defaultdict[int, list[int]] = defaultdict(list)
        for at, sequence in enumerate(scheduler.running):
            self._context += sequence.num_computed
            left = sequence.room - sequence.num_computed
            self._growing[left if left > 0 else 0].append(at)
            self._expect(at, sequence)
        self._rolled: dict[int, int] = {}  # the slots for states of this step
        self._work, self._planned_ns, self._sampled_ns = StepWork(), 0, 0

    @classmethod
    def of(cls, scheduler: Scheduler, draws: Callable[[Sequence], Draws]) -> SteadyDecodes | None:
        """A run that begins with the next step; None where that may be of another kind.

        A subclass of Scheduler has none, as its steps may do more.
        """
        running = scheduler.running
        if (
            len(scheduler.waiting)
            or not scheduler.accounting.all_decode(len(running))
            or type(scheduler) is not Scheduler
        ):
            return None
        if scheduler.has_drafts or scheduler.config.weights or not scheduler.policy.is_steady(running):
            return None
        return cls(scheduler, draws)

    def _expect(self, at: int, sequence: Sequence) -> None:
        """Note the next step after which a block is full, or the sequence may end."""
        steps = self._draws[at][1] + 1
        if (until_longest := sequence.max_len - len(sequence.tokens)) < steps:
            steps = until_longest
        if (until_full := (sequence.num_registered + 1) * self._block_size - sequence.num_computed) < steps:
            steps = until_full
        self._due[self.num_steps + (steps if steps > 0 else 1)].append(at)

    def work_of_step(self, now: int) -> StepWork | None:
        """The work of the next step, whose sequences have blocks then; None where it must be scheduled."""
        scheduler = self._scheduler
        growing, tables = self._growing.get(self.num_steps), scheduler.blocks.tables
        if (
            not self._count
            or (growing is not None and len(growing) * tables > scheduler.blocks.num_free)
            or (scheduler.policy.lends_blocks and self._count * tables > scheduler.blocks.num_free)
        ):
            return None
        if growing is not None:
            self._grow(sorted(growing))
        if (states := scheduler.block_manager.states) is not None:
            self._roll(states)
        scheduler.policy.steady_step()
        scheduler.accounting.queue_stands_at(Phase.QUEUE_CAPACITY, now)
        self._planned_ns = now
        repeated = scheduler.blocks.repeated_tokens
        self._work = StepWork(decode_tokens=self._count, decode_context=self._context, repeated_context=repeated)
        return self._work

    def contexts(self) -> list[int]:
        """The tokens that each sequence of the next step has computed."""
        done = self.num_steps
        pairs = zip(self._sequences, self._known, strict=True)
        return [sequence.num_computed + done - known for sequence, known in pairs if sequence is not None]

    def _grow(self, growing: list[int]) -> None:
        plan, manager = StepPlan(), self._scheduler.block_manager
        for at in growing:
            if (sequence := self._sequences[at]) is not None:
                self._catch_up(at, sequence)
                manager.extend(sequence, 1, plan)
                self._growing[self.num_steps + sequence.room - sequence.num_computed].append(at)
        del self._growing[self.num_steps]

    def _roll(self, states: KeptStates) -> None:
        """Find slots for the states of sequences that fill a block in this step, where they are to be kept."""
        for at in sorted(self._due.get(self.num_steps + 1, ())):
            sequence = self._sequences[at]
            assert sequence is not None
            computed = sequence.num_computed + self.num_steps - self._known[at]
            if (slot := states.roll(sequence, computed + 1)) is not None:
                self._rolled[at] = slot

    def complete(self, times: StepTimes) -> list[Sequence]:
        """Apply the step's results as Scheduler.complete() does. Returns the sequences that have ended."""
        scheduler = self._scheduler
        scheduler.accounting.record_decodes(self._work, times)
        scheduler.policy.heed(self._planned_ns, times)
        self.num_steps += 1
        self._context += self._count
        self._sampled_ns = times.sampled_ns
        due = self._due.pop(self.num_steps, None)
        ended = [] if due is None else self._settle(sorted(due))
        if scheduler.blocks.checkpoints is not None:
            scheduler.blocks.checkpoints.end_step()
        return ended

    def _settle(self, due: list[int]) -> list[Sequence]:
        """Bring the sequences at these places up to date, as a block is full or they end. Returns those that ended."""
        scheduler, ended = self._scheduler, []
        for at in due:
            sequence = self._sequences[at]
            assert sequence is not None
            self._catch_up(at, sequence)
            if (sequence.num_registered + 1) * self._block_size <= sequence.num_computed:
                scheduler.block_manager.register_full(sequence)
            states, slot = scheduler.block_manager.states, self._rolled.pop(at, None)
            if states is not None and slot is not None:
                states.rolled(sequence, slot)
            reason = sequence.reason_to_end()
            if reason is None:
                self._expect(at, sequence)
                continue
            scheduler.sequences.finish(sequence, reason, self._sampled_ns)
            self._sequences[at] = None
            self._count -= 1
            self._context -= len(sequence.tokens)
            ended.append(sequence)
        return ended

    def _catch_up(self, at: int, sequence: Sequence) -> None:
        count = self.num_steps - self._known[at]
        if not count:
            return
        token, left, last = self._draws[at]
        if count <= left:
            sequence.tokens += [token] * count
            self._draws[at] = token, left - count, last
        else:
            sequence.tokens += [token] * left + [last] * (count - left)
            self._draws[at] = token, 0, last
        self._known[at] = self.num_steps
        sequence.num_computed += count
        sequence.steps += count
        sequence.last_token_ns = self._sampled_ns

    def catch_up(self) -> None:
        """Bring all sequences up to date, before the next step is scheduled."""
        for at, sequence in enumerate(self._sequences):
            if sequence is not None:
                self._catch_up(at, sequence)
