"""A workload: the requests of a run, planned before the first is sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]  # {"role", "content"}, and of chats "tool_calls" and "tool_call_id"


def text_of(message: Message) -> str:
    """The text of a message, whose content may be a list of parts, or absent."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, in exactly one of four forms."""

    text: str | None = None  # a text for all APIs but rankings; in a chat it becomes one user message
    token_ids: tuple[int, ...] | None = None  # ids for /v1/completions and /v1/embeddings only
    # Messages for /v1/chat/completions; on /v1/completions their contents are joined by newlines.
    messages: tuple[Message, ...] | None = None
    # Texts, or token ids, for one request for embeddings; the query and then the documents of a ranking.
    several: tuple[str | tuple[int, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a workload."""

    index: int  # position in the workload, from 0; pairs requests of two runs of the same workload
    # What is asked. Of a later turn, only what this turn adds: the client puts the turns before it, with the answers
    # that came, in front.
    prompt: Prompt
    # Tokens that the prompt was made for, as well as the tokenizer at hand can tell; None when nobody can tell before
    # the server's `usage`.
    prompt_tokens: int | None
    output_tokens: int  # max_tokens; 0 where nothing is generated
    class_name: str = ""  # the class of a mix that it belongs to; "" when there are none
    # When it is due, in seconds after the start; None when the load generator decides (closed loop), and for later
    # turns.
    arrival_s: float | None = None
    # Index of the request that this one waits for and goes on from (the turn before), or None.
    follows: int | None = None
    after: tuple[int, ...] = ()  # indexes of further requests that it waits for, whose answers are not in its prompt
    # graph, graph_size: index of the first request of its graph, which are all that wait for each other, and their
    # number; None and 1 where it is alone.
    graph: int | None = None
    graph_size: int = 1
    # Seconds between the last answer that it waits for and this request: thinking, or the work of a tool.
    think_s: float = 0.0
    not_before_s: float = 0.0  # it is not due earlier than so many seconds after the first request of its graph was
    extra_body: dict[str, Any] = field(default_factory=dict)  # further fields of the request's body
    headers: dict[str, str] = field(default_factory=dict)  # further ones of the request
    # Its client gives it up so many seconds after it was sent, if it has not ended by then.
    cancel_after_s: float | None = None
    tenant: str = ""  # whose it is; "" where nobody says

    @property
    def root(self) -> int:
        """The index of the first request of its graph, which may be itself."""
        return self.index if self.graph is None else self.graph

    @property
    def parents(self) -> tuple[int, ...]:
        """Indexes of the requests that must have been answered before this one is due; empty for a first turn."""
        return self.after if self.follows is None else (self.follows, *self.after)
