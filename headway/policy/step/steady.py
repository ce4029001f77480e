"""Takes steps in which the same sequences decode and nothing is to be decided, without a look at each sequence.

While nobody can be admitted, has a prompt under way or could be left out, a step gives everybody a token. What
`schedule` and `complete` do then for each sequence is the same in every step, unless the sequence needs a block, fills
one, or ends. So only those are looked at; the others are brought up to date when a step is to be scheduled. Until one
may end, it is known what the next steps are, and they are taken together. Afterwards everything is as after as many
calls of `schedule` and `complete`.

An executor needs plans, and there are none. This is for simulations, which know what will be drawn.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from headway.policy.cache.states import KeptStates
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ahead import admits_nobody
from headway.policy.step.ledger import Phase
from headway.policy.step.order import OrderKey
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.step_time import StepWork

_NEVER = 2**40  # more tokens than any block ends at
_MOST_AT_ONCE = 128  # steps

# What is drawn of a sequence: a token, which does not end it; how often; and the token that is drawn after that.
Draws = tuple[int, int, int]
Changed = list[tuple[Sequence, list[int]]]


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence of a run. Steps have numbers from the beginning of the run.

    Args:
        token, last: what is drawn of it, and what after step `last_from`.
        offset: what it has computed after a step, less the number of that step.
        end_at: after which step it may end.
        place: says by its order where it stands among running sequences.
    """

    sequence: Sequence
    token: int
    last_from: int
    last: int
    offset: int
    end_at: int
    place: tuple[OrderKey, int]


_place = attrgetter("place")


