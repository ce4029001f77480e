"""Which requests wait for which, and the prompt of one that goes on from another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headway.bench.client.request_body import as_messages
from headway.load.request import Message, PlannedRequest, Prompt


class Conversations:
    """The requests of a workload by what they wait for: conversations, and graphs with several branches.

    Args:
        requests: any order; a single request is a graph of its own.

    Attributes:
        graphs: the requests of each graph that wait for nothing, in the order of their coming.
    """

    def __init__(self, requests: Sequence[PlannedRequest]) -> None:
        self._count = len(requests)
        self._children: dict[int, list[PlannedRequest]] = {}
        self._missing = {request.index: len(request.parents) for request in requests if request.parents}
        firsts: dict[int, list[PlannedRequest]] = {}
        for request in requests:
            for parent in request.parents:
                self._children.setdefault(parent, []).append(request)
            if not request.parents:
                firsts.setdefault(request.root, []).append(request)
        self.graphs = list(map(tuple, firsts.values()))

    def after(self, index: int) -> list[PlannedRequest]:
        """The requests that wait for the answer to request `index`, perhaps beside others."""
        return self._children.get(index, [])

    def answered(self, index: int) -> list[PlannedRequest]:
        """Note an answer. Returns the requests that waited for it and now wait for nothing."""
        ready = []
        for child in self.after(index):
            if child.index in self._missing:
                self._missing[child.index] -= 1
                if not self._missing[child.index]:
                    del self._missing[child.index]
                    ready.append(child)
        return ready

    def lost(self, index: int) -> list[PlannedRequest]:
        """Note that there is no answer. Returns the requests that can never be sent now, parents before children."""
        found = []
        rest = list(self.after(index))
        for child in rest:  # it grows as we go
            if self._missing.pop(child.index, 0):
                found.append(child)
                rest += self.after(child.index)
        return found

    def __len__(self) -> int:
        """The number of all requests."""
        return self._count


def continued(
    history: Prompt, answer: str, added: Prompt, chat: bool = False, calls: Sequence[dict[str, Any]] = ()
) -> Prompt:
    """The prompt of a later turn: all that was said, the answer that came, and what this turn adds.

    Args:
        history: the whole prompt of the turn before.
        answer: what the server said to it.
        added: the later turn's own prompt.
        chat: messages, whatever the prompts are.
        calls: the calls of tools in the answer. Results among what is added belong to them, one after the other.

    Returns:
        Texts one right after the other where both prompts are text; else messages, the answer being the assistant's.
    """
    if history.text is not None and added.text is not None and not chat:
        return Prompt(text=history.text + answer + added.text)
    return Prompt(messages=(*as_messages(history), *_with_results(answer, as_messages(added), list(calls))))


def _with_results(answer: str, added: Iterable[Message], calls: list[dict[str, Any]]) -> list[Message]:
    """An answer and what is added to it. A call without a result, or a result without a call, would be refused.

    The first results get the ids of the calls that came; what is left of the results is the user's.
    """
    messages = list(added)
    results = [place for place, each in enumerate(messages) if each["role"] == "tool"]
    for place, call in zip(results, calls, strict=False):
        messages[place] = {**messages[place], "tool_call_id": call["id"]}
    for place in results[len(calls) :]:
        messages[place] = {"role": "user", "content": messages[place].get("content", "")}
    said: Message = {"role": "assistant", "content": answer}
    if made := calls[: len(results)]:
        said["tool_calls"] = made
    return [said, *messages]
