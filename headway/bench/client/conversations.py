"""Which requests follow which, and the prompt of a later turn."""

from __future__ import annotations

from collections.abc import Sequence

from headway.bench.client.request_body import as_messages
from headway.load.request import PlannedRequest, Prompt


class Conversations:
    """The requests of a workload by what they wait for.

    Args:
        requests: any order; a single request is a conversation of one turn.
    """

    def __init__(self, requests: Sequence[PlannedRequest]) -> None:
        self.first_turns = [request for request in requests if request.follows is None]
        self._count = len(requests)
        self._followers: dict[int, list[PlannedRequest]] = {}
        for request in requests:
            if request.follows is not None:
                self._followers.setdefault(request.follows, []).append(request)

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
        """The number of all requests."""
        return self._count


def continued(history: Prompt, answer: str, added: Prompt, chat: bool = False) -> Prompt:
    """The prompt of a later turn: all that was said, the answer that came, and what this turn adds.

    Args:
        history: the whole prompt of the turn before.
        answer: what the server said to it.
        added: the later turn's own prompt.
        chat: messages, whatever the prompts are.

    Returns:
        Texts one right after the other where both prompts are text; else messages, the answer being the assistant's.
    """
    if history.text is not None and added.text is not None and not chat:
        return Prompt(text=history.text + answer + added.text)
    return Prompt(messages=(*as_messages(history), {"role": "assistant", "content": answer}, *as_messages(added)))
