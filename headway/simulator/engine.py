"""The engine of a simulated server: takes up messages, plans steps, and lets them take as long as a `Timing` says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from operator import attrgetter

from headway.policy.admission.intake import taken_up
from headway.policy.step.accounting import StepTimes
from headway.policy.step.ledger import Phase
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import NEVER, Sequence, sequences_of
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.steady import Draws, SteadyDecodes
from headway.policy.step.step_time import StepWork
from headway.simulator.adapters import Adapters
from headway.simulator.answers import Choice, EngineDied, Present, Stuck
from headway.simulator.drafts import Drafts
from headway.simulator.log import StepLog
from headway.simulator.timing import BesideTiming, DecodeTiming, ForeseenTiming, Timing
from headway.simulator.traffic import EOS

# While sequences wait and nothing can run, the scheduler is asked so often; and in the end for so long.
IDLE_NS, STUCK_NS = 1_000_000, 600_000_000_000


@dataclass(frozen=True, slots=True)
class Host:
    """The nanoseconds that a server takes beside its steps."""

    request_ns: int = 0  # for a request until the engine has it, without tokenizing
    token_ns: float = 0.0  # for tokenizing a token of a prompt. Prompts are tokenized one after the other.
    message_ns: int = 0  # for a message that the engine takes up between two steps
    # For each sequence that runs when a request comes: the tokens of a step are sent one after the other, and requests
    # are taken up in between.
    output_ns: int = 0
    # The next step is scheduled when one begins, so that what comes meanwhile waits for a further one.
    ahead: bool = False


NextEngine = Callable[[], Scheduler]
sampled_ns = attrgetter("sampled_ns")


class Engine(ABC):
    """Runs steps, and takes up messages between them. `Server` sends these, and is told what has ended.

    Attributes:
        now: the time.
        steps: the log of the steps that were run.
        is_idle: it is to be told as soon as something comes.
        drafts: has steps try drafts; None without speculation.
        adapters: those that requests are for; None without any.
    """

    def __init__(self, scheduler: Scheduler, timing: Timing, host: Host, next_engine: NextEngine | None) -> None:
        self._begin(scheduler)
        self.steps = StepLog()
        self.now = 0
        self.is_idle = False
        self._ran_ns = 0  # when a step was last run
        self._timing = timing
        self._decode_timing = timing if isinstance(timing, DecodeTiming) else None
        self._foreseen_timing = timing if isinstance(timing, ForeseenTiming) else None
        self._beside_timing = timing if isinstance(timing, BesideTiming) else None
        self._steady: SteadyDecodes | None = None  # a run of steps that is under way
        self._under_way: list[StepTimes] = []  # of these, those that need no look
        self._host = host
        self._next_engine = next_engine
        self._back_ns = 0  # when it was there after one had died
        self._inbox: deque[tuple[Callable[[Present], None], Present]] = deque()
        self._early = 0  # messages that were there when the last step began
        self._choices: dict[int, Choice] = {}  # choices that have not ended, by seq_id
        self._drawn: dict[int, list[int]] = {}  # what is drawn of each next
        self.drafts: Drafts | None = None
        self.adapters: Adapters | None = None

    @abstractmethod
    def _next_ns(self) -> int:
        """The time when something comes next, as far as it is known; NEVER if nothing is known to come."""

    @abstractmethod
    def _ended(self, present: Present, choices: int, now: int) -> None:
        """Count choices of a request that have ended."""

    @abstractmethod
    def _give_up(self, present: Present, now: int) -> None:
        """Note that no engine has the request any more."""

    def life(self) -> Generator[int, int, None]:
        """Run the engine for ever. Raises Stuck.

        Yields:
            The time up to which all that comes must have come before it goes on: NEVER when it has nothing to do. It is
            sent the time at which it goes on, which is earlier where something has come that it had not known of.
        """
        yield self.now
        while True:
            if self._inbox and (count := self._early if self._waits_for_a_step else len(self._inbox)):
                if self._steady is not None:
                    self._steady.look_again()
                for do, present in taken_up(self._messages(count), lambda: self.now):
                    do(present)
            self._early = len(self._inbox)
            if self.scheduler.has_work:
                if (yield from self._decode()):
                    continue
                yield from self._step()
            elif not self._inbox:
                yield from self._idle(NEVER)
            yield self.now

    def _idle(self, until: int) -> Generator[int, int, None]:
        """Let time go by until then, or until something comes."""
        self.is_idle = True
        self.now = max(self.now, (yield min(until, max(self.now, self._next_ns()))))
        self.is_idle = False

    # --- messages -----------------------------------------------------------------------------------

    @property
    def _waits_for_a_step(self) -> bool:
        """The next step was scheduled when the last one began, with what had come until then."""
        return self._host.ahead and (self._early > 0 or self.scheduler.has_work)

    def _messages(self, count: int) -> Iterator[tuple[Callable[[Present], None], Present]]:
        for _ in range(count):
            self.now += self._host.message_ns
            yield self._inbox.popleft()

    def _add(self, present: Present) -> None:
        if not present.left:
            return
        arrival = present.arrival
        config = self.scheduler.config
        sequences = sequences_of(arrival.request, config.max_model_len, config.classes)
        for sequence in sequences:
            self.scheduler.add(sequence, self.now)
            answer = next(each for each in present.answers if each.index == sequence.index)
            answer.ledger.mark(Phase.ENGINE_RESTART, arrival.request.sent_ns)
            longest, known = sequence.max_len - sequence.prompt_len, len(answer.token_ns)
            until_last = longest if arrival.output_len is None else min(longest, arrival.output_len) - 1
            choice = Choice(present, answer, sequence, until_last, until_last if known else 1)
            present.choices.append(choice)
            self._choices[sequence.seq_id] = choice
            self._drawn[sequence.seq_id] = [arrival.answer if known < until_last else EOS]
        arrival.request.prompt_token_ids = []  # the sequences have them; those of all requests would fill the memory

    def _abort(self, present: Present) -> None:
        self._catch_up()
        self._end_run(len(self.steps))
        for choice in list(present.choices):
            if choice.sequence.finish_reason is None:
                self.scheduler.abort(choice.sequence, self.now)
                if self.drafts is not None:
                    self.drafts.forget(choice.sequence)
                self._end(choice)

    # --- steps --------------------------------------------------------------------------------------

    def _step(self) -> Generator[int, int, None]:
        """Run a step with a plan."""
        if self.drafts is not None:
            self.now = self.drafts.propose(self._choices, self.now)
        planned = self.now
        self._catch_up()
        if self.adapters is not None:
            self.adapters.before(planned)
        plan = self.scheduler.schedule(planned)
        if self.adapters is not None:
            self.adapters.planned(plan, planned)
        for seq_id in plan.expired:
            self._end(self._choices[seq_id])
        beside = None if self._steady is None else self._steady.beside
        if not (plan.scheduled or beside):
            return (yield from self._wait(plan.wait_until_ns))
        try:
            times = self._times(plan, beside, planned + self.scheduler.config.swap.one_way_ns(plan.swaps))
        except EngineDied as died:
            if self._next_engine is None:
                raise
            yield died.at_ns
            return self._continue_in(died, self._next_engine())
        if self.adapters is not None:
            times = self.adapters.longer(times, plan, self._choices)
        yield times.sampled_ns - 1  # what comes during a step finds the queue as it was before its end
        drawn = self._drawn if self.drafts is None else self.drafts.drawn(plan, self._choices, self._drawn)
        complete = self._steady.complete_beside if self._steady is not None and beside else self.scheduler.complete
        changed = complete(plan, drawn, times)
        self.now = self._ran_ns = now = times.sampled_ns
        sequences = len(plan.scheduled) + (0 if beside is None else beside.decode_tokens)
        self._log(planned, plan.work, sequences, len(plan.preempted), times)
        choices = self._choices
        if self.drafts is not None:
            self.drafts.step_ended(plan, changed, planned, times)
        if self._steady is not None and not beside:
            if (others := self._steady.absorb(changed, now)) is None:
                self._end_run(len(self.steps) - 1)
            else:
                changed = others
        for sequence, new in changed:
            choice = choices[sequence.seq_id]
            token_ns = choice.answer.token_ns
            for _ in new:
                token_ns.append(now)
                if len(token_ns) == choice.until_next:
                    self._note_first_token(choice, now)
            if sequence.finish_reason is not None:
                self._end(choice)
            elif self._steady is not None:
                self._steady.join(sequence)

    def _times(self, plan: StepPlan, beside: StepWork | None, launched_ns: int) -> StepTimes:
        if beside is not None and self._beside_timing is not None and self._steady is not None:
            return self._beside_timing.times_beside(plan, beside, self._steady.contexts, launched_ns)
        return self._timing.times(plan, launched_ns)

    def _log(self, planned: int, work: StepWork, sequences: int, preempted: int, times: StepTimes) -> None:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        self.steps.add(
            planned, work, sequences, preempted, times, running, waiting, blocks.num_blocks - blocks.num_free
        )

    def _note_first_token(self, choice: Choice, now: int) -> None:
        """A choice has had its first token, or its last one is due."""
        if choice.until_next == 1:
            choice.of.place.had_output(0, now)
        if len(choice.answer.token_ns) == choice.until_last:
            self._drawn[choice.sequence.seq_id] = [EOS]
        choice.until_next = choice.until_last

    def _next_steps(self, timing: DecodeTiming) -> list[StepTimes]:
        """The next steps, where the same choices decode in them as before and nothing is to be decided."""
        if self._steady is None and self.drafts is None and self.adapters is None:
            self._steady = SteadyDecodes.of(self.scheduler, self._draws)
            if self._steady is not None and self._beside_timing is not None:
                self.scheduler.decode = self._steady.decode
        if self._steady is None or (found := self._steady.next_steps(self.now)) is None:
            return []
        work, most = found
        if most > 1 and self._foreseen_timing is not None:
            return self._foreseen_timing.next_times(work, self._steady.contexts, self.now, most)
        return [timing.decode_times(work, self._steady.contexts, self.now)]

    def _draws(self, sequence: Sequence) -> Draws:
        """What is drawn of a choice that gets a token in each step of the run from the next one on."""
        choice = self._choices[sequence.seq_id]
        choice.since = len(self.steps)
        left = choice.until_last - len(choice.answer.token_ns)
        return choice.of.arrival.answer, left if left > 0 else 0, EOS

    def _decode(self) -> Generator[int, int, bool]:
        """Take steps that need no plan.

        Returns:
            False when the next step needs one; True when something has come, or nothing is left to do.
        """
        timing = self._decode_timing
        while timing is not None and (steps := self._next_steps(timing)):
            self._under_way = steps
            last = (yield from self._until_called(steps)) if len(steps) > 1 else 0
            yield steps[last].sampled_ns - 1
            self._take_steps(last + 1)
            yield self.now
            if self._inbox or not self.scheduler.has_work:
                return True
        return False

    def _until_called(self, steps: list[StepTimes]) -> Generator[int, int, int]:
        """Let steps go by until something comes for the engine. Returns the number of the one that is the last then."""
        came, until = self.now, steps[-1].sampled_ns - 1
        self.is_idle = True
        while not self._inbox and came < until:
            came = yield min(until, max(self.now, self._next_ns()))
        self.is_idle = False
        return bisect_left(steps, came, key=sampled_ns)

    def _take_steps(self, count: int) -> None:
        """So many of the steps under way have ended."""
        steps, self._under_way = self._under_way[:count], []
        if not steps or self._steady is None:
            return
        planned, scheduler = self.now, self.scheduler
        sequences = len(scheduler.running)
        ended = self._steady.complete(steps)
        self.now = self._ran_ns = steps[-1].sampled_ns
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        self.steps.add_decodes(planned, steps, sequences, running, waiting, self._steady.held)
        for sequence in ended:
            self._end(self._choices[sequence.seq_id])

    def _catch_up(self) -> None:
        """Bring the sequences of a run of steps up to date, if one is under way."""
        for sequence in () if self._steady is None else self._steady.catch_up():
            self._drawn[sequence.seq_id] = [EOS]

    def _end_run(self, steps: int) -> None:
        """The run of steps is over, if one is under way, and its choices had a token in the first so many of all."""
        self._steady, self.scheduler.decode = None, self.scheduler.decode_each
        for choice in self._choices.values():
            if choice.since >= 0:
                self._note_tokens(choice, steps)
                if len(choice.answer.token_ns) == choice.until_last:
                    self._drawn[choice.sequence.seq_id] = [EOS]

    def _note_tokens(self, choice: Choice, steps: int) -> None:
        """Note the tokens that a choice had in the run of steps."""
        if choice.since >= 0:
            choice.answer.token_ns += self.steps.sampled_ns[choice.since : steps]
            choice.since = -1

    def _wait(self, until: int) -> Generator[int, int, None]:
        """Wait because nothing could run, until that time or until something comes for the engine.

        Args:
            until: 0 where the scheduler does not say.
        """
        if not self.scheduler.has_work:
            return
        if self._next_ns() >= NEVER and self.now - self._ran_ns > STUCK_NS:
            raise Stuck(f"{len(self.scheduler.waiting)} sequences wait, and for {STUCK_NS / 1e9:g} s none could run")
        until = max(until, self.now + 1) if until else self.now + IDLE_NS
        while not self._inbox and self.now < until:
            yield from self._idle(until)

    def _end(self, choice: Choice) -> None:
        """Take a choice that the scheduler has ended out of the engine."""
        sequence, answer = choice.sequence, choice.answer
        self._note_tokens(choice, len(self.steps))
        del self._choices[sequence.seq_id], self._drawn[sequence.seq_id]
        answer.finish_reason = sequence.finish_reason
        answer.ledger.mark_parts(sequence.ledger.phases_ns)
        answer.cached_tokens = sequence.cached_tokens
        answer.preemptions, answer.steps = answer.preemptions + sequence.preemptions, answer.steps + sequence.steps
        answer.passed_over += sequence.passed_over
        self._ended(choice.of, 1, answer.ledger.last_ns)

    # --- engines that die ---------------------------------------------------------------------------

    def _continue_in(self, died: EngineDied, scheduler: Scheduler) -> None:
        """Requests of an engine that has died go on in the next one after their tokens, as `engine.requests` has it.

        What it had not taken up is lost with it: requests are handed over again, and those given up have ended.
        """
        self._end_run(len(self.steps))
        self.steps.engines_lost += 1
        self._back_ns = died.back_ns
        self._begin_anew(scheduler)
        inside = {id(choice.of): choice.of for choice in self._choices.values()}
        inside |= {id(present): present for do, present in self._inbox if do == self._add}
        given_up = {id(present) for do, present in self._inbox if do == self._abort}
        lost = self._choices
        self._choices, self._drawn = {}, {}
        self._inbox.clear()
        for present in inside.values():
            present.resume([choice for choice in lost.values() if choice.of is present], died)
            if id(present) in given_up:
                self._give_up(present, died.at_ns)
            else:
                self._inbox.append((self._add, present))
        self.now = self._ran_ns = died.back_ns

    def _begin(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.decisions = deque(maxlen=1)  # nobody looks back, and plans of many steps would fill the cache

    def _begin_anew(self, scheduler: Scheduler) -> None:
        """Have the scheduler of another engine, which knows nothing."""
        self._begin(scheduler)
        if self.drafts is not None:
            self.drafts = Drafts(self.drafts.plan, scheduler)
        if self.adapters is not None:
            self.adapters = Adapters(self.adapters.plan, scheduler)
