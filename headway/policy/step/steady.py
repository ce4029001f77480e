"""Takes steps in which the same sequences decode and nothing is to be decided, without a look at each sequence.

While nobody can be admitted, has a prompt under way or could be left out, a step gives everybody a token. What
`schedule` and `complete` do then for each sequence is the same in every step, unless the sequence fills a block, needs
one, or ends. Who fills one is known by the step's number; the others are brought up to date when a step is to be
scheduled. Until one may end, it is known what the next steps are, and they are taken together, with all blocks that
become full in them. Afterwards everything is as after as many calls of `schedule` and `complete`.

An executor needs plans, and there are none. This is for simulations, which know what will be drawn.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from headway.policy.cache.states import KeptStates
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ahead import admits_nobody
from headway.policy.step.ledger import Phase
from headway.policy.step.order import OrderKey
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Changed, Scheduler
from headway.policy.step.sequences import Step
from headway.policy.step.step_time import StepWork

_MOST_AT_ONCE = 128  # steps

# What is drawn of a sequence: a token, which does not end it; how often; and the token that is drawn after that.
Draws = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class _Member:
    """A sequence of a run. Steps have numbers from the beginning of the run.

    Args:
        token, last: what is drawn of it, and what after step `last_from`.
        offset: what it has computed after a step, less the number of that step.
        place: says by its order where it stands among running sequences.
        end_at: after which step it may end.
    """

    sequence: Sequence
    token: int
    last_from: int
    last: int
    offset: int
    place: tuple[OrderKey, int]
    end_at: int = 0


_place = attrgetter("place")


class SteadyDecodes:
    """A run of such steps. Call `next_steps`, then `complete` with those that have run.

    Where there are none, call `catch_up` and schedule a step. The run goes on behind it if `absorb` says so. Where
    `decode` is the scheduler's, members have no parts in the plan of most such steps (`beside`); `complete_beside`
    then takes the place of Scheduler.complete() and `absorb`.

    Attributes:
        held: blocks in use at the end of each step that was completed last.
        beside: the work of the members in the step that was scheduled last, where they decode beside its plan.
    """

    def __init__(self, scheduler: Scheduler, draws: Callable[[Sequence], Draws]) -> None:
        self.held: list[int] = []
        self.beside: StepWork | None = None
        self._scheduler, self._draws = scheduler, draws
        self._order, self._size = scheduler.policy.orders.running, scheduler.blocks.block_size
        self._num_steps = self._context = 0  # the context of the next step
        self._members: dict[int, _Member] = {}
        # In the order of running sequences, by the number of a step modulo the size of a block: who fills a block then.
        self._filling: list[list[_Member]] = [[] for _ in range(self._size)]
        self._lacking: list[_Member] = []  # who needs a block before the next step although none is full
        self._ending: dict[int, list[_Member]] = {}  # who may end after a step
        self._ends: list[int] = []  # a heap of these steps
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
        known, size = self._num_steps, self._size
        offset, place = sequence.num_computed - known, (self._order(sequence), sequence.seq_id)
        member = _Member(sequence, token, known + count, last, offset, place)
        self._members[sequence.seq_id] = member
        self._context += sequence.num_computed + 1
        insort(self._filling[-offset % size], member, key=_place)
        if not sequence.room:
            self._lacking.append(member)
        self._expect_end(member)

    def _expect_end(self, member: _Member) -> None:
        """Note the next step after which a sequence may end."""
        known, longest = self._num_steps, len(member.sequence.tokens) - member.sequence.max_len
        member.end_at = max(known + 1, min(member.last_from + 1, known - longest))
        if (ending := self._ending.get(member.end_at)) is not None:
            ending.append(member)
        else:
            self._ending[member.end_at] = [member]
            heapq.heappush(self._ends, member.end_at)

    # --- what comes ---------------------------------------------------------------------------------

    def next_steps(self, now: int) -> tuple[StepWork, int] | None:
        """The work of the next step, whose sequences have blocks then; None where it must be scheduled.

        Also how many such steps come, each with one more token of every sequence.
        """
        scheduler, blocks = self._scheduler, self._scheduler.blocks
        if not self._is_next_steady and not self._resumes():
            return None
        growing, count = len(self._fillers(0)) + len(self._lacking), len(self._members)
        if (
            not count
            or growing * blocks.tables > blocks.num_free
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
            self._lacking = [self._members[each.seq_id] for each in running if not each.room]
        return self._is_next_steady

    def _fillers(self, further: int) -> list[_Member]:
        """Who has a full block after so many further steps, and so needs another one before the next."""
        return self._filling[(self._num_steps + further) % self._size]

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
                free -= len(self._fillers(number))
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
        self._record(steps)
        first, self.held = self._num_steps, []
        ended = self._take_pages(steps) if self._is_plain else None
        if ended is None:
            for times in steps:
                if self._num_steps > first:
                    self._begin_step()
                self._num_steps, self._sampled_ns = self._num_steps + 1, times.sampled_ns
                ended = self._settle(self._due())
                if self._scheduler.blocks.checkpoints is not None:
                    self._scheduler.blocks.checkpoints.end_step()
                self.held.append(self._num_held)
        if ended and len(self._scheduler.waiting):
            self.look_again()
        return ended or []

    def _record(self, steps: list[StepTimes]) -> None:
        """Have accounts and policy know of these steps."""
        accounting, count = self._scheduler.accounting, len(self._members)
        accounting.queue_stands_at(Phase.QUEUE_CAPACITY, self._planned_ns)
        if len(steps) > 1:
            accounting.queue_stands_at(Phase.QUEUE_CAPACITY, steps[-2].sampled_ns)
        accounting.record_decodes(count, self._context, steps)
        self._scheduler.policy.heed_steady(self._planned_ns, steps)
        self._context += count * len(steps)

    @property
    def _num_held(self) -> int:
        return self._scheduler.blocks.num_blocks - self._scheduler.blocks.num_free

    @property
    def _is_plain(self) -> bool:
        """Whether a sequence that has filled a block just gets another one, and nothing else depends on either."""
        manager = self._scheduler.block_manager
        other = self._scheduler.blocks.groups or manager.states is not None or manager.offloading is not None
        return not (other or self._scheduler.policy.lends_blocks)

    def _take_pages(self, steps: list[StepTimes]) -> list[Sequence] | None:
        """Do for all steps together what is to be done with blocks, and with sequences that end with the last.

        Nothing is released before the last step has ended. So pages that are registered do not depend on which cached
        ones are given up meanwhile, unless they stand in the index already: then nothing is done.

        Returns:
            The sequences that have ended; None where the steps must be looked at one by one.
        """
        first, last, in_use = self._num_steps, self._num_steps + len(steps), self._num_held
        growing, full, held = list[_Member](), list[_Member](), list[int]()
        for number in range(first + 1, last):
            held.append(in_use + len(growing))
            if fillers := self._filling[number % self._size]:
                full += fillers
                growing += [each for each in fillers if each.sequence.room <= number + each.offset]
        is_together = self._may_register_together(last)
        if is_together:
            full += self._filling[last % self._size]
        if not self._are_new(full):
            self._bring_up_to_date(self._members.values())
            return None
        self._num_steps, self._sampled_ns = last, steps[-1].sampled_ns
        if len(steps) > 1:
            self._scheduler.policy.steady_steps(len(steps) - 1)
        self._grow(growing)
        self._register(full)
        if not is_together:
            self._bring_up_to_date(self._members.values())
        ended = self._settle(self._pop_ending() if is_together else self._due())
        self.held = [*held, self._num_held]
        return ended

    def _grow(self, growing: list[_Member]) -> None:
        """Give each of these a block behind those that it has."""
        if not growing:
            return
        tables = [each.sequence.tables[0].blocks for each in growing]
        wanted = [(each.sequence.service.name, own[-1]) for each, own in zip(growing, tables, strict=True)]
        for each, own, block in zip(growing, tables, self._scheduler.blocks.allocate_each(wanted), strict=True):
            own.append(block)
            each.sequence.room += self._size

    def _due(self) -> list[_Member]:
        """Who has filled a block with the last step, or may have ended."""
        return _in_order(self._fillers(0) + self._pop_ending())

    def _pop_ending(self) -> list[_Member]:
        """Who may have ended with the last step."""
        return _in_order(self._ending.pop(self._num_steps, []))

    def _may_register_together(self, step: int) -> bool:
        """Whether the pages that fill in a step are entered as they are where sequences end between one and another.

        They are unless one that ends holds blocks with another.
        """
        return step not in self._ending or not self._scheduler.blocks.repeated

    def _are_new(self, full: list[_Member]) -> bool:
        """Whether nothing in the prefix index hangs where the full blocks of these are to be entered."""
        blocks = self._scheduler.blocks
        return not blocks.enable_prefix_caching or blocks.index.are_leaves([each.sequence.cache_node for each in full])

    def _bring_up_to_date(self, members: Iterable[_Member]) -> None:
        """Have the prefix index know the tokens of blocks that these have filled, as it is going to compare some."""
        for member in members:
            self._catch_up(member)

    def _register(self, full: list[_Member]) -> None:
        """Enter a block of each of these in the prefix index, none of them twice. Their tokens may come later."""
        if not self._scheduler.blocks.enable_prefix_caching:
            return
        index = self._scheduler.blocks.index
        for member in full:
            sequence = member.sequence
            at, table = sequence.num_registered, sequence.tables[0].blocks
            node = index.extend(table[at], sequence.cache_node, sequence.tokens)
            if not node:
                self._catch_up(member)
                node = index.register([table[at]], sequence.cache_node, sequence.tokens, at)
            sequence.cache_node, sequence.num_registered = node, at + 1

    def _begin_step(self) -> None:
        """Give sequences of the next step the blocks that they need."""
        manager, blocks = self._scheduler.block_manager, self._scheduler.blocks
        growing = self._fillers(0)
        if self._lacking:
            growing, self._lacking = _in_order(growing + self._lacking), []
        elif self._is_plain:
            self._grow([each for each in growing if each.sequence.room <= self._num_steps + each.offset])
            growing = []
        plan = StepPlan()
        for member in growing:
            self._catch_up(member)
            sequence = member.sequence
            if sequence.room == sequence.num_computed and not blocks.groups:  # its table just becomes longer
                own = sequence.tables[0].blocks
                own += blocks.allocate(1, sequence.service.name, own[-1])
                sequence.room += blocks.block_size
            elif sequence.room <= sequence.num_computed:
                manager.extend(sequence, 1, plan)
        if manager.states is not None:
            self._roll(manager.states)
        self._scheduler.policy.steady_steps(1)

    def _roll(self, states: KeptStates) -> None:
        """Find slots for the states of sequences that fill a block in this step, where they are to be kept."""
        for member in self._fillers(1):
            sequence = member.sequence
            if (slot := states.roll(sequence, self._num_steps + member.offset + 1)) is not None:
                self._rolled[sequence.seq_id] = slot

    def _settle(self, due: list[_Member]) -> list[Sequence]:
        """Bring these sequences up to date, as a block is full or they may end. Returns those that ended."""
        scheduler, ended = self._scheduler, []
        for member in due:
            sequence = member.sequence
            self._catch_up(member)
            if scheduler.blocks.enable_prefix_caching:
                scheduler.block_manager.register_full(sequence)
            states, slot = scheduler.block_manager.states, self._rolled.pop(sequence.seq_id, None)
            if states is not None and slot is not None:
                states.rolled(sequence, slot)
            if member.end_at > self._num_steps:
                continue
            if (reason := sequence.reason_to_end()) is None:
                self._expect_end(member)
            else:
                scheduler.sequences.finish(sequence, reason, self._sampled_ns)
                self._leave(member)
                ended.append(sequence)
        return ended

    def _leave(self, member: _Member) -> None:
        del self._members[member.sequence.seq_id]
        self._filling[-member.offset % self._size].remove(member)
        self._context -= len(member.sequence.tokens)

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
        self.beside, done, sampled_ns = None, self._num_steps, self._sampled_ns
        for member in self._members.values():
            sequence, computed = member.sequence, done + member.offset
            count = computed - sequence.num_computed
            if count and done <= member.last_from:
                sequence.tokens += [member.token] * count
                sequence.num_computed = computed
                sequence.steps += count
                sequence.last_token_ns = sampled_ns
            elif count:
                self._catch_up(member)
        due = _in_order(self._ending.get(self._num_steps + 1, []))
        return [member.sequence for member in due if member.last_from <= self._num_steps]

    def decode(self, decoding: list[Sequence], step: Step) -> StepWork:
        """Do as Scheduler.decode_each(), beside the plan where all members decode and just need blocks."""
        scheduler, count, done = self._scheduler, len(self._members), self._num_steps
        growing = [each for each in self._fillers(0) if each.sequence.room <= done + each.offset]
        decodes_all = len(decoding) == count and not (step.plan.preempted or scheduler.has_drafts)
        has_room = len(growing) <= scheduler.blocks.num_free and 0 not in [each.room for each in decoding]
        if not (decodes_all and has_room and self._is_plain and not scheduler.config.weights):
            return scheduler.decode_each(decoding, step)
        self._grow(growing)
        self.beside = StepWork(decode_tokens=count, decode_context=self._context)
        return self.beside

    def complete_beside(self, plan: StepPlan, tokens: Mapping[int, list[int] | None], times: StepTimes) -> Changed:
        """Apply the results of a step in which members decoded beside the plan, and go on behind it.

        Returns:
            What Scheduler.complete() does, with those of the run that have ended, without their tokens.
        """
        scheduler, members, latest = self._scheduler, self._members, self._scheduler.decisions[-1]
        parts, idle = [(scheduler.sequences[item.seq_id], item) for item in plan.scheduled], list[Sequence]()
        if len(parts) + len(members) < len(scheduler.running):
            ran = members.keys() | {item.seq_id for item in plan.scheduled}
            idle = [sequence for sequence in scheduler.running if sequence.seq_id not in ran]
        scheduler.accounting.record_step(parts, plan.work, idle, times)
        latest.plan, latest.times, latest.took_ns = plan, times, times.computed_ns - times.launched_ns
        scheduler.policy.heed(latest.planned_ns, times)
        self._num_steps, self._context = self._num_steps + 1, self._context + len(members)
        self._sampled_ns, self._is_next_steady = times.sampled_ns, False
        full = self._fillers(0)
        if self._may_register_together(self._num_steps) and self._are_new(full):
            self._register(full)
            self._bring_up_to_date(full)
            ended = self._settle(self._pop_ending())
        else:
            ended = self._settle(self._due())
        return [(sequence, list[int]()) for sequence in ended] + scheduler.apply(parts, tokens, times)

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
        self._num_steps += 1
        self._context += len(self._members)
        self._sampled_ns, self._is_next_steady = sampled_ns, False
        for member in self._ending.pop(self._num_steps, ()):
            if member.sequence.finish_reason is None:
                self._expect_end(member)
            else:
                self._leave(member)
                ended.add(member.sequence.seq_id)
        others = [each for each in changed if each[0].seq_id not in self._members]
        return [(each, [] if each.seq_id in ended else new) for each, new in others]


def _in_order(members: list[_Member]) -> list[_Member]:
    """Members, each once, in the order of running sequences."""
    return sorted(set(members), key=_place) if len(members) > 1 else members


def _is_steady(scheduler: Scheduler) -> bool:
    """Whether the next step gives everybody a token, and leaves nothing to decide."""
    running, sequences = scheduler.running, scheduler.sequences
    if not scheduler.accounting.all_decode(len(running)) or not admits_nobody(scheduler):
        return False
    if len(sequences.waiting) and (sequences.slots is not None or scheduler.config.sharing.prefill_first):
        return False  # a slot may become free for one that waits, or it may take the step from those who decode
    return not (scheduler.has_drafts or scheduler.config.weights) and scheduler.policy.is_steady(running)
