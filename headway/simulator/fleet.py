"""Several simulated servers behind a router, on one virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec.structs import replace as with_fields

from headway.policy.fleet.backend import Backend, ask_of
from headway.policy.fleet.routing import Router
from headway.policy.fleet.scaling import Scaler
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.request import NEVER, FinishReason
from headway.policy.step.step_time import StepWork
from headway.simulator.answers import Answer
from headway.simulator.server import After, Sends, Server
from headway.simulator.traffic import Arrival

PREFILL, DECODE = ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a fleet grows and shrinks."""

    scaler: Scaler
    make: Callable[[], Server]  # a server that nothing has come to
    startup_ns: int  # until a server that is started takes requests


@dataclass(frozen=True, slots=True)
class Failure:
    """A server is gone with all that it had, and takes requests again at `back_ns`."""

    at_ns: int
    replica: int  # its number, from 0
    back_ns: int


@dataclass(frozen=True, slots=True)
class Handover:
    """The cost of sending keys and values from a server to another, one request after the other."""

    token_bytes: float = 0.0  # bytes that each device sends for a token; devices send at the same time
    bytes_per_s: float = 1.0  # the rate of a device
    latency_s: float = 0.0
    chunk_tokens: int = 0  # of a chunk, which is sent while the next one is computed; 0 where all is sent at the end

    def ns(self, tokens: int) -> int:
        """Nanoseconds until so many tokens are sent."""
        return round(1e9 * (self.latency_s + tokens * self.token_bytes / self.bytes_per_s))

    def until_ns(self, tokens: int, began_ns: int, ended_ns: int, free_ns: int) -> int:
        """When a prompt is sent that was computed evenly between two times, by a server that sends another before."""
        chunk = min(self.chunk_tokens or tokens, tokens)
        first_ns = began_ns + (ended_ns - began_ns) * chunk // tokens
        last = (tokens - 1) % chunk + 1
        return max(max(first_ns, free_ns) + self.ns(tokens), ended_ns + self.ns(last))


NO_HANDOVER = Handover()


@dataclass(slots=True)
class Replica:
    """A server of a fleet, and when it is there."""

    server: Server
    role: str = ""  # prefill computes prompts, and decode the rest, of the same requests; empty does both
    weight: float = 1.0  # the weight by which routers divide its load
    handover: Handover = NO_HANDOVER  # the handover of what it has computed of prompts
    started_ns: int = 0  # it costs from then on
    ready_ns: int = 0  # it takes requests from then on
    left_ns: int = NEVER  # it takes no more requests, but ends those that it has; NEVER while it stays
    routed: int = 0  # requests that it got
    failures: int = 0  # how often it was gone
    sends_until_ns: int = 0  # what it has computed of prompts
    seen: Backend = field(init=False)  # what routers see of it; the fleet gives that its name

    def __post_init__(self) -> None:
        self.seen = Backend("", self.server.queues, self.weight)

    def lasted_ns(self, began_ns: int, ended_ns: int) -> int:
        """How long this server was there in a run. One that has left was there until its last request had ended."""
        until = ended_ns
        if self.left_ns < NEVER:
            until = max(self.left_ns, self.server.now if self.routed else 0)
        return max(0, min(until, ended_ns) - max(self.started_ns, began_ns))


