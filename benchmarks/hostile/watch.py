"""What others notice of a server meanwhile: its /health, a stream, its memory. A process of its own, with a clock that
all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import environment

_HEALTH_EVERY_S = 0.02
_MEMORY_EVERY_S = 0.02
_LONGEST_S = 10.0
_LEAST_GAP_S = 0.002  # shorter ones are not told
MOST_MB = 6000.0  # a server that takes more is killed, so that its machine goes on


@dataclass
class Seen:
    """What was seen between two times: the longest waits that overlap them, and the largest memory."""

    health_ms: float
    gap_ms: float
    memory_mb: float
    broken: int


class Watch:
    """Watches the server on a port until it is closed.

    Args:
        pid: of the server; its children count too.
    """

    def __init__(self, port: int, pid: int) -> None:
        self._pid = pid
        self._notes: dict[str, list[tuple[float, float]]] = {"health": [], "gap": [], "memory": [], "broken": []}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hostile.watch", str(port), str(pid)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, at, value = line.split()
            self._notes[kind].append((float(at), float(value)))

    def memory_mb(self) -> float:
        return memory_mb(self._pid)

    def engine(self) -> int:
        """The pid of the engine process."""
        command = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in family(self._pid)]
        return next(pid for pid, line in command if b"headway.engine\0" in line)

    def between(self, began: float, ended: float) -> Seen:
        """What was seen from `began` to `ended` (time.monotonic()).

        Waits until what was under way at the end is over: a /health, a gap of the stream.
        """
        until = time.monotonic() + _LONGEST_S
        while time.monotonic() < until and self._process.poll() is None:
            if all(self._notes[kind] and self._notes[kind][-1][0] > ended for kind in ("health", "gap", "memory")):
                break
            time.sleep(0.01)

        def longest(kind: str) -> float:
            notes = [(at, value) for at, value in list(self._notes[kind]) if at >= began]
            over = [value for at, value in notes if at - value <= ended]
            return max(over or [value for _, value in notes[:1]], default=_LONGEST_S) * 1000

        memory = [value for at, value in list(self._notes["memory"]) if began <= at <= ended]
        broken = sum(began <= at <= ended for at, _ in list(self._notes["broken"]))
        return Seen(longest("health"), longest("gap"), max(memory, default=0.0), broken)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, at = [pid], 0
    while at < len(found):
        for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:  # it has just ended
                continue
        at += 1
    return found


def memory_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, in millions of bytes; shared pages count in each."""
    total = 0
    for each in family(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total / 1e6


# --- the watching process -----------------------------------------------------------------------------------


def _note(kind: str, value: float) -> None:
    sys.stdout.write(f"{kind} {time.monotonic():.6f} {value:.6f}\n")
    sys.stdout.flush()


def _watch_health(address: tuple[str, int]) -> None:
    while True:
        began = time.monotonic()
        try:
            with socket.create_connection(address, timeout=_LONGEST_S) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                is_ready = connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            is_ready = False
        _note("health", time.monotonic() - began)
        if not is_ready:
            _note("broken", 0)
        time.sleep(_HEALTH_EVERY_S)


def _watch_stream(address: tuple[str, int]) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
    asked = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    message = asked + b"Content-Length: %d\r\n\r\n" % len(body) + body
    while True:
        is_whole = False
        try:
            with socket.create_connection(address, timeout=_LONGEST_S) as connection:
                connection.sendall(message)
                answer = connection.recv(65536)
                # One that is refused is told by its status; one that waits is no running stream.
                last, quiet_from, end = time.monotonic(), time.monotonic(), answer
                while data := connection.recv(65536):
                    now = time.monotonic()
                    if now - last > _LEAST_GAP_S or now - quiet_from > 0.05:
                        _note("gap", now - last)
                        quiet_from = now
                    last, end = now, (end + data)[-64:]
                is_whole = b"[DONE]" in end or answer.startswith(b"HTTP/1.1 429")
        except OSError:
            pass
        if not is_whole:
            _note("broken", 0)
            time.sleep(0.05)


def _watch_memory(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        if (taken := memory_mb(pid)) > MOST_MB:
            for each in family(pid):
                os.kill(each, 9)
        _note("memory", taken)
        time.sleep(_MEMORY_EVERY_S)


def main() -> None:
    port, pid = map(int, sys.argv[1:])
    sys.setswitchinterval(0.0005)
    for watch, argument in ((_watch_health, ("127.0.0.1", port)), (_watch_stream, ("127.0.0.1", port))):
        threading.Thread(target=watch, args=(argument,), daemon=True).start()
    _watch_memory(pid)


if __name__ == "__main__":
    main()
