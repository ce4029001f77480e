"""The requests that wait for a grammar to be compiled, or for keys and values from elsewhere, in threads.

Until then the scheduler does not know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from headway.engine.messages import AddRequest, SequenceOutput, SequenceTimings
from headway.policy.step.ledger import Phase

POLL_MS = 2  # how often an engine that has nothing else to do looks whether one waits no longer


class Unready(dict[str, tuple[Sequence[Future[Any]], AddRequest, int]]):
    """Requests by id: what each waits for, the request, and since when it waits, in nanoseconds."""

    def take_ready(self) -> list[tuple[AddRequest, int, BaseException | None]]:
        """Take out those that wait no longer: the request, since when it has waited, and why there is no grammar."""
        ready = [name for name, (awaited, _, _) in self.items() if all(each.done() for each in awaited)]
        return [
            (request, began, next(filter(None, [each.exception() for each in awaited]), None))
            for awaited, request, began in map(self.pop, ready)
        ]

    def abort(self, request_id: str, index: int, now: int) -> SequenceOutput | None:
        """Drop one choice of a request that waits, or all with index -1. A single choice gets a last output."""
        _, request, began = self[request_id]
        left = [choice for choice in request.choices if index not in (-1, choice.index)]
        last = None
        if index != -1 and len(left) < len(request.choices):
            waited = {str(Phase.TRANSPORT): began - request.sent_ns, str(waits_in(request)): now - began}
            timings = SequenceTimings(waited, now, 0, 0)
            last = SequenceOutput(request_id, index, [], finish_reason="abort", timings=timings)
        request.resumed = left
        if not left:
            del self[request_id]
        return last


def waits_in(request: AddRequest) -> Phase:
    """The phase of a request that waits: for another engine, if it does for that, for its grammar, or for blocks."""
    if request.handle is not None:
        return Phase.KV_TRANSFER
    return Phase.QUEUE_BLOCKS if request.params.structured_outputs is None else Phase.GRAMMAR
