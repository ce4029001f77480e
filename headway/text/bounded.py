"""A process for work that may take too long or too much memory: it can be ended, and others go on.

It starts when it is first needed, and stays. It is ended with its parent and after a deadline, and the system refuses
it more memory than it may have. Then the next task starts another one. Both sides are here: BoundedProcess asks, and
serve() answers.
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
from collections.abc import Callable
from pathlib import Path

NICENESS = 10
START_S = 60.0
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG, of Linux
_LENGTH = 8


class Closed(Exception):
    """The process was closed and starts no more."""


class BoundedProcess:
    """The process, from this side. One task at a time; for any thread.

    Args:
        module: what it runs, with a descriptor, the id of this process and the arguments; it calls serve().
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module, self._arguments = module, arguments
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def ask(self, message: bytes, seconds: float) -> bytearray:
        """The answer to a message. Where there is none, the process has been ended.

        Raises:
            TimeoutError: it took too long.
            OSError: the process has gone, mostly because it needed more memory than it may have.
            Closed: close() was called.
        """
        with self._lock:
            if self._closed:
                raise Closed("the server is shutting down")
            try:
                return self._exchange(message, seconds)
            except OSError:
                self._end()
                raise

    def close(self) -> None:
        """End the process, whatever it does."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _exchange(self, message: bytes, seconds: float) -> bytearray:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._socket is not None
        self._socket.settimeout(seconds)
        for part in (len(message).to_bytes(_LENGTH), message):  # not joined: it may be large
            self._socket.sendall(part)
        return _received(self._socket, time.monotonic() + seconds)

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), str(os.getpid()), *self._arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the parent
            )
        self._socket = ours
        ours.settimeout(START_S)
        ours.recv(1)  # it is ready; what it is asked has its whole time

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None


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


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has; does nothing where the system cannot."""
    if sys.platform != "linux":
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + more
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def serve(descriptor: int, parent: int, do: Callable[[bytearray], bytes]) -> None:
    """Answer each message with what `do` makes of it, until the parent has gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.nice(NICENESS)
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"1")
        while os.getppid() == parent:
            answer = do(_received(connection, time.monotonic() + 10**6))
            connection.sendall(len(answer).to_bytes(_LENGTH) + answer)
