"""Which requests follow which, and the prompt of a later turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.bench.errors import BenchError
from headway.bench.request import Message, PlannedRequest, Prompt


class Conversations:
    """The requests of a workload by what they wait for.

    Args:
        requests: any order; a single request is a conversation of one turn.

    Raises:
        BenchError: an index occurs twice, or a later turn follows a request that is not there, is itself, or comes
            round in a circle, or is given as token ids (answers are text and cannot be put between them).
    """

    def __init__(self, requests: Sequence[PlannedRequest]) -> None:
        self.first_turns = [request for request in requests if request.follows is None]
        self._count = len(requests)
        self._followers: dict[int, list[PlannedRequest]] = {}
        by_index = {request.index: request for request in requests}
        if len(by_index) < len(requests):
            raise BenchError(f"{len(requests)} requests have {len(by_index)} different indices; give each its own")
        for request in requests:
            if request.follows is not None:
                self._check_turn(request, by_index)
                self._followers.setdefault(request.follows, []).append(request)
        reachable = sum(1 + len(self.all_after(first.index)) for first in self.first_turns)
        if reachable < len(requests):
            raise BenchError(
                f"{len(requests) - reachable} later turns follow each other in a circle; one must be first"
            )

    @staticmethod
    def _check_turn(request: PlannedRequest, by_index: dict[int, PlannedRequest]) -> None:
        earlier = by_index.get(request.follows) if request.follows is not None else None
        if earlier is None:
            raise BenchError(
                f"request {request.index} follows request {request.follows}, which is not in the workload; add it"
            )
        if request.prompt.token_ids is not None or earlier.prompt.token_ids is not None:
            raise BenchError(
                f"request {request.index} follows request {request.follows}, and one of them is given as token ids: "
                "turns of a conversation need text or messages"
            )
        if request.think_s < 0:
            raise BenchError(f"request {request.index} has a think time of {request.think_s} s; it must be >= 0")

    def after(self, index: int) -> list[PlannedRequest]:
        """The turns that wait for the answer to request `index`."""
        return self._followers.get(index, [])

    def all_after(self, index: int) -> list[PlannedRequest]:
        """The turns that wait for it, directly or through others, parents before children."""
        found = list(self.after(index))
        for request in found:  # it grows as we go
            found += self.after(request.index)
        return found

    def __len__(self) -> int:
        """Requests in all."""
        return self._count


def continued(history: Prompt, answer: str, added: Prompt, as_messages: bool = False) -> Prompt:
    """The prompt of a later turn: all that was said, the answer that came, and what this turn adds.

    Args:
        history: the whole prompt of the turn before.
        answer: what the server said to it.
        added: the later turn's own prompt.
        as_messages: whatever the prompts are.

    Returns:
        Texts one right after the other where both prompts are text; else messages, the answer being the assistant's.
    """
    if history.text is not None and added.text is not None and not as_messages:
        return Prompt(text=history.text + answer + added.text)
    return Prompt(messages=(*messages_of(history), {"role": "assistant", "content": answer}, *messages_of(added)))


def messages_of(prompt: Prompt) -> Iterable[Message]:
    """A prompt that is text or messages, as messages."""
    return prompt.messages if prompt.messages is not None else ({"role": "user", "content": prompt.text or ""},)
