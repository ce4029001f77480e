"""The requests that the API process has with the engine, and how they go on when the engine process has died.

Each request is kept with the tokens that it has got. The next engine process goes on after these: a draw is a function
of the logits, the seed and the token's position, so the text is the same and only the time differs.

A request may be the reason why the engine died. Requests that were in two engines that died, with no output between,
are suspects. They are handed over first and one at a time: the next one follows when the last one has had an output. If
the engine dies meanwhile, the one that was waited for goes first. A suspect that is alone in an engine that dies is
ended when that was the third time.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headway.engine.messages import AddRequest, EngineOutputs, SequenceOutput, SequenceTimings
from headway.policy.step.ledger import Ledger, Phase
from headway.policy.step.request import Resumed

SUSPICIOUS_DEATHS = 2
MOST_DEATHS = 3
_NOT_SENT = 2**62
StreamItem = SequenceOutput | Exception


@dataclass(slots=True, eq=False)
class InFlight:
    """A request, and where each of its unfinished choices stands."""

    request: AddRequest
    ledger: Ledger  # what is known of its time, until it was last handed to an engine
    choices: dict[int, Resumed]
    take: Callable[[StreamItem], None]  # gets its outputs, or an exception that ends it; others may share it
    aborted: set[int] = field(default_factory=set)  # choices that the engine was told to drop
    replayed: bool = False
    number: int = _NOT_SENT  # its number among the requests sent to the engine process that runs
    deaths: int = 0  # how many engines died with it in them since its last output

    @property
    def is_sent(self) -> bool:
        return self.number != _NOT_SENT

    def message(self, now: int) -> AddRequest:
        """The message that hands the request over to the engine."""
        if not self.replayed:
            return self.request
        self.ledger.mark(Phase.ENGINE_RESTART, now)
        choices = list(self.choices.values())
        return msgspec.structs.replace(self.request, sent_ns=self.ledger.last_ns, resumed=choices)

    def had(self, output: SequenceOutput) -> None:
        """Note an output of the engine, and hand it on."""
        self.deaths = 0
        choice = self.choices.get(output.index)
        if choice is None:
            return
        choice.token_ids += output.token_ids
        choice.cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            del self.choices[output.index]
            if output.timings is not None and self.replayed:
                output.timings.phases_ns = self._known_phases() | output.timings.phases_ns
        self.take(output)

    def died(self, now: int, alone: bool) -> None:
        """Note that the engine process died. If the request was in it, its time there is not known."""
        self.replayed = True
        if self.is_sent:
            self.ledger.mark(Phase.ENGINE_LOST, now)
            self.number = _NOT_SENT
            self.deaths += 1
        for index in list(self.aborted):
            self.end(index, now, "abort")
        if alone and self.deaths >= MOST_DEATHS:
            for index in list(self.choices):
                self.end(index, now, "error", f"the engine died {self.deaths} times with this request running")

    def end(self, index: int, now: int, reason: str, error: str | None = None) -> None:
        """Finish a choice that no engine has. Does nothing for one that is finished."""
        choice = self.choices.pop(index, None)
        if choice is not None:
            self.ledger.mark(Phase.ENGINE_RESTART, now)
            timings = SequenceTimings(self._known_phases(), self.ledger.last_ns, 0, 0)
            cached, name = choice.cached_tokens, self.request.request_id
            self.take(SequenceOutput(name, index, [], reason, cached_tokens=cached, timings=timings, error=error))

    def _known_phases(self) -> dict[str, int]:
        return {str(phase): ns for phase, ns in self.ledger.phases_ns.items()}


class Requests:
    """All requests in flight, in the order in which they came.

    Args:
        replay: hand them to the next engine process when one dies; else they end.
    """

    def __init__(self, replay: bool) -> None:
        self._replay = replay
        self._known: dict[str, InFlight] = {}
        self._unsent: deque[InFlight] = deque()
        self._sent = 0  # how many were sent to the engine process that runs
        self._unreported: dict[str, InFlight] = {}  # choices that had not reached the engine at its last report
        self._suspect: InFlight | None = None  # the suspect that was handed over last, while it has no output

    @property
    def num_unreported(self) -> int:
        """How many choices the engine has not yet said that it has."""
        return sum(len(entry.choices) for entry in self._unreported.values())

    @property
    def are_in_engine(self) -> bool:
        """Whether the engine has some that it has not finished."""
        return any(entry.is_sent and entry.choices for entry in self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def add(self, request: AddRequest, take: Callable[[StreamItem], None]) -> InFlight:
        """Take a request in. `take` gets its outputs; send_due() sends it when it may be sent.

        Raises:
            ValueError: its id is in use.
        """
        name = request.request_id
        if name in self._known:
            raise ValueError(f"request id {name!r} is in use; give every request its own")
        if request.seed is None:
            request.seed = secrets.randbits(63)
        choices = {choice.index: choice for choice in request.choices}
        entry = InFlight(request, Ledger(request.sent_ns), choices, take)
        self._known[name] = self._unreported[name] = entry
        self._unsent.append(entry)
        return entry

    def remove(self, entry: InFlight) -> bool:
        """Forget a request. True where the engine has it and must be told to drop it."""
        name = entry.request.request_id
        if self._known.get(name) is not entry:
            return False
        del self._known[name]
        self._unreported.pop(name, None)
        if self._suspect is entry:
            self._suspect = None
        return entry.is_sent and bool(entry.choices)

    def abort(self, request_id: str, index: int, now: int) -> bool:
        """Drop a choice, or all with index -1. True where the engine has it and must be told."""
        entry = self._known.get(request_id)
        if entry is None:
            return False
        indexes = list(entry.choices) if index == -1 else [index]
        if entry.is_sent:
            entry.aborted.update(indexes)
            return True
        for one in indexes:
            entry.end(one, now, "abort")
        return False

    def send_due(self, send: Callable[[AddRequest], None], now: int) -> None:
        """Send what may be sent now, in order. When a request can't be sent, its `take` gets the exception."""
        while self._unsent and self._suspect is None:
            entry = self._unsent.popleft()
            if self._known.get(entry.request.request_id) is not entry or not entry.choices:
                continue
            try:
                send(entry.message(now))
            except Exception as error:
                entry.take(error)
                continue
            self._sent += 1
            entry.number = self._sent
            if entry.deaths >= SUSPICIOUS_DEATHS:
                self._suspect = entry

    def deliver(self, message: EngineOutputs) -> None:
        """Hand on the outputs of a step."""
        while self._unreported:  # in the order in which they are sent
            name, first = next(iter(self._unreported.items()))
            if first.number > message.stats.received:
                break
            del self._unreported[name]
        for output in message.outputs:
            entry = self._known.get(output.request_id)
            if entry is not None:
                entry.had(output)
                if entry is self._suspect:
                    self._suspect = None

    def engine_died(self, now: int, error: Exception) -> None:
        """Note that the engine process died, and that no engine has a request. Without replay, all end with `error`."""
        if not self._replay:
            self.end_all(error)
        in_engine = [entry for entry in self._known.values() if entry.is_sent and entry.choices]
        for entry in self._known.values():
            entry.died(now, alone=in_engine == [entry])
        waiting = [entry for entry in self._known.values() if entry.choices]
        waiting.sort(key=lambda entry: -entry.deaths if entry.deaths >= SUSPICIOUS_DEATHS else 0)
        self._unsent = deque(waiting)
        self._unreported = {entry.request.request_id: entry for entry in waiting}
        self._suspect = None
        self._sent = 0

    def end_all(self, error: Exception) -> None:
        """End every request with `error`."""
        for entry in self._known.values():
            entry.take(error)
        self._known.clear()
        self._unsent.clear()
        self._unreported.clear()
        self._suspect = None
        self._sent = 0
