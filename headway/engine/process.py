"""The engine process: the step loop between a socket and a device.

Run as `python -m headway.engine ADDRESS`; it connects to the API process there, reads from its standard input what it
is to run, and ends when told to, when the parent dies, or when a step fails and no request is to blame.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
import zmq

from headway.engine.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AddRequest,
    Configure,
    Explain,
    Failed,
    FromEngine,
    Progress,
    Ready,
    SetClasses,
    Shutdown,
    ToEngine,
)
from headway.engine.start import start_engine
from headway.policy.intake import taken_up

if TYPE_CHECKING:
    from headway.engine.core import EngineCore

IDLE_POLL_MS = 500
_CHECKED = object()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToEngine)


class Channel:
    """One end of the pair of sockets, in the engine process."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        self._socket.send(_encoder.encode(message), copy=True)

    def receive(self, timeout_ms: int) -> Iterator[ToEngine]:
        """The messages that have come; waits up to timeout_ms for the first."""
        if timeout_ms and not self._socket.poll(timeout_ms):
            return
        with suppress(zmq.Again):
            while True:
                yield _decoder.decode(self._socket.recv(zmq.NOBLOCK))

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def main(address: str) -> int:
    """Serve one API process until it says Shutdown or goes away; returns the exit code."""
    parent = os.getppid()
    # Ctrl-C, and a service manager's signals, reach the whole group; the API process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(address)
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
    except Exception as error:  # a kernel's compiler has errors of its own, too
        if not isinstance(error, ValueError):
            traceback.print_exc()
        channel.send(Failed(" ".join(str(error).split()) or type(error).__name__))
        return 1
    quiet_garbage_collector()
    shape = engine.num_blocks, engine.block_size, engine.max_model_len
    seats = engine.core.scheduler.config.max_num_seqs
    blocks = engine.core.scheduler.blocks
    pool_tokens = blocks.pool_tokens(engine.max_model_len)
    checkpoints = blocks.checkpoints
    pinned = len({blocks.node_of(block) for block in blocks.pinned})  # one for all KV cache groups
    channel.send(
        Ready(
            PROTOCOL_VERSION,
            engine.startup_ns,
            *shape,
            engine.device,
            engine.kv_cache_dtype,
            seats,
            pool_tokens,
            pinned,
            engine.left_out,
            None if checkpoints is None else checkpoints.num_slots,
            engine.runner.generates,
            engine.kernels,
        )
    )
    return _step_loop(channel, engine.core, parent)


def quiet_garbage_collector() -> None:
    """Keep what was loaded out of garbage collections: one over all of it stalls a step by milliseconds.

    Garbage that loading has left is kept too, as looking for it would take longer than loading a small model.
    """
    gc.freeze()


def _step_loop(channel: Channel, core: EngineCore, parent: int) -> int:
    checking: Iterator[None] | None = None  # the pool's integrity, while there is nothing else to do
    while True:
        busy = core.has_work
        there = channel.receive(core.waits_ms if busy else 0 if checking else IDLE_POLL_MS)
        for message in taken_up(there, time.monotonic_ns):
            if isinstance(message, AddRequest):
                core.add(message)
            elif isinstance(message, AbortRequest):
                core.abort(message.request_id, message.index)
            elif isinstance(message, SetClasses):
                core.set_classes(message.classes, message.weights)
            elif isinstance(message, Explain):
                channel.send(core.explain(message.most))
            elif isinstance(message, Shutdown):
                return 0
        if core.has_work:
            channel.send(core.step())
            checking = core.check_by_parts()
        elif busy:  # everything was aborted between two steps
            channel.send(core.idle())
        elif checking is not None and next(checking, _CHECKED) is _CHECKED:
            checking = None
        if os.getppid() != parent:
            return 0
