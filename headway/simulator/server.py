"""A server on a virtual clock: the objects that decide in a live one, told the time by an account of everything else.

What comes goes through the queue's bound and the intake to the scheduler. Its plans take as long as a `Timing` says,
and what they draw is made up: only how long an answer is matters.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from headway.policy.intake import check, fit_to_class, fit_to_context, sequences_of, taken_up
from headway.policy.ledger import Ledger, Phase
from headway.policy.queue_bound import QueueLimits, Queues
from headway.policy.quota import OverLimit, Quotas
from headway.policy.request import NEVER, FinishReason, Sequence, Status
from headway.policy.scheduler import Scheduler
from headway.policy.steady import Draws, SteadyDecodes
from headway.policy.step_time import StepWork
from headway.simulator.answers import Answer, Choice, EngineDied, Present, Stuck, in_words, over_in_words
from headway.simulator.log import StepLog
from headway.simulator.timing import DecodeTiming, Timing
from headway.simulator.traffic import EOS, Arrival

# While sequences wait and nothing can run, the scheduler is asked so often; and in the end for so long.
IDLE_NS, STUCK_NS = 1_000_000, 600_000_000_000
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Host:
    """What a server does beside its steps, in nanoseconds.

    Args:
        request_ns: of a request until the engine has it, tokenizing apart.
        token_ns: of a prompt's token to be tokenized. Prompts are tokenized one after the other.
        message_ns: of a message that the engine takes up between two steps.
    """

    request_ns: int = 0
    token_ns: float = 0.0
    message_ns: int = 0


NO_LIMITS, NO_TIME = QueueLimits(), Host()


# Is told of the answers to each request when it has ended; returns what is sent next, then or later.
After = Callable[[list[Answer]], Iterable[Arrival]]
# Is asked of each request when its time has come; a client that says no sends it later, by what `After` returns.
Sends = Callable[[Arrival, int], bool]
NextEngine = Callable[[], Scheduler]


@dataclass(slots=True)
class Simulated:
    """What became of all that came.

    Args:
        answers: in order of arrival.
        ended_ns: when nothing was left to do.
    """

    answers: list[Answer]
    steps: StepLog
    ended_ns: int


def simulate(
    scheduler: Scheduler,
    arrivals: Iterable[Arrival],
    timing: Timing,
    limits: QueueLimits = NO_LIMITS,
    host: Host = NO_TIME,
    after: After | None = None,
    sends: Sends | None = None,
    next_engine: NextEngine | None = None,
    quotas: Quotas | None = None,
) -> Simulated:
    """Let requests come to a server until all of them have ended.

    Args:
        scheduler: as a live server has it, with nothing in it; `SchedulingOptions.scheduler` makes one.
        arrivals: in order of time; each is asked for when the one before comes, and its prompt is kept no longer than
            the scheduler needs it.
        limits: of the queue.
        after, sends: clients that wait for answers.
        next_engine: makes the scheduler of the engine that follows one that has died.
        quotas: what tenants may use.

    Raises:
        Stuck: a sequence can never run.
        EngineDied: and there is no next one.
        ValueError: a request names a class that there is not.
    """
    server = Server(scheduler, timing, limits, host, after, sends, next_engine, quotas)
    server.expect(iter(arrivals))
    server.run()
    return Simulated(server.answers, server.steps, server.now)


class Server:
    """The API process, which goes on beside the steps, and the engine, which takes up messages between them.

    Attributes:
        now: of the engine.
        answers: to all that came, in order of arrival; none where it `keeps_answers` not.
        queues: what counts requests, and refuses those that are too many.
        quotas: what tenants may use; None where there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        timing: Timing,
        limits: QueueLimits,
        host: Host,
        after: After | None,
        sends: Sends | None,
        next_engine: NextEngine | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.answers: list[Answer] = []
        self.keeps_answers = True
        self.steps = StepLog()
        self.now = 0
        self._ran_ns = 0  # when a step was last run
        self._timing = timing
        self._decode_timing = timing if isinstance(timing, DecodeTiming) else None
        self._steady: SteadyDecodes | None = None  # a run of steps that is under way
        self._first_steady = 0  # its first step in the log
        self._host = host
        self.after = after
        self.is_idle = False  # it goes on as soon as something comes
        self._sends = sends
        self._next_engine = next_engine
        self._engine_back_ns = 0
        self.queues = Queues(limits, scheduler.config.classes)
        self.quotas = quotas
        self.queues.set_tenants(scheduler.config.weights or (None if quotas is None else {}))
        self._coming: list[tuple[int, int, Callable[[int], None]]] = []  # to the API process: when, and what
        self._numbers = itertools.count()
        self._tokenizer_free_ns = 0
        self._inbox: deque[tuple[Callable[[Present], None], Present]] = deque()  # of the engine
        self._present: dict[int, Present] = {}  # that have not ended
        self._choices: dict[int, Choice] = {}  # that have not ended, by seq_id
        self._drawn: dict[int, list[int]] = {}  # what is drawn of each next

    def run(self) -> None:
        """Until nothing is left to do. Raises Stuck."""
        life = self.life()
        until = next(life)
        while until < NEVER:
            self.receive(until)
            until = life.send(until)

    def life(self) -> Generator[int, int, None]:
        """What the engine does, for ever. Raises Stuck.

        Yields:
            The time up to which all that comes must have come before it goes on: NEVER when it has nothing to do. It is
            sent the time at which it goes on, which is earlier where something has come that it had not known of.
        """
        while True:
            yield self.now
            if self._inbox:
                self._catch_up()
                for do, present in taken_up(self._messages(), lambda: self.now):
                    do(present)
            if self.scheduler.has_work:
                yield from self._step()
            elif not self._inbox:
                yield from self._idle(NEVER)

    def _idle(self, until: int) -> Generator[int, int, None]:
        """Let time go by until then, or until something comes."""
        self.is_idle = True
        next_ns = max(self.now, self._coming[0][0]) if self._coming else NEVER
        self.now = max(self.now, (yield min(until, next_ns)))
        self.is_idle = False

    # --- the API process ----------------------------------------------------------------------------

    def expect(self, arrivals: Iterator[Arrival]) -> None:
        """Requests come, in order of time."""
        coming = next(arrivals, None)
        if coming is not None:
            self._at(coming.at_ns, partial(self._arrive, coming, arrivals))

    def _at(self, when: int, event: Callable[[int], None]) -> None:
        heapq.heappush(self._coming, (when, next(self._numbers), event))

    def receive(self, until: int) -> None:
        """What comes to the API process until then."""
        while self._coming and self._coming[0][0] <= until:
            when, _, event = heapq.heappop(self._coming)
            event(when)

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival], now: int) -> None:
        self.expect(later)
        if self._sends is None or self._sends(arrival, now):
            self.accept(arrival, now)

    def accept(self, arrival: Arrival, now: int, answers: list[Answer] | None = None) -> list[Answer]:
        """A request has come. Returns the answers to it as they will be.

        Args:
            answers: of a request that has been on another server before, with what is known of it.

        Raises:
            ValueError: it names a class that there is not.
        """
        request, config = arrival.request, self.scheduler.config
        classes, prompt_len = config.classes, len(request.prompt_token_ids)
        if answers and request.service_class not in [each.name for each in classes]:
            request.service_class = ""  # the server before had another file of classes
        answers = answers or [
            Answer(request.request_id, choice.index, prompt_len, now, ledger=Ledger(now)) for choice in request.choices
        ]
        if self.keeps_answers:
            self.answers += answers
        request.arrival_ns = now
        service = classes.named(request.service_class) if request.service_class else classes.default_class
        present = Present(arrival, answers, self.queues.place(service.name, request.tenant), len(answers))
        try:
            fitted = fit_to_context(request.params, prompt_len, config.max_model_len, "max_tokens")
            request.params = fit_to_class(fitted, prompt_len, service, "max_tokens")
            check(request, config.max_model_len, None)
        except ValueError as error:
            self._refuse(present, str(error), True, now)
            return answers
        if now < self._engine_back_ns:
            self._refuse(present, "the engine has died, and the next one is not ready yet", False, now)
            return answers
        over = self.quotas.over_limit(request.tenant, None, now) if self.quotas is not None else None
        if over is not None:
            self._refuse(present, over_in_words(over), False, now)
            return answers
        if (refusal := present.place.take(len(answers))) is not None:
            self._refuse(present, in_words(refusal), refusal.is_final, now)
            return answers
        begun_ns = max(now + self._host.request_ns, self._tokenizer_free_ns)
        self._tokenizer_free_ns = begun_ns + round(prompt_len * self._host.token_ns)
        request.sent_ns = self._tokenizer_free_ns
        self._present[id(present)] = present
        self._at(request.sent_ns, partial(self._hand_over, present))
        if arrival.cancel_ns is not None:
            self._at(max(now, arrival.cancel_ns), partial(self._cancel, present))
        return answers

    def _hand_over(self, present: Present, now: int) -> None:
        if not present.left:
            return
        self._mark_intake(present, now)
        refusal = present.place.take(prompts=[present.answers[0].prompt_len])
        if refusal is not None:
            return self._refuse(present, in_words(refusal), refusal.is_final, now)
        if self.quotas is not None:
            request = present.arrival.request
            output = self.quotas.expected_output(request.tenant, request.params.max_tokens or 1)
            tokens = present.answers[0].prompt_len + len(present.answers) * output
            made = self.quotas.reserve(request.tenant, tokens, now)
            if isinstance(made, OverLimit):
                return self._refuse(present, over_in_words(made), False, now)
            present.reservation = made
        self._inbox.append((self._add, present))

    def _mark_intake(self, present: Present, now: int) -> None:
        for answer in present.answers:
            received_ns = present.arrival.request.arrival_ns + self._host.request_ns
            answer.ledger.mark(Phase.RECEIVE, min(now, received_ns))
            restarts = Phase.ENGINE_LOST in answer.ledger.phases_ns
            answer.ledger.mark(Phase.ENGINE_RESTART if restarts else Phase.TOKENIZE, now)

    def _refuse(self, present: Present, why: str, is_final: bool, now: int) -> None:
        for answer in present.answers:
            answer.refused, answer.is_final = why, is_final
        self._ended(present, len(present.answers), now)

    def _cancel(self, present: Present, now: int) -> None:
        if present.left and present.arrival.request.sent_ns <= now:
            self._inbox.append((self._abort, present))
        elif present.left:
            self._mark_intake(present, now)
            self._give_up(present, now)

    def _ended(self, present: Present, choices: int, now: int) -> None:
        """So many of its choices have ended."""
        present.place.ended(now, choices)
        present.left -= choices
        if present.left:
            return
        present.place.close(now)
        present.choices.clear()
        self._present.pop(id(present), None)
        if self.quotas is not None and present.reservation is not None:
            had = sum(len(answer.token_ns) for answer in present.answers)
            ends = [len(each.token_ns) for each in present.answers if each.finish_reason in _OWN_ENDS]
            self.quotas.settle(present.reservation, present.answers[0].prompt_len + had if had else None, now, ends)
        for arrival in self.after(present.answers) if self.after is not None else ():
            self._at(max(now, arrival.at_ns), partial(self._arrive, arrival, iter(())))

    # --- the engine ---------------------------------------------------------------------------------

    def _messages(self) -> Iterator[tuple[Callable[[Present], None], Present]]:
        while self._inbox:
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
        for choice in list(present.choices):
            if choice.sequence.finish_reason is None:
                self.scheduler.abort(choice.sequence, self.now)
                self._end(choice)

    def _step(self) -> Generator[int, int, None]:
        planned = self.now
        if self._decode_timing is not None and (work := self._steady_work(planned)) is not None:
            return (yield from self._decode(self._decode_timing, work))
        plan = self.scheduler.schedule(planned)
        for seq_id in plan.expired:
            self._end(self._choices[seq_id])
        if not plan.scheduled:
            return (yield from self._wait(plan.wait_until_ns))
        try:
            times = self._timing.times(plan, planned + self.scheduler.config.swap.one_way_ns(plan.swaps))
        except EngineDied as died:
            if self._next_engine is None:
                raise
            yield died.at_ns
            return self._go_on(died, self._next_engine())
        yield times.sampled_ns - 1  # what comes during a step finds the queue as it was before its end
        changed = self.scheduler.complete(plan, self._drawn, times)
        self.now = self._ran_ns = now = times.sampled_ns
        self.steps.add(planned, plan.work, len(plan.scheduled), len(plan.preempted), times, self.scheduler)
        choices = self._choices
        for sequence, _ in changed:
            choice = choices[sequence.seq_id]
            token_ns = choice.answer.token_ns
            token_ns.append(now)
            if len(token_ns) == choice.until_next:
                self._heed(choice, now)
            if sequence.finish_reason is not None:
                self._end(choice)

    def _heed(self, choice: Choice, now: int) -> None:
        """A choice has had its first token, or its last one is due."""
        if choice.until_next == 1:
            choice.of.place.had_output(0, now)
        if len(choice.answer.token_ns) == choice.until_last:
            self._drawn[choice.sequence.seq_id] = [EOS]
        choice.until_next = choice.until_last

    def _steady_work(self, now: int) -> StepWork | None:
        """Of the next step, where the same choices decode in it as before and nothing is to be decided."""
        if self._steady is None:
            self._steady, self._first_steady = SteadyDecodes.of(self.scheduler, self._draws), len(self.steps)
        work = None if self._steady is None else self._steady.work_of_step(now)
        if work is None:
            self._catch_up()
        return work

    def _draws(self, sequence: Sequence) -> Draws:
        choice = self._choices[sequence.seq_id]
        left = choice.until_last - len(choice.answer.token_ns)
        return choice.of.arrival.answer, left if left > 0 else 0, EOS

    def _decode(self, timing: DecodeTiming, work: StepWork) -> Generator[int, int, None]:
        """A step with this work of the choices that decode."""
        planned, steady = self.now, self._steady
        assert steady is not None
        times = timing.decode_times(work, steady.contexts, planned)
        yield times.sampled_ns - 1
        ended = steady.complete(times)
        self.now = self._ran_ns = times.sampled_ns
        self.steps.add(planned, work, work.decode_tokens, 0, times, self.scheduler)
        for sequence in ended:
            choice = self._choices[sequence.seq_id]
            choice.answer.token_ns += self.steps.sampled_ns[self._first_steady :]
            self._end(choice)

    def _catch_up(self) -> None:
        """A run of steady steps is over, if one was under way."""
        if self._steady is None:
            return
        self._steady.catch_up()
        self._steady = None
        tokens_ns = self.steps.sampled_ns[self._first_steady :]
        for choice in self._choices.values() if tokens_ns else ():
            if choice.sequence.status is Status.RUNNING:
                choice.answer.token_ns += tokens_ns
                if len(choice.answer.token_ns) == choice.until_last:
                    self._drawn[choice.sequence.seq_id] = [EOS]

    def _go_on(self, died: EngineDied, scheduler: Scheduler) -> None:
        """Requests of an engine that has died go on in the next one after their tokens, as `engine.requests` has it.

        What it had not taken up is lost with it: requests are handed over again, and those given up have ended.
        """
        self.steps.engines_lost += 1
        self._engine_back_ns = died.back_ns
        inside = {id(choice.of): choice.of for choice in self._choices.values()}
        inside |= {id(present): present for do, present in self._inbox if do == self._add}
        given_up = {id(present) for do, present in self._inbox if do == self._abort}
        lost, self.scheduler = self._choices, scheduler
        self._choices, self._drawn = {}, {}
        self._inbox.clear()
        for present in inside.values():
            present.resume([choice for choice in lost.values() if choice.of is present], died)
            if id(present) in given_up:
                self._give_up(present, died.at_ns)
            else:
                self._inbox.append((self._add, present))
        self.now = self._ran_ns = died.back_ns

    def fail(self, now: int) -> list[Present]:
        """The server is gone with all that it had, and begins anew with nothing, whenever something comes to it.

        Requests that had a token end with an error. Returns the others, which another server may begin.
        """
        assert self._next_engine is not None
        self._catch_up()
        self.steps.engines_lost += 1
        lost, self._present = list(self._present.values()), {}
        self.scheduler, self.now = self._next_engine(), now
        self.is_idle, self._tokenizer_free_ns, self._engine_back_ns = False, 0, 0
        for kept in (self._choices, self._drawn, self._inbox, self._coming):
            kept.clear()
        unbegun = []
        for present in lost:
            present.forget(now)
            if present.left == len(present.answers) and not any(answer.token_ns for answer in present.answers):
                present.place.close(now)
                if self.quotas is not None and present.reservation is not None:
                    self.quotas.settle(present.reservation, None, now)
                unbegun.append(present)
            else:
                self._give_up(present, now, FinishReason.ERROR)
        gone = {id(answer) for present in unbegun for answer in present.answers}
        self.answers = [answer for answer in self.answers if id(answer) not in gone]
        return unbegun

    def _give_up(self, present: Present, now: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """No engine has it any more."""
        open_ = [answer for answer in present.answers if answer.finish_reason is None]
        for answer in open_:
            answer.finish_reason = reason
        self._ended(present, len(open_), now)

    def _wait(self, until: int) -> Generator[int, int, None]:
        """Nothing could run: until then, or until something comes for the engine.

        Args:
            until: 0 where the scheduler does not say.
        """
        if not self.scheduler.has_work:
            return
        if not self._coming and self.now - self._ran_ns > STUCK_NS:
            raise Stuck(f"{len(self.scheduler.waiting)} sequences wait, and for {STUCK_NS / 1e9:g} s none could run")
        until = max(until, self.now + 1) if until else self.now + IDLE_NS
        while not self._inbox and self.now < until:
            yield from self._idle(until)

    def _end(self, choice: Choice) -> None:
        """The scheduler has ended it."""
        sequence, answer = choice.sequence, choice.answer
        del self._choices[sequence.seq_id], self._drawn[sequence.seq_id]
        answer.finish_reason = sequence.finish_reason
        answer.ledger.mark_parts(sequence.ledger.phases_ns)
        answer.cached_tokens = sequence.cached_tokens
        answer.preemptions, answer.steps = answer.preemptions + sequence.preemptions, answer.steps + sequence.steps
        answer.passed_over += sequence.passed_over
        self._ended(choice.of, 1, answer.ledger.last_ns)
