"""How models write calls of tools: a few machines, each with a table of what differs between families.

Each reads what follows the tag that begins calls. It raises MalformedError where something else comes; then what was
read since the last call is content (`parser.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

from headway.text.calls.events import Writer
from headway.text.calls.scanner import Emit, MalformedError, Reading, Scanner
from headway.text.calls.values import Lexicon, in_json, kinds, properties, typed

_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name"), ("arguments", "parameters")
_FIRST_OF_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_PYTHON = Lexicon()
_NAME = re.compile(r"[\w.:/-]+")
_OF_NAME = _FIRST_OF_NAME | frozenset("0123456789.-")


class Syntax(Protocol):
    """How calls are written.

    Attributes:
        begins: tags that begin calls anywhere in an answer.
        bare: characters that begin calls without a tag, where an answer begins.
        tags: all tags of the syntax, some of which may be special tokens.
    """

    @property
    def begins(self) -> tuple[str, ...]: ...

    @property
    def bare(self) -> str: ...

    @property
    def tags(self) -> tuple[str, ...]: ...

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        """Read the calls behind a tag, or with an empty one those that begin an answer. Raises MalformedError."""


def _close(scan: Scanner, out: Writer, begins: tuple[str, ...], ends: tuple[str, ...]) -> Reading[None]:
    """Read the tag that ends calls. What stands before it is content that was to be a call."""
    yield from scan.space()
    if not ends or (yield from scan.literal(*ends)):
        return
    scan.unmark()
    found = yield from scan.until(ends + begins, out.malformed)
    if found in begins:
        scan.back(len(found))


def _name(scan: Scanner) -> Reading[str]:
    """A name as in Python, with dots and dashes; empty where none comes."""
    first = yield from scan.peek()
    if not first or first not in _FIRST_OF_NAME:
        return ""
    found = ""
    while True:
        character = yield from scan.peek()
        if not character or character not in _OF_NAME or len(found) == 256:
            return found
        yield from scan.literal(character)
        found += character


def _whole_arguments(scan: Scanner, emit: Emit) -> Reading[None]:
    """Arguments that are a JSON object, a string that has one, or null. Raises MalformedError."""
    first = yield from scan.peek()
    if first == '"':
        emit((yield from scan.json_string()).strip())
    elif first == "n":
        yield from scan.expect("null")
    else:
        yield from scan.json_value(emit, "{")


@dataclass(frozen=True)
class JsonCalls:
    """Objects with a name and arguments, alone, in a list, or one after another."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()  # tags that end the calls; without one, calls end where no other follows
    bare: str = ""
    named: NamedCalls | None = None  # in place of objects there may be names with arguments behind them

    @property
    def tags(self) -> tuple[str, ...]:
        return self.begins + self.ends + (self.named.tags if self.named else ())

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        yield from scan.space()
        first = yield from scan.peek()
        if first == "[":
            yield from scan.literal("[")
            yield from self.rest_of_list(scan, out, not tag)
        elif first == "{":
            yield from self._objects(scan, out, not tag)
        elif self.named is not None and first:
            yield from self.named.calls(tag, scan, out)
        else:
            raise MalformedError
        yield from _close(scan, out, self.begins, self.ends)

    def rest_of_list(self, scan: Scanner, out: Writer, is_bare: bool) -> Reading[None]:
        """Read a list of objects behind its opening bracket. Raises MalformedError."""
        yield from scan.space()
        if (yield from scan.literal("]")):
            raise MalformedError
        while True:
            yield from scan.space()
            yield from self._object(scan, out, is_bare)
            yield from scan.space()
            if not (yield from scan.literal(",")):
                yield from scan.literal("]")
                return

    def _objects(self, scan: Scanner, out: Writer, is_bare: bool) -> Reading[None]:
        while True:
            yield from self._object(scan, out, is_bare)
            yield from scan.space()
            if (yield from scan.literal(";", ",")):
                yield from scan.space()
            if (yield from scan.peek()) != "{":
                return

    def _object(self, scan: Scanner, out: Writer, is_bare: bool) -> Reading[None]:
        yield from scan.expect("{")
        name, early = "", list[str]()  # early: arguments that came before the name
        depth, has_arguments = 1, False
        separator = ","
        while depth:
            if separator == ",":
                yield from scan.space()
                key = yield from scan.json_string()
                yield from scan.space()
                yield from scan.expect(":")
                yield from scan.space()
                first = yield from scan.peek()
                if key == "function" and first == "{":
                    yield from scan.literal("{")
                    depth += 1
                    continue
                if key in _NAME_KEYS and not name and first == '"':
                    name = yield from scan.json_string()
                    if early:
                        self._begin(name, scan, out)
                        out.arguments("".join(early))
                elif key in _ARGUMENT_KEYS and not has_arguments:
                    has_arguments = True
                    if name:
                        self._begin(name, scan, out)
                        yield from _whole_arguments(scan, out.arguments)
                        scan.mark()
                    else:
                        yield from _whole_arguments(scan, early.append)
                        early = early or ["{}"]
                else:
                    yield from scan.json_any(lambda text: None)
            yield from scan.space()
            separator = yield from scan.literal(",", "}")
            if not separator:
                if not out.is_open:
                    raise MalformedError
                break  # the arguments are whole, so the call is
            depth -= separator == "}"
        if not name or (is_bare and not has_arguments):
            raise MalformedError
        if not out.is_open:
            out.begin(name)
        out.end()

    def _begin(self, name: str, scan: Scanner, out: Writer) -> None:
        if not out.is_open:
            out.begin(name)