class Fleet:
    """Servers that go on beside each other. A request is routed by what their queues count when it comes.

    Where servers have roles, it is sent to one of `prefill` for a single token, which nobody sees, and when its keys
    and values have been sent to one of `decode` for all of its tokens. A request on a server that fails goes to another
    if nothing of its answer was sent.

    Args:
        servers: servers that nothing has come to, without clients of their own.
        router: a router that has chosen nobody yet; each role has one like it.
        after, sends: clients that wait for answers, as of `simulate`.
        scaling: None leaves the servers as they are.
        keeps_answers: False where `after` alone is told of them, as those of very many requests fill the memory.
        failures: in order of time; each is asked for when the one before has come. Those after the last request has
            ended do not come.

    Attributes:
        answers: in order of arrival.
        replicas: those that were there at any time, in the order in which they were started.
    """

    def __init__(
        self,
        servers: Sequence[Server | Replica],
        router: Router,
        after: After | None = None,
        sends: Sends | None = None,
        scaling: Scaling | None = None,
        failures: Iterable[Failure] = (),
        keeps_answers: bool = True,
    ) -> None:
        self.answers: list[Answer] = []
        self._keeps_answers = keeps_answers
        self.replicas: list[Replica] = []
        self._scaling = scaling
        self._routers = {role: deepcopy(router) for role in ("", *ROLES)}
        self._after = after
        self._sends = sends
        self._numbers = itertools.count()
        self._coming: list[tuple[int, int, Callable[[int], None]]] = []  # when, and what
        self._failures = iter(failures)
        self._lives: list[Generator[int, int, None]] = []
        self._until: list[int] = []  # up to which each must hear of all that comes
        self._waits: list[tuple[int, int]] = []
        self._told: set[int] = set()  # servers to which more is to come of what they were sent
        self._ready: dict[str, tuple[int, list[int], list[Backend]]] = {}  # by role: those that are there, until when
        self._learning: dict[str, tuple[StepWork, int]] = {}  # of requests on servers: what each waits for, since when
        self._halfway: dict[str, tuple[Arrival, list[Answer]]] = {}  # requests of which the prompt is being computed
        for each in servers:
            self._start(each if isinstance(each, Replica) else Replica(each))
        self._first_role = PREFILL if any(replica.role for replica in self.replicas) else ""

    def _start(self, replica: Replica) -> None:
        replica.server.after = partial(self._ended, replica)
        replica.server.keeps_answers = self._keeps_answers
        replica.server.now = replica.ready_ns
        replica.seen.name = str(len(self.replicas))
        self.replicas.append(replica)
        self._ready.clear()
        self._lives.append(replica.server.life())
        self._until.append(NEVER)
        self._live(len(self.replicas) - 1)

    def _live(self, at: int) -> None:
        """Let a server begin to run."""
        self._until[at] = next(self._lives[at])
        heapq.heappush(self._waits, (self._until[at], at))

    @property
    def servers(self) -> list[Server]:
        return [replica.server for replica in self.replicas]

    @property
    def now(self) -> int:
        """The time when the last step of all servers ended."""
        return max([replica.server.now for replica in self.replicas if replica.routed], default=0)

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Run until nothing is left to do.

        Args:
            arrivals: in order of time; each is asked for when the one before comes.

        Raises:
            Stuck: a sequence can never run.
            ValueError: a request names a class that there is not.
        """
        self._expect(iter(arrivals))
        failure = next(self._failures, None)
        while True:
            until, at = self._waits[0]
            if until != self._until[at]:
                heapq.heappop(self._waits)  # it was woken earlier
                continue
            upcoming = self._coming[0][0] if self._coming else NEVER
            if min(until, upcoming) >= NEVER:
                return
            if failure is not None and failure.at_ns <= min(until, upcoming):
                self._fail(failure)
                failure = next(self._failures, None)
            elif upcoming <= until:
                when, _, event = heapq.heappop(self._coming)
                event(when)
            else:
                self.replicas[at].server.receive(until)
                until = self._until[at] = self._lives[at].send(until)
                heapq.heapreplace(self._waits, (until, at))

    def _at(self, when: int, event: Callable[[int], None]) -> None:
        heapq.heappush(self._coming, (when, next(self._numbers), event))

    def _expect(self, arrivals: Iterator[Arrival]) -> None:
        """The next of those that come whatever the servers do."""
        arrival = next(arrivals, None)
        if arrival is not None:
            self._at(arrival.at_ns, partial(self._arrive, arrival, arrivals))

    def _arrive(self, arrival: Arrival, later: Iterator[Arrival], now: int) -> None:
        self._expect(later)
        if self._sends is not None and not self._sends(arrival, now):
            return
        self._receive(now)
        if self._scaling is not None:
            self._scale(self._scaling, now)
        self._begin(arrival, [], now)

    def _receive(self, now: int) -> None:
        """Have all servers know what has come to them, as routers see what their queues count."""
        self._told = {at for at in sorted(self._told) if self.replicas[at].server.receive(now)}

    # --- where a request goes -----------------------------------------------------------------------

    def _begin(self, arrival: Arrival, answers: list[Answer], now: int) -> None:
        """Send a request to its first server.

        Args:
            answers: where it was on one before, that failed.
        """
        if not self._first_role:
            self._route(arrival, answers, "", now)
            return
        request = arrival.request
        self._halfway[request.request_id] = arrival, answers
        params = replace(request.params, n=1, max_tokens=1, min_tokens=0)
        first = replace(arrival, request=with_fields(request, params=params, resumed=None), output_len=1)
        prompt_len = len(request.prompt_token_ids)
        since = answers[0].ledger if answers else Ledger(now)
        seen = Answer(request.request_id, 0, prompt_len, since.began_ns, ledger=_copy_of(since))
        self._route(first, [seen], PREFILL, now)

    def _route(self, arrival: Arrival, answers: list[Answer], role: str, now: int) -> None:
        """Send a request to a server of a role."""
        ready, seen = self._ready_for(role, now)
        if not ready:
            self._refuse(arrival, answers, role, now)
            return
        classes = self.replicas[ready[0]].server.scheduler.config.classes
        ask = ask_of(arrival.request, classes, now - answers[0].arrived_ns if answers else 0)
        router = self._routers[role]
        chosen = ready[router.choose(ask, seen)]
        replica = self.replicas[chosen]
        replica.routed += 1
        if router.learns:
            self._learning[arrival.request.request_id] = replica.seen.sent(ask), now
        is_known = bool(answers)
        found = replica.server.accept(arrival, now, answers)
        self._told.add(chosen)
        if not is_known:
            self._keep(found)
        if replica.server.is_idle and now < self._until[chosen]:
            self._advance(chosen, now)

    def _ready_for(self, role: str, now: int) -> tuple[list[int], list[Backend]]:
        """The servers of a role that take requests now: their numbers, and what routers see of them."""
        until, ready, seen = self._ready.get(role, (0, [], []))
        if until <= now:
            alike = [(at, each) for at, each in enumerate(self.replicas) if each.role == role]
            ready = [at for at, each in alike if each.ready_ns <= now < each.left_ns]
            seen = [self.replicas[at].seen for at in ready]
            changes = [at_ns for _, each in alike for at_ns in (each.ready_ns, each.left_ns) if at_ns > now]
            until = min(changes, default=NEVER)
            self._ready[role] = until, ready, seen
        return ready, seen

    def _refuse(self, arrival: Arrival, answers: list[Answer], role: str, now: int) -> None:
        """Refuse a request, because there is no server that could take it."""
        request = arrival.request
        if not answers:
            prompt_len = len(request.prompt_token_ids)
            answers = [
                Answer(request.request_id, each.index, prompt_len, now, ledger=Ledger(now)) for each in request.choices
            ]
            self._keep(answers)
        for answer in answers:
            answer.ledger.mark(Phase.ENGINE_RESTART, now)
            answer.refused, answer.finish_reason = "no server is there", FinishReason.ERROR
        self._tell(answers, role)

    def _ended(self, replica: Replica, answers: list[Answer]) -> Iterable[Arrival]:
        """A request has ended on a server; what its client sends next is routed anew."""
        first = answers[0]
        work, sent_ns = self._learning.pop(first.request_id, (None, 0))
        if work is not None and first.token_ns:
            replica.seen.answered(work, first.token_ns[0] - sent_ns)
        if replica.role == PREFILL and first.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            ended_ns, computing_ns = first.ended_ns, first.ledger.phases_ns.get(Phase.PREFILL_COMPUTE, 0)
            times = ended_ns - computing_ns, ended_ns, replica.sends_until_ns
            sent_ns = replica.sends_until_ns = replica.handover.until_ns(first.prompt_len, *times)
            self._at(sent_ns, partial(self._hand_over, first))
        else:
            self._tell(answers, replica.role)
        return ()

    def _hand_over(self, first: Answer, now: int) -> None:
        """The keys and values of a prompt have come to where it is to be decoded."""
        arrival, answers = self._halfway.pop(first.request_id)
        request = arrival.request
        if not answers:
            answers = [
                Answer(first.request_id, choice.index, first.prompt_len, first.arrived_ns) for choice in request.choices
            ]
            self._keep(answers)
        self._receive(now)
        first.ledger.mark(Phase.KV_TRANSFER, now)
        for answer in answers:
            answer.ledger = _copy_of(first.ledger)
        self._route(arrival, answers, DECODE, now)

    def _keep(self, answers: list[Answer]) -> None:
        if self._keeps_answers:
            self.answers += answers

    def _tell(self, answers: list[Answer], role: str) -> None:
        """Tell a client the answers to its request."""
        if role == PREFILL:  # it has ended before its answers were begun
            first = answers[0]
            _, known = self._halfway.pop(first.request_id)
            for answer in known:
                answer.refused, answer.is_final = first.refused, first.is_final
                answer.finish_reason, answer.ledger = first.finish_reason, _copy_of(first.ledger)
            answers = known or answers
            if not known:
                self._keep(answers)
        for arrival in self._after(answers) if self._after is not None else ():
            self._at(arrival.at_ns, partial(self._arrive, arrival, iter(())))

    # --- servers that come and go -------------------------------------------------------------------

    def _scale(self, scaling: Scaling, now: int) -> None:
        """Start replicas, or let those that were started last leave; at least one that is ready stays."""
        staying = [replica for replica in self.replicas if replica.left_ns >= NEVER]
        wanted = scaling.scaler.wanted(sum([each.server.queues.of_all.choices for each in staying]) + 1, now)
        for _ in range(wanted - len(staying)):
            self._start(Replica(scaling.make(), started_ns=now, ready_ns=now + scaling.startup_ns))
        ready = sum([replica.ready_ns <= now for replica in staying])
        for replica in reversed(staying[wanted:]):
            if replica.ready_ns > now or ready > 1:
                ready -= replica.ready_ns <= now
                replica.left_ns = now
                self._ready.clear()

    def _fail(self, failure: Failure) -> None:
        """A server is gone; what it has not begun to answer goes to others."""
        now, at = failure.at_ns, failure.replica
        replica = self.replicas[at]
        self._receive(now)
        replica.failures += 1
        replica.seen.prefixes.clear()
        replica.ready_ns = max(replica.ready_ns, failure.back_ns)
        self._ready.clear()
        unbegun = replica.server.fail(now)
        self._lives[at] = replica.server.life()
        self._live(at)
        for present in unbegun:
            if replica.role == PREFILL:
                self._route(present.arrival, present.answers, PREFILL, now)
            else:
                self._begin(present.arrival, present.answers, now)

    def _advance(self, at: int, now: int) -> None:
        until = self._until[at] = self._lives[at].send(now)
        heapq.heappush(self._waits, (until, at))


def _copy_of(ledger: Ledger) -> Ledger:
    same = Ledger(ledger.began_ns)
    same.mark_parts(ledger.phases_ns)
    return same
