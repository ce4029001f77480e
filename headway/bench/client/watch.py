"""Whether the client kept up: its event loop, its sockets and its processor, watched during a run.

`measures.client_effect` says what the delays seen here may have added to each latency. The event loop is sampled evenly
in time, and a stall counts once for each sample that it swallowed: so its 99th percentile is that of the time.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from headway.bench.client.alarm import Alarm
from headway.load.measures.client_effect import reasons
from headway.load.record import ClientHealth, RequestRecord

SOCKETS_PER_SAMPLE = 64
LAGS_PER_SOCKET_SAMPLE = 10  # to ask thousands of connections for their sockets takes a millisecond

OpenSockets = Callable[[], Sequence[int]]


class LoopWatch:
    """Samples the running event loop while it is entered, as a context manager.

    Args:
        sockets: gives the file descriptors of the sockets that answers are expected on; None where they are not known.
        interval_s: between two samples of the loop's lag; the sockets are looked at in every tenth.
    """

    def __init__(self, sockets: OpenSockets | None = None, interval_s: float = 0.01) -> None:
        self.lag_ns: list[int] = []
        self.backlog_bytes: list[int] = []
        self._sockets = sockets
        self._interval_ns = round(interval_s * 1e9)
        self._alarm: Alarm | None = None
        self._due_ns = self._began_ns = self._ended_ns = 0
        self._cpu_s = 0.0
        self._waited_ns = 0
        self._offset = self._rung = 0

    def __enter__(self) -> Self:
        self._alarm = Alarm(self._sample)
        self._cpu_s = -time.process_time()
        self._waited_ns = -waited_for_core_ns()
        self._began_ns = time.monotonic_ns()
        self._due_ns = self._began_ns + self._interval_ns
        self._alarm.set(self._due_ns)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._alarm is not None
        self._ended_ns = time.monotonic_ns()
        self._note_lag(self._ended_ns)
        self._alarm.close()
        self._alarm = None
        self._cpu_s += time.process_time()
        self._waited_ns += waited_for_core_ns()

    def health(self, records: Sequence[RequestRecord], start_lag_ms: list[float]) -> ClientHealth:
        """The health of the client between entry and exit, judged against the latencies of the run.

        Args:
            records: the records of the run.
            start_lag_ms: the time of each request from when it could start until it was sent.
        """
        seconds = max((self._ended_ns - self._began_ns) / 1e9, 1e-9)
        health = ClientHealth(
            loop_lag_ms=[lag / 1e6 for lag in self.lag_ns],
            backlog_bytes=self.backlog_bytes,
            start_lag_ms=start_lag_ms,
            cpu_share=self._cpu_s / seconds,
            sample_interval_s=self._interval_ns / 1e9,
        )
        health.reasons = reasons(health, records, self._waited_ns / 1e9 / seconds)
        return health

    def _sample(self) -> None:
        assert self._alarm is not None
        self._note_lag(time.monotonic_ns())
        self._rung += 1
        if self._sockets is not None and self._rung % LAGS_PER_SOCKET_SAMPLE == 0:
            self._note_unread(self._sockets())
        self._alarm.set(self._due_ns)

    def _note_lag(self, now_ns: int) -> None:
        """One sample for each moment that has passed: something due in the middle of a stall waited for its rest."""
        while self._due_ns <= now_ns:
            self.lag_ns.append(now_ns - self._due_ns)
            self._due_ns += self._interval_ns

    def _note_unread(self, sockets: Sequence[int]) -> None:
        """Unread bytes of a bounded number of sockets, in turn, scaled up to all of them."""
        everyone = list(sockets)
        count = min(len(everyone), SOCKETS_PER_SAMPLE)
        self._offset = (self._offset + count) % max(1, len(everyone))
        unread = sum(_unread_bytes((everyone + everyone)[self._offset : self._offset + count]))
        self.backlog_bytes.append(round(unread * len(everyone) / max(1, count)))


def _unread_bytes(sockets: Sequence[int]) -> Iterator[int]:
    buffer = array.array("i", [0])
    for each in sockets:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            fcntl.ioctl(each, termios.FIONREAD, buffer)
            yield buffer[0]


def waited_for_core_ns() -> int:
    """How long this thread was ready to run and had no core (Linux's schedstat); 0 where nobody says."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