@dataclass(frozen=True)
class NamedCalls:
    """A name, a tag, and the arguments as JSON."""

    begins: tuple[str, ...]
    call: str = ""  # what begins each call after the tag that begins all; empty where that tag begins each
    arguments: tuple[str, ...] = ()  # tags before the arguments
    # ends, closes: tags that end a call, and all calls.
    ends: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    before_id: str = ""  # the tag between a name and an id
    has_id: bool = False  # the head is an id, as functions.name:0
    bare: str = field(default="", init=False)

    @property
    def tags(self) -> tuple[str, ...]:
        inner = (self.call, *self.arguments, *self.ends, *self.closes, self.before_id)
        return (*self.begins, *(each for each in inner if each))

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        yield from scan.space()
        if self.call and tag != self.call:
            yield from scan.expect(self.call)
        while True:
            yield from self._call(scan, out)
            yield from scan.space()
            if not self.call or not (yield from scan.literal(self.call)):
                break
        if self.closes and tag != self.call:
            yield from _close(scan, out, self.begins, self.closes)

    def _call(self, scan: Scanner, out: Writer) -> Reading[None]:
        head, call_id = (yield from self._head(scan)), ""
        yield from scan.space()
        if (yield from scan.peek()) not in ("{", "`"):  # the head was a type, and a name follows
            head = (yield from scan.before("\n{<`")).strip()
            yield from scan.space()
        fenced = yield from scan.literal("```json", "```")
        yield from scan.space()
        if self.has_id:
            call_id, head = head, re.sub(r"^functions\.|:\d+$", "", head)
        if not head or (yield from scan.peek()) != "{":
            raise MalformedError
        out.begin(head, call_id)
        yield from scan.json_value(out.arguments, "{")
        out.end()
        yield from scan.space()
        if fenced and (yield from scan.literal("```")):
            yield from scan.space()
        yield from scan.literal(*self.ends)

    def _head(self, scan: Scanner) -> Reading[str]:
        """What stands before the arguments' tag, or before arguments without a tag. Raises MalformedError."""
        head = ""
        while True:
            if self.before_id and (yield from scan.literal(self.before_id)):
                yield from scan.before("[{")
            if self.arguments and (yield from scan.literal(*self.arguments)):
                return head.strip()
            character = yield from scan.peek()
            if not character or character == "{" or (character in "\n`" and head.strip()):
                return head.strip()
            if len(head) == 512 or character in "[]":
                raise MalformedError
            yield from scan.literal(character)
            head += character


