"""Processes that are measured: they answer a line of JSON with a line of JSON, and are stopped while nobody asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parent.parent
_TAIL = 15  # lines of a log that are shown when something fails
_PATIENCE_S = 15.0
_NOTHING: Mapping[str, str] = MappingProxyType({})


def environment(root: Path = ROOT) -> dict[str, str]:
    """An environment in which any Python finds a checkout's modules, and nothing is looked up on the network.

    Modules are compiled once, as those of installed packages are, whatever PYTHONDONTWRITEBYTECODE says.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])


class Died(SystemExit):
    """Something that was to be measured ended, or cannot be; the message says what and why, and shows its log's tail.

    A sitting goes on without it; where nothing catches it, it ends the benchmark.
    """

    @property
    def line(self) -> str:
        """The message without the log."""
        return str(self).partition("\n")[0].rstrip(":")


class Child:
    """A process and its children, in a group of their own. Its standard error goes to a log that outlives a failure.

    Args:
        command: the first line that it writes says what it is (`about`).
        root: the checkout whose modules it runs.
        variables: of its environment, more than environment() has.

    Raises:
        Died: it ended before it answered; with its name and the tail of its log. So does ask().
    """

    def __init__(
        self, name: str, command: list[str], root: Path = ROOT, variables: Mapping[str, str] = _NOTHING
    ) -> None:
        self.name = name
        self._died = False
        with tempfile.NamedTemporaryFile(prefix=f"{name.replace(' ', '-')}-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment(root), **variables},
                cwd=root,
                start_new_session=True,
                text=True,
            )
        try:
            self.about = self._reply()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Wake it, hand over the request, and stop it again when it has answered."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # then there is no reply either, and the log says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        reply = self._reply()
        self._signal(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        """End it, by the end of its input or else by force. The log of one that died by itself is kept."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._signal(signal.SIGKILL)  # an engine may leave children behind
        assert self._process.stdout is not None
        self._process.stdout.close()
        if not self._died:
            self._log.unlink(missing_ok=True)

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._died = True
            raise Died(f"{self.name} ended with exit code {code}; its log ({self._log}):\n{tail(self._log)}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _signal(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)


@contextmanager
def running(
    name: str, command: list[str], root: Path = ROOT, variables: Mapping[str, str] = _NOTHING
) -> Iterator[Child]:
    """A child that has said what it is, stopped; ended with the block. Says on stderr how it goes."""
    print(f"starting {name} ...", file=sys.stderr)
    child = Child(name, command, root, variables)
    try:
        print(f"{name} {child.about['version']} ready after {child.about['start_seconds']:.1f} s", file=sys.stderr)
        yield child
    finally:
        child.close()


def finish(name: str, command: list[str]) -> None:
    """Run a program to its end; it is ended with this process.

    Raises:
        Died: it failed; with its name and the tail of what it wrote.
    """
    with tempfile.NamedTemporaryFile(prefix=f"{name.replace(' ', '-')}-", suffix=".log", delete=False) as output:
        log = Path(output.name)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment(), start_new_session=True
        )
    try:
        code = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        log.unlink(missing_ok=True)
        raise
    if code:
        raise Died(f"{name} ended with exit code {code}; its log ({log}):\n{tail(log)}")
    log.unlink()


class Timed:
    """A program in a Python of its own, such as vLLM's: it says `ready`, and for each line the seconds that it `took`.

    Args:
        given: JSON-able; the program's first argument.
    """

    def __init__(self, python: str, program: str, *given: object) -> None:
        command = [python, "-c", program, json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line("ready")

    def _line(self, first: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(first):
                return line.removeprefix(first)
        raise SystemExit("the program ended; its error is above")

    def seconds(self, asked: object) -> float:
        assert self._process.stdin is not None
        print(asked, file=self._process.stdin, flush=True)
        return float(self._line("took"))

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)
