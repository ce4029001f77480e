"""A server on a virtual clock: the objects that decide in a live one, told the time by an account of everything else.

What comes goes through the queue's bound and the intake to the scheduler. Its plans take as long as a `Timing` says,
and what they draw is made up: only how long an answer is matters.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from headway.policy.admission.lengths import fit_to_class, fit_to_context
from headway.policy.admission.queue_bound import QueueLimits, Queues
from headway.policy.admission.quota import OverLimit, Quotas
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.request import NEVER, FinishReason, check
from headway.policy.step.scheduler import Scheduler
from headway.simulator.answers import Answer, Present, in_words, over_in_words
from headway.simulator.engine import Engine, Host, NextEngine, sampled_ns
from headway.simulator.log import StepLog
from headway.simulator.timing import Timing
from headway.simulator.traffic import Arrival

_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
NO_LIMITS, NO_TIME = QueueLimits(), Host()

# A function that takes the answers to a request that has ended, and returns what is sent next, at once or later.
After = Callable[[list[Answer]], Iterable[Arrival]]
# A function that says whether a request is sent, as its time has come. If not, the client sends it through `After`.
Sends = Callable[[Arrival, int], bool]


@dataclass(slots=True)
class Simulated:
    """The result of a simulation."""

    answers: list[Answer]  # in order of arrival
    steps: StepLog
    ended_ns: int  # when nothing was left to do


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
        limits: the limits of the queue.
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


class Server(Engine):
    """An engine, and the API process before it, which goes on beside the steps.

    Attributes:
        answers: answers to all that came, in order of arrival; none where it `keeps_answers` not.
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
        super().__init__(scheduler, timing, host, next_engine)
        self.answers: list[Answer] = []
        self.keeps_answers = True
        self.after = after
        self._sends = sends
        self.queues = Queues(limits, scheduler.config.classes)
        self.quotas = quotas
        self.queues.set_tenants(scheduler.config.weights or (None if quotas is None else {}))
        self._coming: list[tuple[int, int, Callable[[int], None]]] = []  # to the API process: when, and what
        self._numbers = itertools.count()
        self._tokenizer_free_ns = 0
        self._present: dict[int, Present] = {}  # requests that have not ended

    def run(self) -> None:
        """Run until nothing is left to do. Raises Stuck."""
        life = self.life()
        until = next(life)
        while until < NEVER:
            self.receive(until)
            until = life.send(until)

    def expect(self, arrivals: Iterator[Arrival]) -> None:
        """Expect these requests, which are in order of time."""
        coming = next(arrivals, None)
        if coming is not None:
            self._at(coming.at_ns, partial(self._arrive, coming, arrivals))

    def _at(self, when: int, event: Callable[[int], None]) -> None:
        heapq.heappush(self._coming, (when, next(self._numbers), event))

    def _next_ns(self) -> int:
        return self._coming[0][0] if self._coming else NEVER

    def receive(self, until: int) -> bool:
        """Handle all that comes to the API process up to `until`. Returns whether more is to come."""
        while self._coming and self._coming[0][0] <= until:
            when, _, event = heapq.heappop(self._coming)
            event(when)
        return bool(self._coming)

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival], now: int) -> None:
        self.expect(later)
        if self._sends is None or self._sends(arrival, now):
            self.accept(arrival, now)

    def accept(self, arrival: Arrival, now: int, answers: list[Answer] | None = None) -> list[Answer]:
        """A request has come. Returns the answers to it as they will be.

        Args:
            answers: answers of a request that has been on another server before, with what is known of it.

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
        if self.adapters is not None and not request.adapter:
            request.adapter = self.adapters.plan.of(request.request_id)
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
        if now < self._back_ns:
            self._refuse(present, "the engine has died, and the next one is not ready yet", False, now)
            return answers
        over = self.quotas.over_limit(request.tenant, None, now) if self.quotas is not None else None
        if over is not None:
            self._refuse(present, over_in_words(over), False, now)
            return answers
        if (refusal := present.place.take(len(answers))) is not None:
            self._refuse(present, in_words(refusal), refusal.is_final, now)
            return answers
        running_ns = self._host.output_ns * len(self.scheduler.running)
        begun_ns = max(now + self._host.request_ns + running_ns, self._tokenizer_free_ns)
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
        """Count choices of a request that have ended."""
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

    def fail(self, now: int) -> list[Present]:
        """The server is gone with all that it had, and begins anew with nothing, whenever something comes to it.

        Requests that had a token end with an error. Returns the others, which another server may begin.
        """
        assert self._next_engine is not None
        self._take_steps(bisect_right(self._under_way, now, key=sampled_ns))
        self._catch_up()
        self._end_run(len(self.steps))
        self.steps.engines_lost += 1
        lost, self._present = list(self._present.values()), {}
        self.now = now
        self._begin_anew(self._next_engine())
        self.is_idle, self._tokenizer_free_ns, self._back_ns = False, 0, 0
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
        """End a request that no engine has any more."""
        open_ = [answer for answer in present.answers if answer.finish_reason is None]
        for answer in open_:
            answer.finish_reason = reason
        self._ended(present, len(open_), now)