class SteadyDecodes:
    """A run of such steps. Call `next_steps`, then `complete` with those that have run.

    Where there are none, call `catch_up` and schedule a step. The run goes on behind it if `absorb` says so.

    Attributes:
        held: blocks in use at the end of each step that was completed last.
    """

    def __init__(self, scheduler: Scheduler, draws: Callable[[Sequence], Draws]) -> None:
        self.held: list[int] = []
        self._scheduler, self._draws = scheduler, draws
        self._order = scheduler.policy.orders.running
        self._block_size = scheduler.blocks.block_size if scheduler.blocks.enable_prefix_caching else _NEVER
        self._num_steps = self._context = 0  # the context of the next step
        self._members: dict[int, _Member] = {}
        # Before which step they need blocks, and after which something is to be done with their tokens.
        self._growing: defaultdict[int, list[_Member]] = defaultdict(list)
        self._due: defaultdict[int, list[_Member]] = defaultdict(list)
        self._ends: list[int] = []  # a heap of steps after which some may end
        self._rolled: dict[int, int] = {}  # by seq_id: the slots for states of this step
        self._is_next_steady = True
        self._planned_ns = self._sampled_ns = 0
        for sequence in scheduler.running:
            self.join(sequence)

    @classmethod
    def of(cls, scheduler: Scheduler, draws: Callable[[Sequence], Draws]) -> SteadyDecodes | None:
        """A run that begins with the next step; None where that may be of another kind.

        A subclass of Scheduler has none, as its steps may do more.
        """
        return cls(scheduler, draws) if type(scheduler) is Scheduler and _is_steady(scheduler) else None

    def join(self, sequence: Sequence) -> None:
        """A sequence decodes in each step from the next one on."""
        token, count, last = self._draws(sequence)
        offset = sequence.num_computed - self._num_steps
        place = self._order(sequence), sequence.seq_id
        member = _Member(sequence, token, self._num_steps + count, last, offset, 0, place)
        self._members[sequence.seq_id] = member
        self._context += sequence.num_computed + 1
        left = sequence.room - sequence.num_computed
        self._growing[self._num_steps + (left if left > 0 else 0)].append(member)
        self._expect_end(member)
        self._expect(member)

    def _expect_end(self, member: _Member) -> None:
        """Note the next step after which a sequence may end."""
        known, longest = self._num_steps, len(member.sequence.tokens) - member.sequence.max_len
        member.end_at = max(known + 1, min(member.last_from + 1, known - longest))
        heapq.heappush(self._ends, member.end_at)

    def _expect(self, member: _Member) -> None:
        """Note the next step after which a block is full, or the sequence may end."""
        sequence = member.sequence
        until_full = (sequence.num_registered + 1) * self._block_size - sequence.num_computed
        full_at = self._num_steps + (until_full if until_full > 0 else 1)
        self._due[min(full_at, member.end_at)].append(member)

    # --- what comes ---------------------------------------------------------------------------------

    def next_steps(self, now: int) -> tuple[StepWork, int] | None:
        """The work of the next step, whose sequences have blocks then; None where it must be scheduled.

        Also how many such steps come, each with one more token of every sequence.
        """
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        if not self._is_next_steady and not self._resumes():
            return None
        growing, count = self._growing.get(self._num_steps), len(self._members)
        if (
            not count
            or (growing is not None and len(growing) * blocks.tables > blocks.num_free)
            or (scheduler.policy.lends_blocks and count * blocks.tables > blocks.num_free)
        ):
            return None
        self._begin_step()
        self._planned_ns = now
        repeated = blocks.repeated_tokens
        return StepWork(decode_tokens=count, decode_context=self._context, repeated_context=repeated), self._most()

    def look_again(self) -> None:
        """Sequences have come or gone, or a step was scheduled: the next one may be of another kind."""
        self._is_next_steady = False

    def _resumes(self) -> bool:
        """Whether the run goes on with the next step."""
        running = self._scheduler.running
        self._is_next_steady = len(running) == len(self._members) and _is_steady(self._scheduler)
        if self._is_next_steady:  # one that lends its last block to another looks for one of its own
            self._growing[self._num_steps] += [self._members[each.seq_id] for each in running if not each.room]
        return self._is_next_steady

    def _most(self) -> int:
        """How many steps come until a sequence may end or blocks may run out; the next one's are there."""
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        if not scheduler.accounting.step_time.is_trained or (blocks.groups and blocks.repeated):
            return 1  # the policy may look at what is learnt from it; or a window may give up what is shared
        while self._ends[0] <= self._num_steps:
            heapq.heappop(self._ends)
        # Within the steps of a block a sequence needs no second one in any table.
        most, all_grow = min(self._ends[0] - self._num_steps, blocks.block_size, _MOST_AT_ONCE), len(self._members)
        free = blocks.num_free // blocks.tables - (all_grow if scheduler.policy.lends_blocks else 0)
        if free < all_grow:
            for number in range(1, most):
                free -= len(self._growing.get(self._num_steps + number, ()))
                if free < 0:
                    return number
        return most

    def contexts(self) -> list[int]:
        """The tokens that each sequence of the next step has computed."""
        done = self._num_steps
        return [member.offset + done for member in self._members.values()]

    # --- what has run -------------------------------------------------------------------------------

    def complete(self, steps: list[StepTimes]) -> list[Sequence]:
        """Apply the results of the first of the next steps as Scheduler.complete() does.

        Returns:
            The sequences that have ended with the last of them.
        """
        scheduler, planned_ns, count = self._scheduler, self._planned_ns, len(self._members)
        accounting, policy, blocks = scheduler.accounting, scheduler.policy, scheduler.blocks
        ended, self.held = list[Sequence](), []
        for times in steps:
            if self.held:
                self._begin_step()
            accounting.queue_stands_at(Phase.QUEUE_CAPACITY, planned_ns)
            accounting.record_decodes(StepWork(0, count, 0, self._context), times)
            policy.heed(planned_ns, times)
            self._num_steps += 1
            self._context += count
            self._sampled_ns = planned_ns = times.sampled_ns
            if (due := self._due.pop(self._num_steps, None)) is not None:
                ended = self._settle(_in_order(due))
            if blocks.checkpoints is not None:
                blocks.checkpoints.end_step()
            self.held.append(blocks.num_blocks - blocks.num_free)
        if ended and len(scheduler.waiting):
            self.look_again()
        return ended

    def _begin_step(self) -> None:
        """Give sequences of the next step the blocks that they need."""
        manager, blocks = self._scheduler.block_manager, self._scheduler.blocks
        if (growing := self._growing.pop(self._num_steps, None)) is not None:
            plan = StepPlan()
            for member in _in_order(growing):
                self._catch_up(member)
                sequence = member.sequence
                if sequence.room == sequence.num_computed and not blocks.groups:  # its table just becomes longer
                    own = sequence.tables[0].blocks
                    own += blocks.allocate(1, sequence.service.name, own[-1])
                    sequence.room += blocks.block_size
                else:
                    manager.extend(sequence, 1, plan)
                self._expect_growth(member)
        if manager.states is not None:
            self._roll(manager.states)
        self._scheduler.policy.steady_step()

    def _expect_growth(self, member: _Member) -> None:
        self._growing[self._num_steps + member.sequence.room - member.sequence.num_computed].append(member)

    def _roll(self, states: KeptStates) -> None:
        """Find slots for the states of sequences that fill a block in this step, where they are to be kept."""
        for member in _in_order(self._due.get(self._num_steps + 1, [])):
            sequence = member.sequence
            if (slot := states.roll(sequence, self._num_steps + member.offset + 1)) is not None:
                self._rolled[sequence.seq_id] = slot

    def _settle(self, due: list[_Member]) -> list[Sequence]:
        """Bring these sequences up to date, as a block is full or they may end. Returns those that ended."""
        scheduler, ended = self._scheduler, []
        for member in due:
            sequence = member.sequence
            self._catch_up(member)
            if (sequence.num_registered + 1) * self._block_size <= sequence.num_computed:
                scheduler.block_manager.register_full(sequence)
            states, slot = scheduler.block_manager.states, self._rolled.pop(sequence.seq_id, None)
            if states is not None and slot is not None:
                states.rolled(sequence, slot)
            reason = sequence.reason_to_end() if member.end_at <= self._num_steps else None
            if reason is None:
                self._go_on(member)
            else:
                scheduler.sequences.finish(sequence, reason, self._sampled_ns)
                self._leave(sequence)
                ended.append(sequence)
        return ended

    def _go_on(self, member: _Member) -> None:
        if member.end_at <= self._num_steps:
            self._expect_end(member)
        self._expect(member)

    def _leave(self, sequence: Sequence) -> None:
        del self._members[sequence.seq_id]
        self._context -= len(sequence.tokens)

    def _catch_up(self, member: _Member) -> None:
        sequence = member.sequence
        count = self._num_steps + member.offset - sequence.num_computed
        if count:
            if (further := self._num_steps - member.last_from) <= 0:
                sequence.tokens += [member.token] * count
            else:
                sequence.tokens += [member.token] * (count - further) + [member.last] * min(count, further)
            sequence.num_computed += count
            sequence.steps += count
            sequence.last_token_ns = self._sampled_ns

    # --- steps that are scheduled -------------------------------------------------------------------

    def catch_up(self) -> list[Sequence]:
        """Bring all sequences up to date, before the next step is scheduled.

        Returns:
            Those of which the last token is drawn in that step.
        """
        for member in self._members.values():
            self._catch_up(member)
        due = _in_order(self._due.get(self._num_steps + 1, []))
        return [member.sequence for member in due if member.last_from <= self._num_steps]

    def absorb(self, changed: Changed, sampled_ns: int) -> Changed | None:
        """Go on behind a step that was scheduled.

        Args:
            changed: what Scheduler.complete() has returned.

        Returns:
            Those of `changed` that are not of the run, and those of the run that have ended, without their tokens. None
            where a sequence of the run had no token in the step: then it is over.
        """
        ended = set[int]()
        if sum([sequence.seq_id in self._members for sequence, _ in changed]) != len(self._members):
            return None
        growing = self._growing.pop(self._num_steps, [])
        self._num_steps += 1
        self._context += len(self._members)
        self._sampled_ns, self._is_next_steady = sampled_ns, False
        for member in self._due.pop(self._num_steps, ()):
            if member.sequence.finish_reason is None:
                self._go_on(member)
            else:
                self._leave(member.sequence)
                ended.add(member.sequence.seq_id)
        for member in _in_order(growing):
            self._expect_growth(member)
        others = [each for each in changed if each[0].seq_id not in self._members]
        return [(each, [] if each.seq_id in ended else new) for each, new in others]


def _in_order(members: list[_Member]) -> list[_Member]:
    """Members that have not ended, in the order of running sequences."""
    going = [member for member in members if member.sequence.finish_reason is None]
    return sorted(set(going), key=_place) if len(going) > 1 else going


def _is_steady(scheduler: Scheduler) -> bool:
    """Whether the next step gives everybody a token, and leaves nothing to decide."""
    running, sequences = scheduler.running, scheduler.sequences
    if not scheduler.accounting.all_decode(len(running)) or not admits_nobody(scheduler):
        return False
    if len(sequences.waiting) and (sequences.slots is not None or not scheduler.config.sharing.decodes(True)):
        return False  # a slot may become free for one that waits, or it may take the step from those who decode
    return not (scheduler.has_drafts or scheduler.config.weights) and scheduler.policy.is_steady(running)
