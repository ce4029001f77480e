"""Reads a backend's stream of server-sent events: passes on whole events, and knows how the stream ended.

What a stream's last event is depends on the API. A stream that ends without it was cut, whatever HTTP says of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

MAX_EVENT = 2**20  # bytes of one event
ABSENT = msgspec.Raw(b"null")
_NOTHING = (b"null", b'""', b"[]")
_CR = 13  # the byte: a number is looked for at once, other bytes by way of an error inside of Python
_FIELDS = (b"data", b"event", b"id", b"retry")
# Types of the last event in the Responses API and in Anthropic's.
_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "message_stop")


class Usage(msgspec.Struct, gc=False):
    """What a request has used, in the spellings of the APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @property
    def tokens(self) -> int:
        # Anthropic's API counts cached tokens apart; who tells them beside prompt_tokens has them in these, too.
        cached = 0 if self.prompt_tokens else self.cache_read_input_tokens + self.cache_creation_input_tokens
        return self.prompt_tokens + self.completion_tokens + self.input_tokens + self.output_tokens + cached

    def joined(self, before: Usage | None) -> Usage:
        """What both say together: Anthropic's streams tell the prompt first, and the output at their end."""
        if before is None:
            return self
        return Usage(*map(max, msgspec.structs.astuple(self), msgspec.structs.astuple(before)))


class Delta(msgspec.Struct, gc=False):
    content: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT
    tool_calls: msgspec.Raw = ABSENT


class Choice(msgspec.Struct, gc=False):
    """A choice of an answer, or what is new of it."""

    finish_reason: str | None = None
    text: msgspec.Raw = ABSENT
    delta: Delta | None = None

    @property
    def is_said(self) -> bool:
        """Whether it has some text: a role alone is none."""
        delta = self.delta
        if delta is None:
            return bytes(self.text) not in _NOTHING
        said = (delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls)
        return any(bytes(part) not in _NOTHING for part in said)


class Part(msgspec.Struct, gc=False):
    """An answer, or a part of one, as far as the gateway looks at it."""

    id: str | None = None
    type: str | None = None
    error: msgspec.Raw = ABSENT
    choices: list[Choice] | None = None
    usage: Usage | None = None
    timings: msgspec.Raw = ABSENT
    response: Part | None = None
    message: msgspec.Raw = ABSENT


decode_part = msgspec.json.Decoder(Part).decode


class BrokenStream(Exception):
    """What came is no event, or no part of an answer; the message says what."""


class EventReader:
    """Reads the events of one stream.

    Attributes:
        ended: the stream's last event has come.
        error: the backend has told an error.
        pieces: parts of the answer that came, each of which is a token or more.
        usage: what the request used, as far as it was told.
        response_id: the id of a stored response; empty for none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.ended = self.error = False
        self.pieces = 0
        self.finished = 0  # choices that were
        self.usage: Usage | None = None
        self.response_id = ""

    def whole(self, data: bytes) -> Iterator[tuple[bytes, Part | None]]:
        """The events that are complete with these bytes, each as it came, and what it says; None where it has no JSON.

        Raises:
            BrokenStream: after those before it, where one is malformed or too long.
        """
        events, self._rest = _split(self._rest + data if self._rest else data)
        for raw in events:
            yield raw, self._read(raw)
        if len(self._rest) > MAX_EVENT:
            raise BrokenStream(f"an event has more than {MAX_EVENT:,} bytes")

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing. Some servers leave out the last event, but all say why a choice has ended."""
        return not self._rest.strip() and (self.ended or self.finished > 0)

    def _read(self, raw: bytes) -> Part | None:
        if _CR in raw:
            raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2:
            content = raw[6:-2]
        else:
            content = b"\n".join(_data_lines(raw))
        if not content:
            return None
        if content == b"[DONE]":
            self.ended = True
            return None
        try:
            part = decode_part(content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BrokenStream(f"an event is no part of an answer: {error}") from None
        self._note(part)
        return part

    def _note(self, part: Part) -> None:
        inner = part.response or part
        usage = inner.usage
        if part.type == "message_start":
            with contextlib.suppress(msgspec.MsgspecError):
                usage = decode_part(part.message).usage
        if usage is not None:
            self.usage = usage.joined(self.usage)
        if part.response is not None and part.response.id:
            self.response_id = part.response.id
        if part.choices:
            is_said = False
            for choice in part.choices:
                is_said = is_said or choice.is_said
                self.finished += choice.finish_reason is not None
            self.pieces += is_said
        elif part.type is not None:
            self.pieces += part.type.endswith("delta")
            self.ended = self.ended or part.type in _LAST
        if (part.error is not ABSENT and is_error(part)) or part.type in ("error", "response.failed"):
            self.error = self.ended = True


def is_error(part: Part) -> bool:
    """Whether it says that something went wrong."""
    return bytes(part.error) != b"null"


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Complete events, each with the blank line at its end, and what follows the last one."""
    if _CR not in data:
        *found, rest = data.split(b"\n\n")
        return [part + b"\n\n" for part in found if part], rest
    ends = [end for end in (b"\r\n\r\n", b"\r\r", b"\n\n") if end in data]
    if not ends:
        return [], data
    at = max([data.rfind(end) + len(end) for end in ends])
    return [part + ends[0] for part in data[:at].split(ends[0]) if part], data[at:]


def _data_lines(raw: bytes) -> list[bytes]:
    """The values of an event's lines of data. Raises BrokenStream for a line that is no field."""
    found = []
    for line in raw.split(b"\n"):
        name, _, value = line.partition(b":")
        if name and name not in _FIELDS:
            raise BrokenStream(f"the line {line[:60]!r} is no field of an event")
        if name == b"data":
            found.append(value.removeprefix(b" "))
    return found