@dataclass(frozen=True)
class XmlCalls:
    """A tag for each call and each argument. Values are bare text, so their type comes from the tool's schema."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    keys: tuple[str, str]  # what stands around the name of an argument
    values: tuple[str, str]  # what stands around its value
    # What stands around the name; without the second, the name ends where a line or an argument does.
    opens: tuple[str, str] = ("", "")
    closes: str = ""  # the tag that ends a call; empty where `ends` does
    in_lines: bool = False  # there is a line break around each value
    bare: str = field(default="", init=False)

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *(each for each in (*self.keys, *self.values, self.closes) if each))

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        is_open = bool(self.opens[0]) and tag == self.opens[0]
        while True:
            if not is_open:
                yield from scan.space()
                if self.opens[0]:
                    yield from scan.expect(self.opens[0])
            yield from self._call(scan, out)
            yield from scan.space()
            is_open = bool(self.opens[0]) and bool((yield from scan.literal(self.opens[0])))
            if not is_open:
                break
        if self.closes and tag != self.opens[0]:
            yield from _close(scan, out, self.begins, self.ends)
        else:
            yield from scan.literal(*self.ends)

    def _call(self, scan: Scanner, out: Writer) -> Reading[None]:
        name = (yield from scan.before(self.opens[1][:1] or "\n<")).strip()
        if not _NAME.fullmatch(name) or (self.opens[1] and not (yield from scan.literal(self.opens[1]))):
            raise MalformedError
        yield from scan.space()
        end = self.closes or self.ends[0]
        ended = yield from scan.expect(self.keys[0], end)
        out.begin(name)
        schemas = properties(out.tools.get(name))
        separator = "{"
        while ended != end:
            key = ""
            while not (yield from scan.literal(self.keys[1])):
                key += yield from self._of_key(scan, key)
            out.arguments(f'{separator}"{in_json(key)}": ')
            yield from self._value(scan, out, schemas.get(key))
            separator = ", "
            yield from scan.space()
            ended = yield from scan.expect(self.keys[0], end)
        out.arguments("" if separator == "{" else "}")
        out.end()

    def _of_key(self, scan: Scanner, key: str) -> Reading[str]:
        character = yield from scan.peek()
        if not character or character == "<" or len(key) == 256:
            raise MalformedError
        return (yield from scan.literal(character))

    def _value(self, scan: Scanner, out: Writer, schema: object) -> Reading[None]:
        if self.values[0]:
            yield from scan.space()
            yield from scan.expect(self.values[0])
        if self.in_lines:
            yield from scan.literal("\n")
        end = ("\n" if self.in_lines else "") + self.values[1]
        tags = tuple({end, self.values[1]})
        if kinds(schema) == {"string"}:
            out.arguments('"')
            found = yield from scan.until(tags, lambda text: out.arguments(in_json(text)))
            out.arguments('"' if found else "")
        else:
            parts: list[str] = []
            found = yield from scan.until(tags, parts.append)
            out.arguments(typed("".join(parts), schema) if found else "")
        if not found:
            raise MalformedError


@dataclass(frozen=True)
class PythonicCalls:
    """Calls as in Python, in a list or in lines. A list may have objects in JSON in their place."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()  # tags that end the calls
    in_list: bool = True  # brackets are around the calls
    bare: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return self.begins + self.ends

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        yield from scan.space()
        bracket = (yield from scan.literal("[")) if self.in_list else ""
        if self.in_list and not bracket:
            raise MalformedError
        yield from scan.space()
        if (yield from scan.peek()) == "{":
            yield from JsonCalls(self.begins).rest_of_list(scan, out, not tag)
            return (yield from _close(scan, out, self.begins, self.ends))
        while True:
            yield from scan.space()
            yield from self._call(scan, out)
            yield from scan.space()
            comma = yield from scan.literal(",")
            if bracket and not comma:
                yield from scan.literal("]")
                break
            yield from scan.space()
            following = yield from scan.peek()
            if not comma and (following not in _FIRST_OF_NAME or not following):
                break
        yield from _close(scan, out, self.begins, self.ends)

    def _call(self, scan: Scanner, out: Writer) -> Reading[None]:
        name = yield from _name(scan)
        if not name:
            raise MalformedError
        yield from scan.expect("(")
        yield from scan.space()
        if (yield from scan.literal(")")):
            out.begin(name)
            return out.end()
        names = iter(properties(out.tools.get(name)))
        separator = "{"
        while True:
            word = yield from _name(scan)
            yield from scan.space()
            is_keyword = bool(word) and bool((yield from scan.literal("=")))
            key = word if is_keyword else next(names, "")
            value = _PYTHON.word(word) if word and not is_keyword else ""
            if not key:
                raise MalformedError
            if not out.is_open:
                out.begin(name)
            out.arguments(f'{separator}"{in_json(key)}": {value}')
            if not value:
                yield from _PYTHON.value(scan, out.arguments, "")
            separator = ", "
            yield from scan.space()
            if not (yield from scan.literal(",")):
                break
            yield from scan.space()
            if (yield from scan.peek()) == ")":
                break
        yield from scan.expect(")")
        out.arguments("}")
        out.end()


@dataclass(frozen=True)
class BraceCalls:
    """`call:`, a name, and an object with bare keys and strings in quotes of its own."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    quote: str
    bare: str = field(default="", init=False)

    @property
    def tags(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, self.quote)

    def calls(self, tag: str, scan: Scanner, out: Writer) -> Reading[None]:
        yield from scan.space()
        yield from scan.expect("call:")
        name = yield from _name(scan)
        if not name or (yield from scan.peek()) != "{":
            raise MalformedError
        out.begin(name)
        lexicon = Lexicon((self.quote, '"'), escapes=False, bare_keys=True)
        yield from lexicon.value(scan, out.arguments, "")
        out.end()
        yield from _close(scan, out, self.begins, self.ends)
