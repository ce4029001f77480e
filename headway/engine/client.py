"""The API process's handle of the engine process: start it, talk to it, start it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from headway.engine.config import EngineConfig
from headway.engine.messages import (
    AbortRequest,
    AddRequest,
    Configure,
    Failed,
    FromEngine,
    Progress,
    Ready,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    ToEngine,
)

RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
STOP_TIMEOUT_S = 5.0
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromEngine)
logger = logging.getLogger("headway.engine")


class EngineDead(Exception):
    """The engine process is not there; the message is for the user."""


_StreamItem = SequenceOutput | EngineDead


class EngineClient:
    """One engine process behind an asyncio interface.

    `state` is "loading" until the engine is ready, "ready", "dead" when it could not start, and
    "stopped" after stop(). An engine that dies ends its requests with EngineDead and is started again.

    Args:
        config: what to run.
        on_progress: hears of each start-up stage and its nanoseconds.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[str, int], None] | None = None) -> None:
        self.config = config
        self.state = "loading"
        self.ready: Ready | None = None
        self.stats: StepStats | None = None
        self.restarts = 0
        self.last_error = "the engine is not started"
        self._on_progress = on_progress
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._streams: dict[str, asyncio.Queue[_StreamItem]] = {}
        self._sent = 0  # requests, to the engine process that runs now
        self._unreported: dict[str, tuple[int, int]] = {}  # request -> its number among those sent, and its choices
        self._changed = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine in the background; returns at once."""
        self._task = asyncio.create_task(self._keep_running(), name="headway-engine")

    async def wait_ready(self) -> Ready:
        """Wait until the engine serves.

        Raises:
            EngineDead: it could not start, or was stopped.
        """
        while self.state == "loading":
            self._changed.clear()
            await self._changed.wait()
        if self.state != "ready" or self.ready is None:
            raise EngineDead(self.last_error)
        return self.ready

    async def stop(self) -> None:
        """End the engine process; in-flight requests end with EngineDead."""
        was_loading = self.state == "loading"
        self._enter("stopped", "the server is shutting down")
        process = self._process
        if process is not None and process.returncode is None:
            if was_loading:  # it listens only when it has loaded
                process.kill()
            self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._close_socket()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def _enter(self, state: str, error: str = "") -> None:
        if self.state == "stopped":
            return
        self.state = state
        if error:
            self.last_error = error
            for stream in self._streams.values():
                stream.put_nowait(EngineDead(error))
            self._streams.clear()
            self._unreported.clear()
            self._sent = 0
            self.stats = None
        self._changed.set()

    async def _keep_running(self) -> None:
        attempts = 0
        while self.state != "stopped":
            await asyncio.sleep(RESTART_DELAYS_S[min(attempts, len(RESTART_DELAYS_S) - 1)])
            attempts += 1
            began = time.monotonic()
            try:
                failed = await self._run_once(attempts)
            except OSError as error:
                failed = f"the engine process cannot be started: {error}"
            except Exception as error:  # whatever it is, nobody may go on waiting for outputs that do not come
                logger.exception("the connection to the engine failed")
                failed = f"the connection to the engine failed: {type(error).__name__}: {error}"
            if self.state == "stopped":
                return
            if failed:
                self._enter("dead", failed)
                return
            if time.monotonic() - began > 60:
                attempts = 0
            code = self._process.returncode if self._process is not None else None
            logger.error("the engine process ended with code %s; starting it again", code)
            self.restarts += 1
            self._enter("loading", "the engine process died; the server is starting it again")

    async def _run_once(self, attempt: int) -> str:
        """Run one engine process to its end; returns why it can't start, or an empty string."""
        address = f"ipc://{self._folder.name}/{attempt}-{self.restarts}"
        self._close_socket()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headway.engine.process", address, env=environment
        )
        self._send(Configure(self.config))
        receiving = asyncio.create_task(self._receive())
        ending = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            # What the engine sent before it died is still worth reading.
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=0.2)
            if receiving.done():
                return receiving.result()
            return "" if self.ready is not None else "the engine process died while it was starting"
        finally:
            receiving.cancel()
            if self._process.returncode is None:
                self._process.kill()
            await ending

    async def _receive(self) -> str:
        assert self._socket is not None
        while True:
            message = _decoder.decode(await self._next_frame())
            if isinstance(message, StepOutputs):
                self._deliver(message)
            elif isinstance(message, Progress):
                if self._on_progress is not None:
                    self._on_progress(message.stage, message.elapsed_ns)
            elif isinstance(message, Ready):
                self.ready = message
                self._enter("ready")
            elif isinstance(message, Failed):
                return message.message

    async def _next_frame(self) -> bytes:
        """At once where one has come: a wait takes turns of a loop that may be busy, and steps do not wait for it."""
        assert self._socket is not None
        with contextlib.suppress(zmq.Again):
            return await self._socket.recv(zmq.NOBLOCK)
        return await self._socket.recv()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _send(self, message: ToEngine) -> None:
        # The send buffer is unbounded, so the future is done when this returns.
        if self._socket is not None:
            self._socket.send(_encoder.encode(message))

    # --- requests -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Choices waiting in the engine, with those that it had not seen at its last report."""
        on_their_way = sum(choices for _, choices in self._unreported.values())
        return (self.stats.num_waiting if self.stats is not None else 0) + on_their_way

    def subscribe(self, callback: Callable[[StepStats], None]) -> None:
        """Call back with the statistics of every step."""
        self._subscribers.append(callback)

    async def generate(self, request: AddRequest) -> AsyncIterator[SequenceOutput]:
        """Outputs of all choices as they come, until each has finished.

        Closing the iterator early aborts the request in the engine.

        Raises:
            EngineDead: the engine is not ready, or died.
            ValueError: the request's id is in use.
        """
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use; give every request its own")
        if self.state != "ready":
            raise EngineDead(self.last_error if self.state != "loading" else "the engine is still loading")
        stream: asyncio.Queue[_StreamItem] = asyncio.Queue()
        self._streams[request.request_id] = stream
        unfinished = request.params.n
        try:
            self._send(request)
            self._sent += 1
            self._unreported[request.request_id] = self._sent, request.params.n
            while unfinished:
                item = await stream.get()
                if isinstance(item, EngineDead):
                    unfinished = 0
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
                self._unreported.pop(request.request_id, None)
                if unfinished:
                    self.abort(request.request_id)

    def abort(self, request_id: str, index: int = -1) -> None:
        """Stop generating for one choice, or for all; their streams get no further output."""
        if self.state == "ready":
            self._send(AbortRequest(request_id, index))

    def _deliver(self, message: StepOutputs) -> None:
        self.stats = message.stats
        while self._unreported:  # in the order in which they were sent
            name, (number, _) = next(iter(self._unreported.items()))
            if number > message.stats.received:
                break
            del self._unreported[name]
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)
        for callback in self._subscribers:
            callback(message.stats)
