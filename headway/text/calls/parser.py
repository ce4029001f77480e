"""Takes an answer apart as it comes: reasoning, content, and calls of tools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.text.calls import harmony
from headway.text.calls.events import Event, Writer
from headway.text.calls.families import Family, Reasoning
from headway.text.calls.scanner import MalformedError, Reading, Scanner


class AnswerParser:
    """Parses one answer. It takes any text, and how the text is cut into pieces does not change what comes of it.

    Args:
        family: how the model writes calls and reasoning.
        tools: the JSON schemas of the tools' parameters by name; None where calls are not expected, and so are content.
        is_reasoning: the prompt has begun the reasoning.
        most_calls: further calls are left out.
    """

    def __init__(
        self,
        family: Family,
        tools: Mapping[str, Any] | None = None,
        *,
        is_reasoning: bool = False,
        most_calls: float = math.inf,
    ) -> None:
        self._scan = Scanner()
        self._out = Writer(self._scan, tools, most_calls)
        self._family = family
        self._syntax = family.syntax if tools is not None else None
        self._reading = (
            harmony.answer(self._scan, self._out, tools is not None)
            if family.is_harmony
            else self._answer(family.reasoning, is_reasoning)
        )
        self._advance()

    @property
    def is_reasoning(self) -> bool:
        """What comes next belongs to the reasoning."""
        return self._out.is_reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self._out.num_calls

    @property
    def outcome(self) -> tuple[int, int, int]:
        """Calls that are complete, calls that broke off, and 1 where there was text in place of a call."""
        broken = self._out.num_broken
        return self._out.num_calls - broken, broken, int(self._out.is_malformed)

    def push(self, text: str, tokens: int = 0) -> None:
        """Take what comes next, and of how many tokens it is."""
        self._out.tokens += tokens
        if text:
            self._scan.push(text)
            self._advance()

    def finish(self) -> None:
        """The answer has ended."""
        self._scan.ended = True
        self._advance()
        self._out.finish()

    def take(self) -> list[Event]:
        """The events since the last time."""
        return self._out.take()

    def _advance(self) -> None:
        next(self._reading, None)

    # --- answers without channels -------------------------------------------------------------------

    def _answer(self, reasoning: Reasoning | None, is_reasoning: bool) -> Reading[None]:
        scan, out = self._scan, self._out
        closing: tuple[str, ...] = ()  # tags that go with one that was left out
        if is_reasoning and reasoning is not None:
            yield from self._reason(reasoning)
        elif reasoning is not None:
            before = yield from scan.space()
            if (yield from scan.literal(*reasoning.begins)):
                yield from self._reason(reasoning)
            else:
                out.content(before)
        if reasoning is not None and reasoning.wraps:
            before = yield from scan.space()
            wrap = yield from scan.literal(*reasoning.wraps)
            out.content("" if wrap else before)
            closing = (reasoning.wraps[wrap],) if wrap else ()
        if self._syntax is not None and self._syntax.bare:
            before = yield from scan.space()
            out.content(before)
            first = yield from scan.peek()
            if first and first in self._syntax.bare:
                yield from self._calls("")
        begins = self._syntax.begins if self._syntax is not None else ()
        again = reasoning.begins if reasoning is not None and reasoning.is_special else ()
        while tag := (yield from scan.until(begins + again + closing, out.content)):
            if tag in again and reasoning is not None:
                yield from self._reason(reasoning)
            elif tag in begins:
                yield from self._calls(tag)
            else:
                out.edge()

    def _reason(self, reasoning: Reasoning) -> Reading[None]:
        calls = self._syntax.begins if self._syntax is not None and reasoning.calls_end_it else ()
        self._out.begin_reasoning()
        found = yield from self._scan.until(reasoning.ends + calls, self._out.reasoning)
        self._out.end_reasoning()
        if found in calls:
            self._scan.back(len(found))

    def _calls(self, tag: str) -> Reading[None]:
        scan, out, syntax = self._scan, self._out, self._syntax
        assert syntax is not None
        scan.mark(len(tag))
        try:
            yield from syntax.calls(tag, scan, out)
        except MalformedError:
            if out.is_open:
                broken = scan.since_mark()
                out.end(complete=False)
                out.malformed(broken)
            elif tag or out.num_calls:
                out.malformed(scan.since_mark())
            else:
                out.content(scan.since_mark())
        scan.unmark()
