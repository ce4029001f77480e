"""Server-sent events out of bytes that come in any pieces.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
Event = tuple[bytes, bytes]  # name ("" unless given), data

_IGNORED = frozenset({b"id", b"retry"})


class MalformedEvents(ValueError):
    """These bytes are not server-sent events."""


class EventParser:
    """Turns fragments into events, each as soon as its last byte is there.

    Stricter than the format in one point, as a page of HTML would otherwise be a stream without events: a line whose
    field is unknown is an error. Looser in others: `error: ...` is an event of that name, and not only the first event
    may begin with a byte order mark.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the start of an event whose end has not come, with \n as the only line end
        self._after_cr = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completes.

        Raises:
            MalformedEvents: a line is no field of an event, or an event is larger than MAX_EVENT_BYTES.
        """
        if self._after_cr or b"\r" in data:
            data = self._with_line_feeds(data)
        if self._rest:
            new = len(self._rest) - 1
            self._rest += data
            # Only what is new is looked through, or a long event in small pieces would take time by its square.
            data = bytes(self._rest) if self._rest.find(b"\n\n", new) >= 0 else b""
        if data:
            *blocks, rest = data.split(b"\n\n")
            self._rest = bytearray(rest)
        else:
            blocks = []
        if len(self._rest) > MAX_EVENT_BYTES:
            raise MalformedEvents(f"an event has more than {MAX_EVENT_BYTES} bytes")
        events: list[Event] = []
        for block in blocks:
            if len(block) > 6 and block.startswith(b"data: ") and b"\n" not in block:
                events.append((b"", block[6:]))
            else:
                _add_event(block, events)
        return events

    def finish(self) -> list[Event]:
        """The last event, where the stream has ended properly but without the empty line after it.

        Raises:
            MalformedEvents: a line is no field of an event.
        """
        events: list[Event] = []
        rest, self._rest = bytes(self._rest), bytearray()
        _add_event(rest, events)
        return events

    def _with_line_feeds(self, data: bytes) -> bytes:
        """A carriage return ends its line at once; a line feed that follows in the next fragment is part of it."""
        if not data:
            return data
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _add_event(block: bytes, events: list[Event]) -> None:
    """The event of lines without an empty one among them; none when it has no data."""
    name = b""
    data: list[bytes] = []
    for line in block.removeprefix(BYTE_ORDER_MARK).split(b"\n"):
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif field == b"error":
            name = b"error"
            data.append(value)
        elif field and field not in _IGNORED:
            raise MalformedEvents(f"not server-sent events: {line[:80].decode(errors='replace')!r}")
    if any(data):
        events.append((name, b"\n".join(data)))
