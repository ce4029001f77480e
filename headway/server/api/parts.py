"""Answers that consist of parts: text, reasoning and calls of tools, each with a beginning and an end.

/v1/messages and /v1/responses have such answers. They are told of the same parts, and have their own events for them.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from headway.outputs.choices import Piece
from headway.server.api.answers import Shaped
from headway.server.api.choices import ScoredToken, ServedChoice, scored_tokens
from headway.server.api.parsed import ParsedChoice
from headway.server.edge.streaming import EventWriter
from headway.server.errors import ApiError
from headway.server.generation import Generation
from headway.text.calls.events import Arguments, CallBegin, Event, Text

Kind = Literal["text", "reasoning", "call"]
_KINDS: dict[str, Kind] = {"content": "text", "reasoning": "reasoning"}


def named_event(kind: str, content: dict[str, Any]) -> bytes:
    """A server-sent event with a name, which the content repeats as its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **content}))


@dataclass(slots=True, eq=False)
class Part:
    """One part of an answer."""

    index: int  # its number in the answer, from 0
    kind: Kind
    # name, call_id: of a call.
    name: str = ""
    call_id: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique, 32 digits
    texts: list[str] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of a call."""
        return "".join(self.texts)


class PartsAnswer(Shaped):
    """The shape, for a generation of one choice, of an API whose answers consist of parts.

    Attributes:
        parts: those that have begun.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._has_begun = False
        self._unplaced: list[ScoredToken] = []  # tokens whose text has not come, or is part of a tag

    # --- the shapes ---------------------------------------------------------------------------------

    @abstractmethod
    def begun(self) -> list[bytes]:
        """The events before the first part."""

    @abstractmethod
    def part_begun(self, part: Part) -> list[bytes]:
        """The events of a part that begins."""

    @abstractmethod
    def part_grown(self, part: Part, text: str, logprobs: list[ScoredToken]) -> bytes:
        """The event for more text of a part, or of a call's arguments; empty where the client is not to see it."""

    @abstractmethod
    def part_ended(self, part: Part, complete: bool) -> list[bytes]:
        """The events of a part that ends; not `complete` where the answer broke off in it."""

    @abstractmethod
    def ended(self) -> list[bytes]:
        """The events after the last part."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[bytes]:
        """The last events of a stream that fails."""

    @abstractmethod
    def whole_body(self) -> dict[str, Any]:
        """The answer in one piece."""

    # --- running ------------------------------------------------------------------------------------

    @property
    def choice(self) -> ServedChoice:
        return self.generation.choices[0]

    @property
    def reasoning_tokens(self) -> int:
        return self.choice.reasoning_tokens if isinstance(self.choice, ParsedChoice) else 0

    def _render(self) -> bytes:
        choice = self.choice
        events = choice.events if isinstance(choice, ParsedChoice) else ()
        self._take(Piece(choice.text, [], finish_reason=choice.finish_reason, events=events), choice.logprobs)
        return msgspec.json.encode(self.whole_body())

    async def events(self, writer: EventWriter) -> None:
        try:
            await self.generation.run(partial(self._grow, writer))
        except ApiError as error:
            if not writer.has_begun:
                raise
            writer.push(b"".join(self.failed(error)))

    def _grow(self, writer: EventWriter, choice: ServedChoice, piece: Piece) -> None:
        is_first, is_last = not self._has_begun, piece.finish_reason is not None
        events = self.begun() if is_first else []
        self._has_begun = True
        events += self._take(piece, [] if piece.logprobs is None else scored_tokens(piece))
        if is_last:
            events += self.ended()
        if is_first or is_last:
            writer.when_sent(partial(self.generation.sent, choice, is_first, is_last))
        if events:
            writer.push(b"".join(events))

    def _take(self, piece: Piece, logprobs: list[ScoredToken]) -> list[bytes]:
        """Let the parts grow by a piece. Returns the events for it."""
        events: list[bytes] = []
        choice = self.choice
        self._unplaced += logprobs
        # A token that is a part of a character has no text, but its log-probability.
        plain: Sequence[Event] = [Text("content", piece.text, tokens=len(logprobs))] if piece.text or logprobs else []
        for each in piece.events if isinstance(choice, ParsedChoice) else plain:
            own, self._unplaced = self._unplaced[: each.tokens], self._unplaced[each.tokens :]
            if isinstance(each, Text):
                kind = _KINDS[each.kind]
                if self._open is None or self._open.kind != kind:
                    events += self._begin(Part(len(self.parts), kind))
                events += self._extend(each.text, own if kind == "text" else [])
            elif isinstance(each, CallBegin):
                made = choice.make_id() if isinstance(choice, ParsedChoice) else ""
                events += self._begin(Part(len(self.parts), "call", each.name, each.id or made))
            elif isinstance(each, Arguments):
                events += self._extend(each.text, [])
            else:
                events += self._end(each.complete)
        if piece.finish_reason is not None:
            if self._open is not None and self._open.kind == "text":
                events += self._extend("", self._unplaced)
            events += self._end(piece.finish_reason != "length")
        return events

    def _begin(self, part: Part) -> list[bytes]:
        events = self._end(complete=True)
        self.parts.append(part)
        self._open = part
        return events + self.part_begun(part)

    def _extend(self, text: str, logprobs: list[ScoredToken]) -> list[bytes]:
        part = self._open
        if part is None or not (text or logprobs):
            return []
        part.texts.append(text)
        part.logprobs += logprobs
        event = self.part_grown(part, text, logprobs)
        return [event] if event else []

    def _end(self, complete: bool) -> list[bytes]:
        part, self._open = self._open, None
        return [] if part is None else self.part_ended(part, complete)
