"""Values of arguments that a syntax does not write as JSON, turned into JSON as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.text.calls.scanner import Emit, MalformedError, Reading, Scanner

_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    type(None): ("null",),
    dict: ("object",),
    list: ("array",),
}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_HEX = {"x": 2, "u": 4, "U": 8}
_DEEPEST = 512


def in_json(text: str) -> str:
    """A text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def properties(schema: Any) -> dict[str, Any]:
    """The schemas of an object's properties; none where the schema does not say."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def kinds(schema: Any) -> frozenset[str]:
    """The JSON types that a schema may allow by what it says itself; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,))
    if isinstance(stated, list):
        return frozenset(each for each in stated if isinstance(each, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if values:
        return frozenset(kind for value in values for kind in _KINDS.get(type(value), ()))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            each = [kinds(one) for one in schema[name]]
            return frozenset().union(*each) if each and all(each) else frozenset()
    return frozenset()


def typed(text: str, schema: Any) -> str:
    """A value that was written as bare text, as JSON: what the schema says it is, else what it can be read as."""
    allowed, bare, as_text = kinds(schema), text.strip(), f'"{in_json(text)}"'
    bare = _WORDS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return as_text if not allowed or "string" in allowed else _as_python(bare) or as_text
    if "string" in allowed and not allowed.intersection(_KINDS[type(value)]) - {"string"}:
        return as_text
    return bare


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _as_python(text: str) -> str:
    """A value that is written as in Python, as JSON; empty where it is none."""
    scan, parts = Scanner(), list[str]()
    scan.push(text)
    scan.ended = True
    try:
        for _ in Lexicon().value(scan, parts.append, ""):
            pass
    except MalformedError:
        return ""
    return "".join(parts) if scan.is_empty else ""


def _number(word: str) -> str:
    """A number as Python may write it, as JSON. Raises MalformedError."""
    if _NUMBER.fullmatch(word):
        return word
    if len(word) > 64 or not word.isascii():
        raise MalformedError
    for read in (lambda: str(int(word, 0)), lambda: json.dumps(float(word), allow_nan=False)):
        try:
            return read()
        except ValueError:
            continue
    raise MalformedError


@dataclass(frozen=True, slots=True)
class Lexicon:
    """How a syntax writes the values of arguments."""

    quotes: tuple[str, ...] = ('"""', "'''", '"', "'")  # what is around a string
    # A backslash in a string begins an escape of Python's; else all its characters stand for themselves.
    escapes: bool = True
    bare_keys: bool = False  # keys of objects are written without quotes

    def value(self, scan: Scanner, emit: Emit, ends: str) -> Reading[None]:
        """Read one value, and give it to `emit` as JSON.

        Args:
            ends: characters that may follow it.

        Raises:
            MalformedError: it is no literal.
        """
        closers: list[str] = []
        is_key = may_close = False
        separator = ""
        while True:
            yield from scan.space()
            if may_close and (yield from scan.literal(closers[-1])):
                emit("}" if closers.pop() == "}" else "]")
            else:
                emit(separator)
                opened = "" if is_key else (yield from scan.literal(*_CLOSERS))
                if opened:
                    if len(closers) == _DEEPEST:
                        raise MalformedError
                    closers.append(_CLOSERS[opened])
                    emit("{" if opened == "{" else "[")
                    is_key, may_close, separator = opened == "{", True, ""
                    continue
                yield from self._scalar(scan, emit, is_key, ends)
                if is_key:
                    yield from scan.space()
                    yield from scan.expect(":")
                    emit(": ")
                    is_key = may_close = False
                    separator = ""
                    continue
            while closers:
                yield from scan.space()
                if (yield from scan.literal(",")):
                    is_key, may_close, separator = closers[-1] == "}", True, ", "
                    break
                yield from scan.expect(closers[-1])
                emit("}" if closers.pop() == "}" else "]")
            else:
                return

    def _scalar(self, scan: Scanner, emit: Emit, is_key: bool, ends: str) -> Reading[None]:
        """A string, number or word; a key becomes a string."""
        quote = yield from scan.literal(*self.quotes)
        if quote:
            emit('"')
            yield from self._string(scan, emit, quote)
            emit('"')
            return
        word = yield from scan.before(" \t\r\n,:]})" + ends)
        if is_key and self.bare_keys:
            emit(f'"{in_json(word)}"')
            return
        if not word:
            raise MalformedError
        value = self.word(word)
        emit(f'"{value}"' if is_key else value)

    def word(self, word: str) -> str:
        """A number, or the name of a value. Raises MalformedError."""
        if word in _WORDS or word in _WORDS.values():
            return _WORDS.get(word, word)
        return _number(word)

    def _string(self, scan: Scanner, emit: Emit, quote: str) -> Reading[None]:
        """The rest of a string, with its end."""

        def escaped(text: str) -> None:
            emit(in_json(text))

        tags = (quote, "\\") if self.escapes else (quote,)
        while True:
            found = yield from scan.until(tags, escaped)
            if not found:
                raise MalformedError
            if found == quote:
                return
            yield from self._escape(scan, emit)

    def _escape(self, scan: Scanner, emit: Emit) -> Reading[None]:
        letter = yield from scan.peek()
        if not letter:
            raise MalformedError
        yield from scan.literal(letter)
        if letter in _HEX:
            digits = ""
            while len(digits) < _HEX[letter]:
                digit = yield from scan.literal(*"0123456789abcdefABCDEF")
                if not digit:
                    raise MalformedError
                digits += digit
            if int(digits, 16) > 0x10FFFF:
                raise MalformedError
            emit(json.dumps(chr(int(digits, 16)))[1:-1])
        elif letter in _ESCAPES:
            emit(in_json(_ESCAPES[letter]))
        elif letter in "\\'\"":
            emit(in_json(letter))
        else:
            emit(in_json("\\" + letter))
