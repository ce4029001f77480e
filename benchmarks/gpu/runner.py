"""Runs a part: its tasks in a process that may crash, hang or write nonsense, and in another one after that.

The process writes a line of JSON for each thing that happens (part.py), which is read while it grows. A task during
which the process ended, or that takes too long, has failed; the rest goes on in a new process. What was written before
counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import SHARE
from benchmarks.gpu.parts import ROOT

_POLL_S = 0.05
_LAST_LINES = 6
_START_S = 60.0  # for a process to name its tasks, imports included
BEFORE = "before its first task"
_TIME = "time"


@dataclass
class Outcome:
    """What came of the tasks of a part.

    Args:
        tasks: by name, {"rows", and "seconds", "error" or "skipped"} of those that have ended.
        left: names of those that were not reached, for want of time.
        cut: whether the time ran out before all were named or run.

    It is whole where nothing is left and nothing was cut.
    """

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    cut: bool = False

    @property
    def errors(self) -> dict[str, str]:
        return {name: task["error"] for name, task in self.tasks.items() if "error" in task}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for task in self.tasks.values() for row in task["rows"]]


def environment(share: str) -> dict[str, str]:
    """The environment of a part's processes: this source, no network, and Triton's compiler, not its interpreter."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    plain = {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "COLUMNS": "160"}
    return {**os.environ, **plain, "PYTHONPATH": path, SHARE: share, **_COMPILED}


_COMPILED = {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"}
Command = Callable[[Path, Path], list[str]]  # takes the file of lines, and the file with the names of tasks done


def run(
    command: Command,
    outcome: Outcome,
    log: Path,
    folder: Path,
    seconds: float,
    task_seconds: float,
    share: str = "0/1",
    stop: threading.Event | None = None,
) -> None:
    """Run the tasks that the outcome has not, and add them to it.

    Args:
        log: what the processes print is added to it.
        folder: for the files between the processes.
        seconds: at most; the task that is under way then is left for another time.
        task_seconds: at most for one task.
        share: which of the tasks; see part.own_share.
        stop: once it is set, all ends as if the time had run out.
    """
    outcome.tasks.pop(BEFORE, None)
    deadline = time.monotonic() + seconds
    for number in range(1000):
        lines, done = folder / f"lines-{number}.jsonl", folder / f"done-{number}.json"
        lines.write_bytes(b"")
        done.write_text(json.dumps(list(outcome.tasks)))
        follower = _Follower(lines, outcome)
        with log.open("ab") as output:
            size = output.tell()
            process = subprocess.Popen(
                command(lines, done), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment(share), start_new_session=True, cwd=ROOT,
            )  # fmt: skip
        try:
            why = _wait(process, follower, deadline, task_seconds, stop)
        finally:
            _end(process)
            follower.close()
        outcome.left, outcome.cut = follower.remaining, why == _TIME
        if follower.named is not None and not follower.remaining:
            break  # however it ended: there is nothing else to do
        if why == _TIME or not _blame(follower, why or _ending(process.returncode), _last_words(log, size)):
            break


def run_shared(
    command: Command, outcome: Outcome, log: Path, folder: Path, seconds: float, task_seconds: float, count: int
) -> None:
    """Run tasks as `run` does, `count` at a time, each in a process with a share of them."""
    stop, shares = threading.Event(), [Outcome(dict(outcome.tasks)) for _ in range(count)]
    folders = [folder / f"share-{number}" for number in range(count)]
    for each in folders:
        each.mkdir()
        (each / "log").touch()
    try:
        with ThreadPoolExecutor(count) as pool:
            running = [
                pool.submit(run, command, own, each / "log", each, seconds, task_seconds, f"{number}/{count}", stop)
                for number, (own, each) in enumerate(zip(shares, folders, strict=True))
            ]
            try:
                for one in running:
                    one.result()
            finally:
                stop.set()
    finally:
        with log.open("ab") as output:
            for own, each in zip(shares, folders, strict=True):
                output.write((each / "log").read_bytes())
                outcome.tasks |= own.tasks
        outcome.left, outcome.cut = [name for own in shares for name in own.left], any(own.cut for own in shares)


class _Follower:
    """Reads the lines of one process."""

    def __init__(self, path: Path, outcome: Outcome) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self._outcome = outcome
        self.named: list[str] | None = None
        self.running: str | None = None
        self.since = time.monotonic()
        self.ended = 0  # tasks
        self._rows: dict[str, list[Any]] = {}

    @property
    def remaining(self) -> list[str]:
        """Tasks without a result; what is under way among them."""
        return [name for name in self.named or [] if name not in self._outcome.tasks]

    def read(self) -> None:
        """Take in what was written since; what is no record is passed over."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if "tasks" in record:
            self.named = [str(name) for name in record["tasks"]]
            self.since = time.monotonic()
        elif "began" in record:
            self.running, self.since = str(record["began"]), time.monotonic()
        elif "task" in record:
            self._rows.setdefault(str(record["task"]), []).append(dict(record["row"]))
        elif "ended" in record:
            name = str(record["ended"])
            about = {key: record[key] for key in ("seconds", "error", "skipped") if key in record}
            self.end(name, **about)

    def close(self) -> None:
        """Take in the last lines."""
        self.read()
        self._file.close()

    def end(self, name: str, **about: Any) -> None:
        self._outcome.tasks[name] = {"rows": self._rows.pop(name, []), **about}
        self.running, self.since = None, time.monotonic()
        self.ended += 1


def _wait(
    process: subprocess.Popen[bytes],
    follower: _Follower,
    deadline: float,
    task_seconds: float,
    stop: threading.Event | None,
) -> str | None:
    """Wait until the process ends by itself. Returns _TIME if the deadline came first, or that a task took too long."""
    while process.poll() is None:
        time.sleep(_POLL_S)
        follower.read()
        now = time.monotonic()
        limit = task_seconds if follower.named is not None else max(task_seconds, _START_S)
        if now - follower.since > limit:
            return f"no result after {limit:.0f} s; it was ended"
        if now > deadline or (stop is not None and stop.is_set()):
            return _TIME
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and those that it has started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ending(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"


def _blame(follower: _Follower, why: str, last: str) -> bool:
    """Note who was under way; whether it is worth going on with the rest."""
    if follower.running is not None:
        follower.end(follower.running, error=f"{why}\n{last}".strip())
    elif not follower.ended:
        follower.end(BEFORE, error=f"{why}\n{last}".strip())
        return False
    return bool(follower.remaining)


def _last_words(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    return "\n".join(list(_row_said(lines))[-_LAST_LINES:])


def _row_said(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if text := line.rstrip():
            yield "".join(each if each.isprintable() else "?" for each in text)[:300]
