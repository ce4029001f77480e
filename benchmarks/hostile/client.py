"""A client that does what no honest one does: half requests, endless ones, thousands at once, answers never read."""

from __future__ import annotations

import re
import selectors
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

_KEPT_BYTES = 4 << 20  # most that is kept of what came back on one connection; the rest is only counted
_READ_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass
class Talk:
    """One connection: what is sent, and when it is left.

    Args:
        pieces: sent one after another, as far as the server takes them.
        every_s: between two pieces.
        reads: False for a client that never reads.
        half_closes: after the last piece, its side of the connection.
        leaves_after: bytes of an answer after which the connection is reset.
        answers: how many are waited for.
    """

    pieces: Iterable[bytes]
    every_s: float = 0.0
    reads: bool = True
    half_closes: bool = False
    leaves_after: int | None = None
    answers: int = 1


@dataclass
class Answer:
    """What came back on one connection.

    Attributes:
        statuses: how many answers had which; empty where none came.
        error_bytes: of the body of the first answer that is an error.
        seconds: from the first byte that was sent to the first byte that came; None for no answer.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    received: bytearray = field(default_factory=bytearray)
    total: int = 0
    seconds: float | None = None
    closed: bool = False
    _at: int = 0  # where the next answer begins
    _whole: int = 0

    @property
    def head(self) -> bytes:
        return bytes(self.received).partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        return bytes(self.received).partition(b"\r\n\r\n")[2]

    @property
    def error_bytes(self) -> int:
        failed = next((match for match in _STATUS.finditer(self.received) if int(match[1]) >= 400), None)
        if failed is None:
            return 0
        end = self.received.find(b"\r\n\r\n", failed.start())
        stated = _LENGTH.search(self.received, failed.start(), end + 2)
        return int(stated[1]) if stated else self.total - end - 4

    def add(self, data: bytes, since: float) -> None:
        if self.seconds is None:
            self.seconds = time.monotonic() - since
        self.total += len(data)
        if len(self.received) < _KEPT_BYTES:
            self.received += data

    def count(self) -> int:
        """How many whole answers are here, as far as lengths tell; what is sent in chunks ends with the connection."""
        while (end := self.received.find(b"\r\n\r\n", self._at)) >= 0:
            stated = _LENGTH.search(self.received, self._at, end + 2)
            if stated is None and not self.received.startswith(b"HTTP/1.1 100", self._at):
                break
            after = end + 4 + (int(stated[1]) if stated else 0)
            if after > self.total:
                break
            self._at, self._whole = after, self._whole + (stated is not None)
        return self._whole

    def finish(self) -> None:
        """Note the statuses; one that comes before the answer (100, 102) is none."""
        self.statuses = Counter(int(found[1]) for found in _STATUS.finditer(self.received) if found[1][:1] != b"1")


class _Line:
    """A talk that is going on."""

    def __init__(self, talk: Talk, address: tuple[str, int]) -> None:
        self.talk, self.answer = talk, Answer()
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self._pieces: Iterator[bytes] = iter(talk.pieces)
        self._left = memoryview(b"")
        self.next_at = self.began = time.monotonic()
        self.sending = True
        self.socket.connect_ex(address)

    def send(self) -> bool:
        """Send what the socket takes; False where it is not the time for the next piece yet."""
        while self.sending:
            if not self._left:
                if time.monotonic() < self.next_at:
                    return False
                piece = next(self._pieces, None)
                if piece is None:
                    self.sending = False
                    if self.talk.half_closes:
                        self.socket.shutdown(socket.SHUT_WR)
                    return True
                self._left, self.next_at = memoryview(piece), time.monotonic() + self.talk.every_s
            try:
                self._left = self._left[self.socket.send(self._left[: 1 << 20]) :]
            except BlockingIOError:
                return True
        return True

    def read(self) -> bool:
        """Read what has come; False when the talk is over."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            self.answer.closed = True
            return False
        self.answer.add(data, self.began)
        leaves = self.talk.leaves_after
        if leaves is not None and self.answer.total >= leaves:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        return leaves is not None or self.answer.count() < self.talk.answers


def converse(port: int, talks: list[Talk], seconds: float, at_once: int = 4096) -> list[Answer]:
    """Have all talks with 127.0.0.1, together, for so many seconds at most; what came back on each.

    Args:
        at_once: connections that are open together; the others follow as these end.
    """
    selector, until = selectors.DefaultSelector(), time.monotonic() + seconds
    waiting, lines = deque(talks), list[_Line]()
    paused, silent = set[_Line](), list[_Line]()  # until their next piece; until the end, as they never read
    both = selectors.EVENT_READ | selectors.EVENT_WRITE

    def drop(line: _Line) -> None:
        paused.discard(line)
        selector.unregister(line.socket)
        line.socket.close()

    while (waiting or silent or selector.get_map()) and time.monotonic() < until:
        while waiting and len(selector.get_map()) < at_once:
            lines.append(line := _Line(waiting.popleft(), ("127.0.0.1", port)))
            selector.register(line.socket, both if line.talk.reads else selectors.EVENT_WRITE, line)
        for key, events in selector.select(0.005 if paused else 0.05):
            line = key.data
            try:
                if events & selectors.EVENT_WRITE and not line.send():
                    paused.add(line)
                    selector.modify(line.socket, selectors.EVENT_READ, line)
                elif not line.sending and events & selectors.EVENT_WRITE:
                    selector.modify(line.socket, selectors.EVENT_READ, line)
                if not line.talk.reads and not line.sending:
                    selector.unregister(line.socket)
                    silent.append(line)
                elif events & selectors.EVENT_READ and line.talk.reads and not line.read():
                    drop(line)
            except OSError:
                line.answer.closed = True
                with suppress(OSError):  # what came before the reset
                    while data := line.socket.recv(_READ_BYTES):
                        line.answer.add(data, line.began)
                drop(line)
        for line in [each for each in paused if time.monotonic() >= each.next_at]:
            paused.discard(line)
            selector.modify(line.socket, both, line)
    for key in list(selector.get_map().values()):
        drop(key.data)
    for line in silent:
        line.socket.close()
    for line in lines:
        line.answer.finish()
    return [line.answer for line in lines]
