"""Clients that send a workload to a simulated server, by the rules of the load generator, and record what they see."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from headway.bench.client.conversations import Conversations
from headway.bench.client.dispatch import Firsts, Graph, LoadMode, Loop, Pace, due_after, loops_of
from headway.load.record import Failure, FailureKind, RequestRecord
from headway.load.request import PlannedRequest
from headway.load.workload.build import Workload
from headway.policy.admission.tenants import DEFAULT_TENANT
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.request import FinishReason
from headway.simulator.answers import Answer
from headway.simulator.prompts import ids_of
from headway.simulator.traffic import Arrival, arrival

BEGAN_NS = 1_000_000_000  # begin of a run; in records a time of 0 has not come
CLASS_HEADER = "x-headway-service-class"
_UNSERVED = {
    FinishReason.TIMEOUT: "it waited longer than --max-queue-time",
    FinishReason.LATE: "its first token would have been late",
}


@dataclass(slots=True)
class _Due:
    """A request and its arrival."""

    planned: PlannedRequest
    record: RequestRecord
    arrival: Arrival
    prompt: list[int]  # its ids, where another request goes on from it
    graph: Graph


class Clients:
    """The clients of one run.

    Args:
        classes: the classes of the server.
        max_concurrency: most requests under way in an open loop; users of a closed one.
        duration_s: what is due later is not sent.

    Attributes:
        records: the records of all requests that were due.
        waited_for_place, longest_wait_ns: how many requests were due while max_concurrency were under way, and the
            longest wait of one.
    """

    def __init__(
        self,
        workload: Workload,
        classes: ClassTable,
        mode: LoadMode,
        max_concurrency: int | None,
        duration_s: float | None,
    ) -> None:
        self._classes = classes
        self.records: list[RequestRecord] = []
        self.waited_for_place = 0
        self.longest_wait_ns = 0
        self._conversations = Conversations(workload.requests)
        self._histories: dict[int, list[int]] = {}  # of requests that go on from an answer and wait for others
        graphs = self._conversations.graphs
        self._loops, self._scheduled = loops_of(graphs, Pace(mode, max_concurrency, workload.users))
        self._most = max_concurrency if mode is LoadMode.OPEN else None
        self._deadline_ns = None if duration_s is None else BEGAN_NS + round(duration_s * 1e9)
        self._due: dict[str, _Due] = {}
        self._under_way = 0
        self._waiting: deque[_Due] = deque()

    def arrivals(self) -> Iterator[Arrival]:
        """Requests that are sent whatever the server does."""
        for loop in self._loops:
            for _ in range(min(loop.users, len(self._conversations.graphs))):
                yield from self._next_graph(loop, BEGAN_NS)
        for firsts in self._scheduled:
            yield from self._begin_graph(firsts, BEGAN_NS + round((firsts[0].arrival_s or 0.0) * 1e9))

    def sends(self, coming: Arrival, now: int) -> bool:
        """Whether a request whose time has come is sent, or waits for a place."""
        due = self._due[coming.request.request_id]
        if self._most is not None and due.graph.loop is None and self._under_way >= self._most:
            self.waited_for_place += 1
            self._waiting.append(due)
            return False
        self._under_way += 1
        due.record.sent_ns = due.record.connected_ns = now
        if due.planned.cancel_after_s is not None:
            coming.cancel_ns = now + round(due.planned.cancel_after_s * 1e9)
        return True

    def after(self, answers: list[Answer]) -> list[Arrival]:
        """Requests that are sent because a request has ended."""
        due = self._due.pop(answers[0].request_id)
        self._under_way -= 1
        _fill(due.record, answers, due.arrival.cancel_ns)
        now, graph, ready = due.record.end_ns, due.graph, self._allowed(due)
        graph.left += len(ready) - 1
        coming = self._fill_place(now) if graph.loop is None else []
        for planned in ready:
            prompt = self._histories.pop(planned.index, []) + ids_of(planned.prompt)
            coming += self._at(due_after(planned, now, graph.began_ns), planned, prompt, graph)
        if graph.loop is not None and not graph.left:
            coming += self._next_graph(graph.loop, now)
        return coming

    def _allowed(self, due: _Due) -> list[PlannedRequest]:
        """The requests that an answer allows; where there was none, all that wait for it are given up."""
        record, index = due.record, due.planned.index
        if record.failure is not None:
            if not self._is_too_late(record.end_ns):
                self._give_up(self._conversations.lost(index), record)
            return []
        for planned in self._conversations.after(index):
            if planned.follows == index:
                self._histories[planned.index] = due.prompt + [due.arrival.answer] * (record.output_tokens or 0)
        return self._conversations.answered(index)

    def _is_too_late(self, at_ns: int) -> bool:
        return self._deadline_ns is not None and at_ns >= self._deadline_ns

    def give_up_waiting(self) -> None:
        """The time is up: who has no place yet will have none."""
        while self._waiting:
            record = self._waiting.popleft().record
            record.failure = Failure(FailureKind.ABANDONED, "it still had no place when the run ended")

    def _at(
        self,
        at_ns: int,
        planned: PlannedRequest,
        prompt: list[int],
        graph: Graph,
    ) -> list[Arrival]:
        """Make the arrival of a request at a time, if the run lasts so long."""
        if self._is_too_late(at_ns):
            return []
        record = RequestRecord.of(planned, at_ns)
        self.records.append(record)
        body = planned.extra_body
        coming = arrival(
            planned.index,
            at_ns,
            prompt,
            planned.output_tokens,
            sampling={"n": body.get("n", 1)},
            priority=body.get("priority", 0),
            cache_salt=body.get("cache_salt", ""),
            service_class=self._class_of(planned),
            tenant=planned.tenant or DEFAULT_TENANT,
        )
        is_followed = bool(self._conversations.after(planned.index))
        self._due[coming.request.request_id] = _Due(planned, record, coming, prompt if is_followed else [], graph)
        return [coming]

    def _class_of(self, planned: PlannedRequest) -> str:
        """The service class of a request, which is in its body or in a header."""
        body = planned.extra_body
        tier, named = body.get("service_tier", "auto"), body.get("service_class") or planned.headers.get(CLASS_HEADER)
        return str(named or self._classes.of_tier(tier).name)

    def _next_graph(self, loop: Loop, free_ns: int) -> list[Arrival]:
        firsts = next(loop.unbegun, None)
        return self._begin_graph(firsts, free_ns, loop) if firsts else []

    def _begin_graph(self, firsts: Firsts, at_ns: int, loop: Loop | None = None) -> list[Arrival]:
        graph = Graph(at_ns, loop, len(firsts))
        return [each for first in firsts for each in self._at(at_ns, first, ids_of(first.prompt), graph)]

    def _fill_place(self, free_ns: int) -> list[Arrival]:
        if self._is_too_late(free_ns):
            self.give_up_waiting()
        if not self._waiting:
            return []
        coming = self._waiting.popleft().arrival
        self.longest_wait_ns = max(self.longest_wait_ns, free_ns - coming.at_ns)
        coming.at_ns = free_ns
        return [coming]

    def _give_up(self, lost: list[PlannedRequest], before: RequestRecord) -> None:
        """Give up requests that waited for one without an answer."""
        kind = FailureKind.CANCELLED if before.cancelled else FailureKind.ABANDONED
        for planned in lost:
            record = RequestRecord.of(planned, before.end_ns)
            record.end_ns = before.end_ns
            record.failure = Failure(kind, f"request {before.index}, which it waited for, failed")
            self.records.append(record)


def _fill(record: RequestRecord, answers: list[Answer], cancel_ns: int | None) -> None:
    """Record what a client sees of a request that has ended; nothing that comes after the client has gone."""
    last = max(answers, key=lambda answer: answer.ended_ns)
    first = answers[0]
    tokens = first.token_ns if len(answers) == 1 else array("q", sorted(chain(*(each.token_ns for each in answers))))
    ended_ns = last.ended_ns
    if last.finish_reason is FinishReason.ABORT and cancel_ns is not None:
        tokens, ended_ns = tokens[: bisect_right(tokens, cancel_ns)], cancel_ns
    record.chunk_ns, record.chunk_tokens = tokens, array("i", [1]) * len(tokens)
    record.tokens_per_chunk_known = True
    record.headers_ns = tokens[0] if tokens else ended_ns
    record.end_ns = ended_ns
    record.prompt_tokens, record.output_tokens, record.cached_tokens = (
        first.prompt_len,
        len(tokens),
        first.cached_tokens,
    )
    record.finish_reason = last.finish_reason
    record.failure = _failure(last)
    record.timings = {
        "e2e_ns": last.ledger.total_ns,
        "ttft_ns": first.ttft_ns or 0,
        "phases_ns": {str(phase): length for phase, length in last.ledger.phases_ns.items()},
        "detokenize_ns": 0,
        "tokens": len(last.token_ns),
        "steps": last.steps,
        "preemptions": last.preemptions,
        "passed_over": last.passed_over,
    }


def _failure(answer: Answer) -> Failure | None:
    if answer.finish_reason is FinishReason.ERROR and answer.token_ns:
        return Failure(FailureKind.CUT, "the server that had it failed")
    if answer.finish_reason is FinishReason.ERROR:
        return Failure(FailureKind.SERVER_ERROR, answer.refused or "the server that had it failed", 503)
    if answer.refused and answer.is_final:
        return Failure(FailureKind.CLIENT_ERROR, answer.refused, 400)
    if answer.refused:
        return Failure(FailureKind.REFUSED, answer.refused, 429)
    if answer.finish_reason in _UNSERVED:
        return Failure(FailureKind.REFUSED, _UNSERVED[answer.finish_reason], 503)
    if answer.finish_reason is FinishReason.ABORT:
        return Failure(FailureKind.CANCELLED, "its client gave it up, as planned")
    return None
