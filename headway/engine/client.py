"""The API process's side of the engine process: starts it, talks to it, and starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import IO, Any

import msgspec

from headway.engine.config import EngineConfig
from headway.engine.frames import Frames, framed
from headway.engine.messages import (
    AbortRequest,
    AdapterFound,
    AddRequest,
    Configure,
    EngineOutputs,
    EngineStats,
    Explain,
    Explanation,
    Failed,
    FromEngine,
    Progress,
    Ready,
    SequenceOutput,
    SetClasses,
    Shutdown,
    ToEngine,
)
from headway.engine.requests import InFlight, Requests, StreamItem
from headway.engine.served_adapters import AdapterError as AdapterError
from headway.engine.served_adapters import ServedAdapters
from headway.engine.watchdog import Watchdog
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.scheduler_config import StepLimits

# Pauses before the engine is started again, by how many engines in a row have lived for less than STABLE_S.
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 30.0)
STABLE_S = 60.0
# Requests wait for the engine until this many starts in a row have failed.
MOST_FAILED_STARTS = 5
ENGINE_MODULE = "headway.engine"
STOP_TIMEOUT_S = 5.0
# The share of the longest way back that is still assumed after an output that was quicker.
_WAY_BACK_KEPT = 0.98
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromEngine)
logger = logging.getLogger("headway.engine")


class EngineDead(Exception):
    """The engine process is not there; the message is for the user."""


def _write(pipe: IO[bytes], content: bytes) -> None:
    """Write all of the content and close the pipe. An engine that ends before it has read is noticed by its end."""
    with contextlib.suppress(OSError), pipe:
        pipe.write(content)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended, in a thread that nobody has to wait for."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True, name="headway-engine-end").start()
    await ended.wait()


class _Link(asyncio.Protocol):
    """The connection with one engine process.

    Args:
        take: gets each of its messages; returns why the engine ends, or an empty string.

    Attributes:
        failed: done with the reason for which the engine ends, or with the exception of a message that `take` raised.
        read: done when all that the engine sent has been read.
    """

    def __init__(self, take: Callable[[FromEngine], str]) -> None:
        loop = asyncio.get_running_loop()
        self._take = take
        self._frames = Frames()
        self.failed: asyncio.Future[str] = loop.create_future()
        self.read: asyncio.Future[None] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.take(data):
            if self.failed.done():
                return
            try:
                if reason := self._take(_decoder.decode(frame)):
                    self.failed.set_result(reason)
            except Exception as error:
                self.failed.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.read.done():
            self.read.set_result(None)


class EngineClient:
    """One engine process behind an asyncio interface.

    `state` is "loading" until the engine is ready, "ready", "dead" when its first start failed, and
    "stopped" after stop(). An engine that dies later is started again, at growing intervals and for ever; its
    requests go on with the next one (engine.requests). One that ends no step is ended, as the watchdog says.

    Args:
        config: what to run.
        on_progress: hears of each start-up stage and its nanoseconds; and with 0, of what is being done.
        replay: hand the requests of an engine that dies to the next one; else they end with EngineDead.
        timeout_s: see Watchdog.

    Attributes:
        restarts: engines that were started after another one.
        hangs: how many of these followed one that ended no step.
        adapters: those that are served, by name; before the engine is ready, the names of lora_modules.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str, int], None] | None = None,
        replay: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self.config = config
        self.state = "loading"
        self.ready: Ready | None = None
        self.stats: EngineStats | None = None
        self._way_back_ns = 0  # the longest time of late that an output took from the engine to here
        self.restarts = self.hangs = 0
        self.last_error = "the engine is not started"
        self._on_progress = on_progress
        self._subscribers: list[Callable[[EngineStats], None]] = []
        self._complained: set[Callable[..., None]] = set()
        self._requests = Requests(replay)
        self._watchdog = Watchdog(timeout_s)
        self.adapters = ServedAdapters(config.lora_modules, self._send)
        self._explaining: deque[asyncio.Future[Explanation]] = deque()  # in the order in which they were asked
        self._changed = asyncio.Event()
        self._socket: socket.socket | None = None  # our end, until there is a transport
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process of the engine, with what it is to run: it begins to load at once, before start() or after.

        Returns without waiting until the engine reads this, which may be more than a pipe holds.

        Raises:
            OSError: it cannot be started.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        # What the first engine had room for may be too much for one that finds less memory.
        config = replace(self.config, lora_modules=self.adapters.modules, enable_lora=self.config.lora_slots > 0)
        configure = Configure(replace(config, preload_what_fits=self.ready is not None))
        self._close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", ENGINE_MODULE, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, pass_fds=[theirs.fileno()]
            )
        arguments = self._process.stdin, _encoder.encode(configure)
        threading.Thread(target=_write, args=arguments, daemon=True, name="headway-engine-configure").start()

    def kill(self) -> None:
        """End an engine process that was launched, where start() was never reached."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._close()

    async def start(self) -> None:
        """Start the engine in the background; returns at once."""
        self._task = asyncio.create_task(self._keep_running(), name="headway-engine")

    async def wait_ready(self) -> Ready:
        """Wait until the engine serves. Raises EngineDead: it could not start, or was stopped."""
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
            if was_loading or self.stalled_s:  # it listens only when it has loaded
                process.kill()
            self._send(Shutdown())
            try:
                await asyncio.wait_for(_ended(process), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await _ended(process)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._close()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def stalled_s(self) -> float:
        """For how long the engine has had work and ended no step, where that is too long; else 0."""
        return self._watchdog.stalled_s

    def _has_work(self) -> bool:
        """Whether the engine should end a step, or answer a question."""
        return bool(self._explaining) or self._requests.are_in_engine

    def _enter(self, state: str, error: str = "") -> None:
        if self.state == "stopped":
            return
        self.state = state
        if error:
            self.last_error = error
            self.stats = None
            while self._explaining:
                self._answer_explain(EngineDead(error))
            self.adapters.engine_ended(EngineDead(error))
        if state in ("dead", "stopped"):
            self._requests.end_all(EngineDead(error))
        self._changed.set()

    async def _keep_running(self) -> None:
        """Run one engine after the other until stop(); only the first must not fail to start."""
        unstable = failed = 0
        while True:
            began = time.monotonic()
            reason = await self._run_once()
            if self.state == "stopped":
                return
            if self.ready is None:
                return self._enter("dead", reason)
            failed = 0 if self.state == "ready" else failed + 1
            unstable = 0 if time.monotonic() - began > STABLE_S else unstable + 1
            code = self._process.returncode if self._process is not None else None
            logger.error("%s (code %s); %d requests are in flight; restarting it", reason, code, len(self._requests))
            self.restarts += 1
            self._enter("loading", f"{reason}; it is restarting")
            self._requests.engine_died(time.monotonic_ns(), EngineDead(self.last_error))
            if failed >= MOST_FAILED_STARTS:
                self._requests.end_all(EngineDead(self.last_error))
            await asyncio.sleep(RESTART_DELAYS_S[max(0, min(unstable, len(RESTART_DELAYS_S)) - 1)])

    async def _run_once(self) -> str:
        """Run one engine process to its end; returns why it ended."""
        try:
            failed = await self._run_process()
        except OSError as error:
            return f"the engine process cannot be started: {error}"
        except Exception as error:  # another process may do better, whatever it was
            logger.exception("the connection to the engine failed")
            return f"the connection to the engine failed: {type(error).__name__}: {error}"
        if failed or self.state == "ready":
            return failed or "the engine process died"
        return "the engine process died while it was starting"

    async def _run_process(self) -> str:
        """Run one engine process to its end; returns the reason that the engine gave, or an empty string."""
        if self._process is None or self._process.returncode is not None:
            self.launch()
        process, connection = self._process, self._socket
        assert process is not None and connection is not None
        link = _Link(self._take)
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        self._socket = None  # it is the transport's from now on
        ending = asyncio.create_task(_ended(process))
        hanging = asyncio.create_task(
            self._watchdog.watch(process.pid, self._has_work, lambda: self.state == "loading"), name="headway-watchdog"
        )
        failed: asyncio.Future[Any] = link.failed
        try:
            await asyncio.wait({failed, ending, hanging}, return_when=asyncio.FIRST_COMPLETED)
            if hanging.done() and not failed.done():
                self.hangs += 1
                return hanging.result()
            if not failed.done():  # what the engine sent before it died is still worth reading
                await asyncio.wait({failed, link.read}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            return link.failed.result() if failed.done() else ""
        finally:
            hanging.cancel()
            if process.returncode is None:
                process.kill()
            await ending

    def _take(self, message: FromEngine) -> str:
        """Take a message of the engine. Returns why the engine ends, if the message says so, else an empty string."""
        if isinstance(message, EngineOutputs):
            self._deliver(message)
        elif isinstance(message, Explanation):
            self._answer_explain(message)
        elif isinstance(message, AdapterFound):
            self.adapters.take(message)
        elif isinstance(message, Progress):
            if self._on_progress is not None:
                self._tell(self._on_progress, message.stage, message.elapsed_ns)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Failed):
            return message.message
        return ""

    def _on_ready(self, message: Ready) -> None:
        self.ready = message
        self.adapters.engine_ready(message.adapters)
        if preloaded := len(self.config.preloaded) - len(message.left_out):
            tokens = message.pinned_blocks * message.block_size
            logger.info("%d prompts are preloaded: %d tokens stay in the cache", preloaded, tokens)
        if message.left_out:
            reasons = "; ".join(message.left_out)
            logger.warning("%d prompts are not preloaded any more: %s", len(message.left_out), reasons)
        self._enter("ready")
        self._send_due()

    def _close(self) -> None:
        """Let go of the connection with an engine process, if there is one."""
        if self._transport is not None:
            self._transport.abort()
        if self._socket is not None:
            self._socket.close()
        self._transport = self._socket = None

    def _send(self, message: ToEngine) -> None:
        encoded = _encoder.encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(encoded))

    def set_classes(self, classes: ClassTable, weights: dict[str, float], limits: StepLimits | None = None) -> None:
        """Set what SetClasses has, also for engine processes to come."""
        self.config = replace(self.config, classes=classes, weights=weights, limits=limits or self.config.limits)
        self._send(SetClasses(classes, weights, limits))

    def _answer_explain(self, answer: Explanation | EngineDead) -> None:
        asked = self._explaining.popleft()
        if asked.done():
            return  # whoever asked has gone
        if isinstance(answer, EngineDead):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)

    async def explain(self, asked: Explain) -> Explanation:
        """The engine's last steps and the reasons for them, the newest last; and its first sequences.

        Raises:
            EngineDead: it is not ready, or died.
        """
        if self.state != "ready":
            raise EngineDead(self.last_error)
        answer: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._explaining.append(answer)
        self._send(asked)
        return await answer

    # --- requests -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """How many choices wait in the engine or had not reached it at its last report."""
        return (self.stats.num_waiting if self.stats is not None else 0) + self._requests.num_unreported

    def subscribe(self, callback: Callable[[EngineStats], None]) -> None:
        """Call back with the statistics of every step."""
        self._subscribers.append(callback)

    def submit(self, requests: Sequence[AddRequest], take: Callable[[StreamItem], None]) -> Callable[[], None]:
        """Hand over requests. `take` gets each output of their choices in the turn of the event loop in which it comes.

        When they cannot go on, it gets the exception, and nothing after it. It must not raise.

        Returns:
            a function to call at the end, which forgets the requests and aborts in the engine what has not finished.

        Raises:
            EngineDead: the engine is not ready.
            ValueError: a request's id is in use.
        """
        if self.state != "ready":
            raise EngineDead(self.last_error if self.state != "loading" else "the engine is still loading")
        entries: list[InFlight] = []

        def leave() -> None:
            for entry in entries:
                if self._requests.remove(entry):
                    self._send(AbortRequest(entry.request.request_id))
            self._send_due()

        try:
            for request in requests:
                request.way_back_ns = self._way_back_ns
                entries.append(self._requests.add(request, take))
        except ValueError:
            leave()
            raise
        self._send_due()
        return leave

    async def generate(self, *requests: AddRequest) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs of all choices of the requests as they come, until each has finished.

        Closing the iterator early aborts the requests in the engine.

        Raises:
            EngineDead: the engine is not ready; or it died, and the requests can't go on.
            ValueError: a request's id is in use.
        """
        stream: asyncio.Queue[StreamItem] = asyncio.Queue()
        leave = self.submit(requests, stream.put_nowait)
        unfinished = sum(request.params.n for request in requests)
        try:
            while unfinished:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            leave()

    def abort(self, request_id: str, index: int = -1) -> None:
        """Stop generating for one choice, or for all; their streams get no further output."""
        if self._requests.abort(request_id, index, time.monotonic_ns()):
            self._send(AbortRequest(request_id, index))

    def _send_due(self) -> None:
        """Send the requests whose turn it is."""
        if self.state == "ready":
            self._requests.send_due(self._send, time.monotonic_ns())

    def _deliver(self, message: EngineOutputs) -> None:
        self.stats = message.stats
        self._watchdog.steps += 1
        self._watchdog.longest_step_ns = message.stats.longest_step_ns
        self._way_back_ns = max(time.monotonic_ns() - message.made_ns, int(_WAY_BACK_KEPT * self._way_back_ns))
        self._requests.deliver(message)
        self._send_due()
        for callback in self._subscribers:
            self._tell(callback, message.stats)

    def _tell(self, callback: Callable[..., None], *news: object) -> None:
        """Call back. An exception in the callback does not stop the server."""
        try:
            callback(*news)
        except Exception:
            if callback not in self._complained:
                self._complained.add(callback)
                logger.exception("a listener to the engine failed; further failures of it are not logged")
