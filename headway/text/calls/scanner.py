"""Reads a text that is still being written. What needs more of it than there is waits, as a generator.

So a reader is written as if the text were complete, and how the text was cut into pieces changes nothing: a function
that reads yields until the characters that decide have come, or the text has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
# A reader: it yields where it needs more text, and returns what it read.
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

_STRUCTURE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_CLOSES = {"{": "}", "[": "]"}
_SPACE, _NO_SPACE = " \t\r\n", re.compile(r"[^ \t\r\n]")


class MalformedError(Exception):
    """What comes is not what the syntax has here. The text before it was read, and no character more."""


@lru_cache(maxsize=256)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _firsts(tags: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """The characters with which tags begin, and the length of the longest."""
    return frozenset(tag[0] for tag in tags), max(map(len, tags), default=0)


class Scanner:
    """The text that has come and was not read yet.

    Attributes:
        ended: no more comes.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._parts: list[str] | None = None  # what was read since mark(), without the text from _marked on
        self._marked = 0
        self.ended = False

    @property
    def is_empty(self) -> bool:
        """Whether all that has come was read."""
        return self._at == len(self._text)

    def push(self, text: str) -> None:
        """Add what comes next."""
        if self._parts is not None:
            self._parts.append(self._text[self._marked : self._at])
        self._text = self._text[self._at :] + text
        self._at = self._marked = 0

    def mark(self, back: int = 0) -> None:
        """Keep what is read from here on, and the last `back` characters."""
        self._parts, self._marked = [], self._at - back

    def unmark(self) -> None:
        self._parts = None

    def since_mark(self) -> str:
        """What was read since mark(); empty without one."""
        if self._parts is None:
            return ""
        return "".join(self._parts) + self._text[self._marked : self._at]

    def back(self, count: int) -> None:
        """Unread the last characters, which were read without waiting in between."""
        self._at -= count

    # --- readers ------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character, which is not read; empty at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def space(self) -> Reading[str]:
        """The white space that comes."""
        parts = []
        while True:
            found = _NO_SPACE.search(self._text, self._at)
            end = len(self._text) if found is None else found.start()
            parts.append(self._text[self._at : end])
            self._at = end
            if found is not None or self.ended:
                return "".join(parts)
            yield

    def literal(self, *options: str) -> Reading[str]:
        """The longest of some strings that comes next; empty where none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, options), default=0)]
            found = max((each for each in options if rest.startswith(each)), key=len, default="")
            if self.ended or not any(len(each) > len(rest) and each.startswith(rest) for each in options):
                self._at += len(found)
                return found
            yield

    def expect(self, *options: str) -> Reading[str]:
        """One of some strings. Raises MalformedError where none comes."""
        found = yield from self.literal(*options)
        if not found:
            raise MalformedError
        return found

    def until(self, tags: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Read up to the first of some tags, and the tag too; empty where the text ends before one.

        Args:
            emit: gets the text before the tag, each part as soon as no tag can begin in it.
        """
        while True:
            found = _pattern(tags).search(self._text, self._at) if tags else None
            start = len(self._text) if found is None else found.start()
            if not self.ended:
                start = min(start, self._possible(tags))
            if start > self._at:
                emit(self._text[self._at : start])
                self._at = start
            if found is not None and found.start() == start:
                self._at = found.end()
                return found.group()
            if self.ended:
                return ""
            yield

    def _possible(self, tags: tuple[str, ...]) -> int:
        """Where the text that has come ends with the beginning of a tag; its length where it does not."""
        text, size = self._text, len(self._text)
        firsts, longest = _firsts(tags)
        for at in range(max(self._at, size - longest + 1), size):
            if text[at] in firsts:
                rest = text[at:]
                if any(len(tag) > len(rest) and tag.startswith(rest) for tag in tags):
                    return at
        return size

    def before(self, stops: Collection[str], most: int = 1024) -> Reading[str]:
        """The characters before the first of some characters, or before the end. Raises MalformedError above `most`."""
        found = ""
        while True:
            character = yield from self.peek()
            if not character or character in stops:
                return found
            if len(found) == most:
                raise MalformedError
            found += character
            self._at += 1

    # --- JSON ---------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str]:
        """The value of a JSON string. Raises MalformedError."""
        parts: list[str] = []
        yield from self.json_value(parts.append, '"')
        try:
            value: str = json.loads("".join(parts), strict=False)
        except ValueError:
            raise MalformedError from None
        return value

    def json_value(self, emit: Emit, opening: str = '{["') -> Reading[None]:
        """Read a JSON value that begins with one of some characters, and give its text to `emit` as it comes.

        Only strings and brackets are understood: whatever else is between them is passed on.

        Raises:
            MalformedError: it begins in another way, its brackets do not match, or the text ends within it.
        """
        first = yield from self.peek()
        if not first or first not in opening:
            raise MalformedError
        closers: list[str] = []
        is_string = False
        begin = self._at
        while True:
            found = (_IN_STRING if is_string else _STRUCTURE).search(self._text, self._at)
            mark = "" if found is None else found.group()
            at = len(self._text) if found is None else found.start()
            if found is None or (mark == "\\" and at + 1 == len(self._text)):
                whole = self.ended or found is None
                self._at = len(self._text) if whole else at
                if self._at > begin:
                    emit(self._text[begin : self._at])
                if self.ended:
                    raise MalformedError
                yield
                begin = self._at
                continue
            if mark in "}]" and (not closers or closers[-1] != mark):
                self._at = at
                if at > begin:
                    emit(self._text[begin:at])
                raise MalformedError
            self._at = at + (2 if mark == "\\" else 1)
            if mark == '"':
                is_string = not is_string
            elif mark in _CLOSES:
                closers.append(_CLOSES[mark])
            elif mark != "\\":
                closers.pop()
            if not closers and not is_string:
                emit(self._text[begin : self._at])
                return

    def json_any(self, emit: Emit) -> Reading[None]:
        """Read a JSON value of any kind, as json_value() does."""
        first = yield from self.peek()
        if first and first in '{["':
            yield from self.json_value(emit)
        else:
            word = yield from self.before(" \t\r\n,]}")
            try:
                json.loads(word)
            except ValueError:
                raise MalformedError from None
            emit(word)
