"""The engine process: the step loop between a socket and a device.

It is run as `python -m headway.engine DESCRIPTOR`. The descriptor is that of a socket, and the API process has the
other end. The engine reads from its standard input what it is to run. It ends when told to, when the parent dies, or
when a step fails and no request is to blame.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from headway.engine.frames import Frames, framed
from headway.engine.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    Configure,
    DropAdapter,
    Explain,
    Failed,
    FromEngine,
    LoadAdapter,
    Progress,
    SetClasses,
    Shutdown,
    ToEngine,
)
from headway.engine.start import start_engine
from headway.policy.admission.intake import taken_up

if TYPE_CHECKING:
    from headway.engine.core import EngineCore
    from headway.models.adapters import Adapter

IDLE_POLL_MS = 500
FINDING_POLL_MS = 5  # while the folder of an adapter is being read
# How long a step may wait for the API process to read what a full socket keeps back.
SEND_WAIT_MS = 10
RECEIVED_AT_ONCE = 1 << 18
_CHECKED = object()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToEngine)


class Channel:
    """One end of the pair of sockets, in the engine process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.set_inheritable(False)
        self._socket = connection
        self._frames = Frames()
        self._received: deque[bytearray] = deque()
        self._unsent = bytearray()

    def send(self, message: FromEngine) -> None:
        self._unsent += framed(_encoder.encode(message))
        self._flush()

    def _flush(self) -> None:
        """Send what waits. What the API process does not take within some milliseconds goes with the next message."""
        while self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, SEND_WAIT_MS):
                    return
            except OSError:  # it is gone
                self._unsent.clear()

    def _wait(self, event: int, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(timeout_ms))

    def receive(self, timeout_ms: int) -> Iterator[ToEngine]:
        """The messages that have come, after up to timeout_ms for the first; Shutdown if the API process is gone."""
        self._flush()
        if timeout_ms and not self._received:
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0), timeout_ms)
        while True:
            while self._received:
                yield _decoder.decode(self._received.popleft())
            try:
                data = self._socket.recv(RECEIVED_AT_ONCE)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                yield Shutdown()
                return
            self._received += self._frames.take(data)

    def close(self) -> None:
        self._socket.close()


def main(descriptor: int) -> int:
    """Serve the API process at the other end of this socket until it says Shutdown or goes away; the exit code."""
    parent = os.getppid()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        configure = sys.stdin.buffer.read()
        if not configure:  # the API process is gone
            return 0
        return _serve(channel, msgspec.msgpack.decode(configure, type=Configure), parent)
    finally:
        channel.close()


def _serve(channel: Channel, configure: Configure, parent: int) -> int:
    if configure.protocol != PROTOCOL_VERSION:
        channel.send(Failed(f"engine protocol {PROTOCOL_VERSION} does not match the server's {configure.protocol}"))
        return 1
    try:
        engine = start_engine(configure.config, lambda stage, ns: channel.send(Progress(stage, ns)))
    except Exception as error:  # a kernel's compiler has its own errors, too
        if not isinstance(error, ValueError):
            traceback.print_exc()
        channel.send(Failed(" ".join(str(error).split()) or type(error).__name__))
        return 1
    # A collection over all that was loaded would stall a step by milliseconds. Garbage that loading has left is kept,
    # too: looking for it would take longer than loading a small model.
    gc.freeze()
    channel.send(engine.ready)
    from headway.engine.executor import EngineFault  # which is imported by now

    try:
        return _step_loop(channel, engine.core, parent)
    except EngineFault as fault:
        traceback.print_exc()
        channel.send(Failed(" ".join(str(fault).split())))
        return 1


def _step_loop(channel: Channel, core: EngineCore, parent: int) -> int:
    checking: Iterator[None] | None = None  # checks the pool's integrity while there is nothing else to do
    finding: list[tuple[LoadAdapter, Future[Adapter]]] = []  # folders of adapters that are being read
    while True:
        busy = core.has_work
        idle_ms = FINDING_POLL_MS if finding else IDLE_POLL_MS
        messages = channel.receive(core.waits_ms if busy else 0 if checking else idle_ms)
        for message in taken_up(messages, time.monotonic_ns):
            if isinstance(message, AddRequest):
                core.add(message)
            elif isinstance(message, AbortRequest):
                core.abort(message.request_id, message.index)
            elif isinstance(message, SetClasses):
                core.scheduler.set_classes(message.classes, message.weights, message.limits)
            elif isinstance(message, Explain):
                from headway.engine.explaining import explanation  # only looked at by people

                is_timed = message.with_parts or message.kernels is not None
                kernels = core.executor.timed(message.kernels) if is_timed else ()
                channel.send(explanation(core.scheduler, message, time.monotonic_ns(), kernels))
            elif isinstance(message, LoadAdapter) and core.adapters is not None:
                finding.append((message, core.adapters.find(message.path)))
            elif isinstance(message, DropAdapter) and core.adapters is not None:
                core.adapters.drop(message.digest)
            elif isinstance(message, Shutdown):
                return 0
        if finding and finding[0][1].done():
            from headway.engine.adapters import found_in

            asked, reading = finding.pop(0)
            channel.send(found_in(reading, asked.name, asked.path))
        if core.has_work:
            channel.send(core.step())
            checking = core.check_by_parts()
        elif busy:  # everything was aborted between two steps
            channel.send(core.idle())
        elif checking is None:
            core.executor.look()
            for hook in core.hooks:
                hook.idle()
        elif next(checking, _CHECKED) is _CHECKED:
            checking = None
        if os.getppid() != parent:
            return 0
