"""A process for work on texts that may take too long or too much memory: it can be ended, and others go on.

It renders chat templates that are not plain, and encodes texts of hundreds of thousands of characters. It starts when
it is first needed, and stays. It is ended with its parent and after a deadline, and the system refuses it more memory
than it may have. Then the next task starts another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.text.chat_template import ChatTemplate
from headway.text.tokenizer import TextError, Tokenizer

RENDER_S, ENCODE_S = 5.0, 60.0
# More than this process has when it is ready.
RENDER_BYTES, ENCODE_BYTES = 2**29, 2**31
# The limit of a text that no context bounds.
MOST_CHARS = 2**24
# The limit of a text that is cut to the context or only tokenized; in UTF-8 also of its bytes. It takes up to 0.6 GB.
MOST_CUT = 2**22
# Ids become Python's with the interpreter's lock held.
IDS_BETWEEN_PAUSES, PAUSE_S = 2**16, 2e-5
NICENESS = 10
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG, of Linux
_LENGTH = 8


class Render(msgspec.Struct, tag=True):
    """The arguments of ChatTemplate.render(); `template` is the source, and `most` the characters of the result."""

    template: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    most: int


class Encode(msgspec.Struct, tag=True):
    """The arguments of Tokenizer.encode_all(); `folder` has the tokenizer, and `most` the ids of each text."""

    folder: str
    texts: list[str]
    add_special_tokens: bool
    most: int


class Decode(msgspec.Struct, tag=True):
    """The arguments of Tokenizer.decode(); `folder` has the tokenizer, and `ids` 8 bytes for each."""

    folder: str
    ids: bytes
    skip_special_tokens: bool


class _Answer(msgspec.Struct):
    """`ids` has 4 bytes for each id. For a text of more than `most` tokens, it is their number."""

    text: str = ""
    ids: list[bytes | int] = []
    refusal: str = ""


class TooLong(TextError):
    """A task took more time or memory than it may."""


class TextProcess:
    """The process, from this side. One task at a time; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def render(
        self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], most: int = MOST_CHARS, **options: Any
    ) -> str:
        """Render like ChatTemplate.render(), in the other process.

        Args:
            most: the limit of the result, in characters.

        Raises:
            TextError: as ChatTemplate.render() raises it, and for a longer result.
            TooLong: it took too long, or too much memory.
        """
        asked = Render(template.source, template.special_tokens, [dict(each) for each in messages], options, most)
        return self._done(asked, RENDER_S, "the chat template", "these messages").text

    def encode(self, folder: Path, texts: list[str], add_special_tokens: bool, most: int) -> list[list[int] | int]:
        """Encode like Tokenizer.encode_all(), in the other process. For more than `most` tokens, return their number.

        Raises:
            TooLong: it took too long, or too much memory.
        """
        asked = Encode(str(folder), texts, add_special_tokens, most)
        found = self._done(asked, ENCODE_S, "the tokenizer", "this text").ids
        return [each if isinstance(each, int) else _listed(each) for each in found]

    def decode(self, folder: Path, ids: bytes, skip_special_tokens: bool) -> str:
        """Decode ids of 8 bytes each as Tokenizer.decode() does. Raises TooLong: it took too much time or memory."""
        asked = Decode(str(folder), ids, skip_special_tokens)
        return self._done(asked, ENCODE_S, "the tokenizer", "these tokens").text

    def close(self) -> None:
        """End the process, whatever it does."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _done(self, task: Render | Encode | Decode, seconds: float, who: str, what: str) -> _Answer:
        message = msgspec.msgpack.encode(task)
        with self._lock:
            if self._closed:
                raise TooLong("the server is shutting down")
            try:
                answer = self._exchange(message, seconds)
            except TimeoutError:
                self._end()
                raise TooLong(f"{who} took more than {seconds:g} s for {what}") from None
            except OSError:
                self._end()
                raise TooLong(f"{who} took more memory than it may for {what}") from None
        if answer.refusal:
            raise TextError(answer.refusal)
        return answer

    def _exchange(self, message: bytes, seconds: float) -> _Answer:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(seconds)
        for part in (len(message).to_bytes(_LENGTH), message):  # not joined: it may be large
            self._socket.sendall(part)
        return msgspec.msgpack.decode(_received(self._socket, time.monotonic() + seconds), type=_Answer)

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        ours.settimeout(60.0)
        ours.recv(1)  # it is ready; what it is asked has its whole time

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None


def _listed(ids: bytes) -> list[int]:
    """Ids of 4 bytes each, with pauses for other threads."""
    found, given = list[int](), memoryview(ids).cast("i")
    for at in range(0, len(given), IDS_BETWEEN_PAUSES):
        found += given[at : at + IDS_BETWEEN_PAUSES].tolist()
        time.sleep(PAUSE_S)
    return found


def _received(connection: socket.socket, deadline: float) -> bytearray:
    """The next message. Raises OSError where there will be none, as TimeoutError where it is not there in time."""
    received = bytearray()
    while len(received) < _LENGTH or len(received) < _LENGTH + int.from_bytes(received[:_LENGTH]):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(2**20)
        if not part:
            raise ConnectionResetError
        received += part
    del received[:_LENGTH]
    return received


# --- in the process ---------------------------------------------------------------------------------


class _Worker:
    def __init__(self) -> None:
        self._template: ChatTemplate | None = None
        self._tokenizer: Tokenizer | None = None

    def do(self, task: Render | Encode | Decode) -> _Answer:
        try:
            if isinstance(task, Render):
                return self._render(task)
            return self._encode(task) if isinstance(task, Encode) else self._decode(task)
        except TextError as error:
            return _Answer(refusal=str(error)[:2000])

    def _render(self, task: Render) -> _Answer:
        if self._template is None or self._template.source != task.template:
            self._template = ChatTemplate(task.template, task.special_tokens)
        text = self._template.render(task.messages, **task.options)
        if len(text) > task.most:
            raise TextError(
                f"the chat template makes a text of {len(text)} characters; at most {task.most} can fit the context"
            )
        return _Answer(text=text)

    def _encode(self, task: Encode) -> _Answer:
        found = list[bytes | int]()
        for ids in self._of(task.folder).encode_all(task.texts, task.add_special_tokens):
            found.append(len(ids) if len(ids) > task.most else array("i", ids).tobytes())
        return _Answer(ids=found)

    def _decode(self, task: Decode) -> _Answer:
        ids = array("q", task.ids).tolist()
        return _Answer(text=self._of(task.folder).decode(ids, task.skip_special_tokens))

    def _of(self, folder: str) -> Tokenizer:
        if self._tokenizer is None or self._tokenizer.folder != Path(folder):
            self._tokenizer = Tokenizer.load(folder)
        return self._tokenizer


def _limit_memory(more: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + more
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(descriptor: int, parent: int) -> None:
    """Do what is asked until the parent has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent
    os.nice(NICENESS)
    worker = _Worker()
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"1")
        while os.getppid() == parent:
            message = _received(connection, time.monotonic() + 10**6)
            task = msgspec.msgpack.decode(message, type=Render | Encode | Decode)
            if sys.platform == "linux":
                _limit_memory(RENDER_BYTES if isinstance(task, Render) else ENCODE_BYTES)
            answer = msgspec.msgpack.encode(worker.do(task))
            connection.sendall(len(answer).to_bytes(_LENGTH) + answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
