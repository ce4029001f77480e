"""What a simulated server knows of each request, and what may go wrong with it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headway.policy.admission.queue_bound import Place, Refusal, TenantBound
from headway.policy.admission.quota import TOTAL, OverLimit
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.request import FinishReason, Resumed, Sequence
from headway.simulator.traffic import Arrival


class Stuck(RuntimeError):
    """Sequences wait, nothing can run, and nothing will come that could change that."""


class EngineDied(Exception):
    """A `Timing` says so in place of how long a step takes.

    Args:
        at_ns: when, after the step was planned.
        back_ns: when the next engine is there, with nothing in it.
    """

    def __init__(self, at_ns: int, back_ns: int) -> None:
        super().__init__(f"the engine died at {at_ns} and is back at {back_ns}")
        self.at_ns, self.back_ns = at_ns, back_ns


@dataclass(slots=True)
class Answer:
    """What became of a choice of a request."""

    request_id: str
    index: int
    prompt_len: int
    arrived_ns: int  # when the request's last byte came
    token_ns: array[int] = field(default_factory=lambda: array("q"))  # when each token was there
    finish_reason: FinishReason | None = None  # None where the request was refused
    refused: str = ""  # why it was, in words
    is_final: bool = False  # it would have been refused at any time
    ledger: Ledger = field(default_factory=Ledger)  # the ledger from its arrival to its end
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    passed_over: int = 0

    @property
    def ended_ns(self) -> int:
        return self.ledger.last_ns

    @property
    def ttft_ns(self) -> int | None:
        """Nanoseconds from its arrival to its first token, if it had one."""
        return self.token_ns[0] - self.arrived_ns if self.token_ns else None


@dataclass(slots=True)
class Present:
    """A request that has not ended."""

    arrival: Arrival
    answers: list[Answer]
    place: Place
    left: int  # how many choices have not ended
    choices: list[Choice] = field(default_factory=list)  # choices that the engine has
    reservation: int | None = None  # its number, where there are quotas

    def resume(self, lost: list[Choice], died: EngineDied) -> None:
        """The engine that had it has died: have the request say what is known of the choices that it had."""
        request = self.arrival.request
        for choice in lost:
            sequence, answer = choice.sequence, choice.answer
            answer.preemptions, answer.steps = answer.preemptions + sequence.preemptions, answer.steps + sequence.steps
            answer.cached_tokens = sequence.cached_tokens
        if lost:
            request.resumed = [
                Resumed(each.answer.index, each.sequence.tokens[each.sequence.prompt_len :], each.answer.cached_tokens)
                for each in lost
            ]
        request.sent_ns = died.back_ns
        self.forget(died.at_ns)

    def forget(self, now: int) -> None:
        """Forget the choices, because the engine that had them is gone."""
        for choice in self.choices:  # the request itself has no prompt any more
            self.arrival.request.prompt_token_ids = choice.sequence.tokens[: choice.sequence.prompt_len]
        self.choices.clear()
        for answer in self.answers:
            if answer.finish_reason is None:
                answer.ledger.mark(Phase.ENGINE_LOST, now)


@dataclass(slots=True)
class Choice:
    """A choice in the engine."""

    of: Present
    answer: Answer
    sequence: Sequence
    until_last: int  # tokens that it has when its last one is due
    # Tokens that it has when something is to be done about them: of the first, and when the last is due.
    until_next: int = 1
    # The number of the step from which on it had a token in each that is not noted yet; -1 where all are.
    since: int = -1


def in_words(refusal: Refusal) -> str:
    """Why a queue has no place for a request."""
    bound = refusal.bound
    whose = f" of class {bound.service_class}" if bound.service_class else ""
    if isinstance(bound, TenantBound):
        whose = f" of tenant {bound.tenant}"
    asked = f"the request has {refusal.asked} {'prompt tokens' if refusal.unit == 'tokens' else refusal.unit}"
    if refusal.is_final:
        return f"{asked}, and at most {refusal.limit}{whose} may be in the server"
    return f"{asked}, {refusal.present}{whose} are in the server, and at most {refusal.limit} may be"


def over_in_words(over: OverLimit) -> str:
    """Why a budget has nothing for a request."""
    whose = "all tenants together are" if over.tenant == TOTAL else f"tenant {over.tenant!r} is"
    return f"{whose} over the limit of {over.limit} {over.unit} a minute"
