"""A Headway server of one's own, as `headway serve` starts it, and what it says of its start."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headway
from headway.load.errors import BenchError

_SERVING = re.compile(r"Serving .* at (http://\S+)/v1\s*$")
_READY = re.compile(
    r"Ready after ([\d.]+) s on (\S+): context ([\d,]+) tokens, KV cache ([\d,]+) blocks of ([\d,]+) tokens"
)
_SERVER_STAGE = re.compile(r"server: (.+?)\s{1,}<?([\d,.]+) ms\s*$")
_SHUTDOWN_S = 5.0
_ASKED_EVERY_S = 0.2
_KEPT_LINES = 40
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Startup:
    """What the server said when it was ready."""

    url: str = ""
    seconds: float = 0.0  # seconds from the start of its process
    device: str = ""
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 0
    api_stages: dict[str, float] = field(default_factory=dict)  # seconds of the API process's own stages

    def read(self, line: str) -> None:
        """Take what one line of the server's stderr says."""
        if found := _READY.search(line):
            self.seconds, self.device = float(found[1]), found[2]
            self.max_model_len, self.num_blocks, self.block_size = (
                int(n.replace(",", "")) for n in found.group(3, 4, 5)
            )
        elif found := _SERVING.search(line):
            self.url = found[1]
        elif found := _SERVER_STAGE.search(line):
            self.api_stages[found[1]] = float(found[2].replace(",", "")) / 1e3


class LocalServer:
    """Use as an async context manager: inside, the server is ready; after it, it is gone, whatever happened.

    It is not in this process's group, so that Ctrl-C reaches it only by way of us, and it is told to end when this
    process dies without having been able to.

    Args:
        arguments: the arguments of `headway serve`; host and port are chosen here.
        timeout_s: the longest time for it to become ready.
        on_line: hears what it writes on stderr while it starts.
        command: the command that the arguments are given to.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        timeout_s: float,
        on_line: Callable[[str], None] = lambda line: None,
        command: Sequence[str] = (sys.executable, "-m", "headway", "serve"),
    ) -> None:
        self.startup = Startup()
        self._command = command
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> LocalServer:
        """Raises BenchError when it does not become ready."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return self.startup.url

    async def _start(self) -> None:
        command = [*self._command, *self._arguments, "--host", "127.0.0.1", "--port", "0"]
        await self._spawn([*command, "--log-level", "warning", "--shutdown-timeout", "1"], subprocess.DEVNULL)
        await self._until(self._ready.wait())

    async def _spawn(self, command: Sequence[str], stdout: int) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *command, stdout=stdout, stderr=subprocess.PIPE, **child_options()
        )
        self._reading = asyncio.create_task(self._read())

    async def _until(self, ready: Coroutine[Any, Any, Any]) -> None:
        """Wait until it is ready. Raises BenchError if it ends before, or takes too long."""
        assert self._process is not None and self._reading is not None
        waiting = asyncio.create_task(ready)
        try:
            await asyncio.wait({waiting, self._reading}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_ready = waiting.done()
        finally:
            waiting.cancel()
        if is_ready:
            return
        if self._reading.done():
            raise BenchError(self._start_error(await self._process.wait()))
        limit = f"{self._timeout_s:g} s"
        raise BenchError(f"the server was not ready after {limit}; raise --ready-timeout ({self._last_words()})")

    async def _read(self) -> None:
        """Everything that the server writes, to its end: a full pipe would stop it."""
        assert self._process is not None and self._process.stderr is not None
        while not self._process.stderr.at_eof():
            try:
                raw = await self._process.stderr.readline()
            except ValueError:  # longer than the reader takes, and gone
                continue
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                self._hear(line)

    def _hear(self, line: str) -> None:
        """Take what a line of its stderr says of its start."""
        if not self._ready.is_set():
            self.startup.read(line)
            self._on_line(line)
            if self.startup.url:
                self._ready.set()

    def _last_words(self) -> str:
        return f"last words: {' '.join(self._lines[-1].split())}" if self._lines else "it said nothing"

    def _start_error(self, code: int) -> str:
        said = [line.removeprefix("headway: ") for line in self._lines if line.startswith("headway: ")]
        return f"the server did not start: {said[-1] if said else f'it ended with code {code}, {self._last_words()}'}"

    def died(self) -> str | None:
        """Why it is gone, when it ended by itself; None while it runs."""
        code = None if self._process is None else self._process.returncode
        return None if code is None else f"the server ended with code {code}, {self._last_words()}"

    async def stop(self) -> None:
        """End it: asked first, killed after some seconds. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _SHUTDOWN_S)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.gather(self._reading, return_exceptions=True)


class StartedServer(LocalServer):
    """Any server with an OpenAI API, as LocalServer. It is ready when it lists its models.

    Args:
        command: its words; the port is among them.
        url: where it will be.
    """

    def __init__(self, command: Sequence[str], url: str, timeout_s: float) -> None:
        super().__init__((), timeout_s, command=command)
        self.startup.url = url

    async def _start(self) -> None:
        try:
            await self._spawn(self._command, subprocess.DEVNULL)
        except OSError as error:
            raise BenchError(f"cannot start {self._command[0]}: {error.strerror}; see --start") from None
        await self._until(self._listed())

    async def _listed(self) -> None:
        while True:
            try:
                await asyncio.to_thread(lambda: urllib.request.urlopen(f"{self.url}/v1/models", timeout=5).close())
            except OSError:
                await asyncio.sleep(_ASKED_EVERY_S)
            else:
                return

    def _hear(self, line: str) -> None:
        pass


def child_options() -> dict[str, Any]:
    """How `subprocess` is to start a child: out of reach of the terminal's signals, and ended when we die."""
    return {
        "stdin": subprocess.DEVNULL,
        "env": _environment(),
        "start_new_session": True,
        "preexec_fn": _end_with_parent(),
    }


def _environment() -> dict[str, str]:
    """The environment of a child that runs this very package, writes plain lines and asks for no key."""
    unwanted = ("FORCE_COLOR", "TTY_COMPATIBLE", "HEADWAY_API_KEY")
    plain = {name: value for name, value in os.environ.items() if name not in unwanted}
    source = str(Path(headway.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**plain, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"}


def _end_with_parent() -> Callable[[], None] | None:
    """What a child does first, so that it gets SIGTERM when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
