"""What a parsed answer consists of, and the place where it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.text.calls.scanner import Scanner


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """An event.

    Args:
        tokens: of the answer, that came since the event before it, up to where this one became certain.
    """

    tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Text(_Counted):
    """Text of the answer, or of the reasoning before it."""

    kind: Literal["content", "reasoning"]
    text: str
    malformed: bool = False  # it stood where a call was expected, and was none


@dataclass(frozen=True, slots=True)
class CallBegin(_Counted):
    """A call of a tool begins."""

    index: int  # its number in the answer, from 0
    name: str
    id: str = ""  # the id that the model wrote, in syntaxes that have one; else empty


@dataclass(frozen=True, slots=True)
class Arguments(_Counted):
    """Characters of the arguments of the call that began last. Together they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd(_Counted):
    """The call ended; not `complete` where the answer or the syntax broke off in it."""

    index: int
    complete: bool


Event = Text | CallBegin | Arguments | CallEnd


def _joined(last: Event | None, event: Event) -> Event | None:
    """Two events as one; None where they are no pieces of the same text."""
    if isinstance(event, Text) and isinstance(last, Text) and replace(last, text=event.text) == event:
        return replace(event, text=last.text + event.text)
    if isinstance(event, Arguments) and isinstance(last, Arguments) and last.index == event.index:
        return Arguments(event.index, last.text + event.text)
    return None


class Writer:
    """Collects the events of an answer.

    White space around calls and around reasoning belongs to the syntax, and is left out.

    Args:
        tools: the JSON schemas of the tools' parameters by name; None where no call is expected.
        most_calls: further calls are left out.

    Attributes:
        is_reasoning: what comes belongs to the reasoning.
        is_open: a call has begun and has not ended.
        tokens: that have come and belong to no event yet.
        num_calls, num_broken: calls that have ended, and those of them that broke off.
        is_malformed: there was text where a call was expected.
    """

    def __init__(self, scanner: Scanner, tools: Mapping[str, Any] | None, most_calls: float) -> None:
        self._scanner = scanner
        self.tools = tools or {}
        self._most = most_calls
        self._events: list[Event] = []
        self._held = ""  # white space that may be at an edge
        self._at_edge = False  # white space that comes now follows reasoning or a call
        self._has_content = self._has_reasoning = False
        self._joins = False  # reasoning that comes is a further one
        self._has_arguments = False
        self.tokens = 0
        self.num_calls = self.num_broken = 0
        self.is_malformed = False
        self.is_reasoning = False
        self.is_open = False

    def take(self) -> list[Event]:
        """The events since the last time."""
        taken, self._events = self._events, []
        return taken

    # --- text ---------------------------------------------------------------------------------------

    def content(self, text: str, malformed: bool = False) -> None:
        self._put("content", text, malformed)

    def malformed(self, text: str) -> None:
        """Content that was to be a call."""
        self._put("content", text, True)

    def reasoning(self, text: str) -> None:
        self._put("reasoning", text, False)

    def _put(self, kind: Literal["content", "reasoning"], text: str, malformed: bool) -> None:
        whole = self._held + text
        kept = whole.rstrip()
        self._held = whole[len(kept) :]
        if not kept:
            return
        if self._at_edge and not (kind == "content" and self._has_content):
            kept = kept.lstrip()
        if kind == "reasoning" and self._joins:
            kept, self._joins = "\n" + kept, False
        self._at_edge = False
        self.is_malformed |= malformed
        self._has_content |= kind == "content"
        self._has_reasoning |= kind == "reasoning"
        self._add(Text(kind, kept, malformed))

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        tokens, self.tokens = self.tokens, 0
        joined = _joined(last, event)
        if joined is not None and last is not None:
            self._events[-1] = replace(joined, tokens=last.tokens + tokens)
        else:
            self._events.append(replace(event, tokens=tokens) if tokens else event)

    def edge(self) -> None:
        """White space before this place and behind it is left out."""
        self._held, self._at_edge = "", True

    def begin_reasoning(self) -> None:
        self.edge()
        self._joins = self._has_reasoning
        self.is_reasoning = True

    def end_reasoning(self) -> None:
        self.edge()
        self.is_reasoning = False

    def finish(self) -> None:
        """The answer ends: white space at its end is part of it, unless it followed reasoning or a call."""
        if not (self._at_edge or self.is_reasoning) and self._held:
            self._add(Text("content", self._held))
        self._held = ""

    # --- calls --------------------------------------------------------------------------------------

    def begin(self, name: str, call_id: str = "") -> None:
        """A call begins: what was read of it is no content any more."""
        self._scanner.unmark()
        self._held, self._at_edge = "", True
        self.is_open, self._has_arguments = True, False
        if self.num_calls < self._most:
            self._add(CallBegin(self.num_calls, name, call_id))

    def arguments(self, text: str) -> None:
        self._has_arguments |= bool(text)
        if self.num_calls < self._most and text:
            self._add(Arguments(self.num_calls, text))

    def end(self, complete: bool = True) -> None:
        """The call ends. One without arguments has an empty object."""
        if complete and not self._has_arguments:
            self.arguments("{}")
        if self.num_calls < self._most:
            self._add(CallEnd(self.num_calls, complete))
        self.num_calls += 1
        self.num_broken += not complete
        self.is_open = False
        self._scanner.mark()
