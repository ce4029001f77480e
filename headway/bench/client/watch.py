"""Whether the client kept up: its event loop, its sockets and its processor, watched during a run.

What the client does late it reads as the server's latency. Three delays are told apart:

* a request started late: its latency from the schedule holds the client's delay;
* the event loop ran late: tokens get the time when the client came to read them, not when they arrived;
* bytes waited unread: the same, seen from the sockets.

A run is client-bound when one of these is large enough, for long enough, to change what would be reported:

* The limit of a delay is 10 ms at its 99th percentile: a P99 latency can then be wrong by that much, and 10 ms is a
  fifth of the usual objective of 50 ms per token. Where the server is fast, it is half of the median latency that the
  delay adds to, but never less than 2 ms: that much the operating system's scheduler takes on an idle machine.
* The event loop is sampled evenly in time, a stall counting once for each sample that it swallowed: its 99th
  percentile is over the limit when more than 1 % of the run was. So one short stall in a long run does not mark it.
* 128 KiB unread are about 10 ms of work: streams with a token per chunk are read at 16 MB/s of a core.
* A core is nearly full at a share of 0.9: work then queues for about ten times as long as it takes (1 / (1 - share)).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import statistics
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from headway.bench.client.alarm import Alarm
from headway.bench.record import ClientHealth, RequestRecord

MAX_DELAY_MS = 10.0
MIN_DELAY_MS = 2.0
DELAY_PER_LATENCY = 0.5
FEWEST_DELAYED = 3  # of fewer no 99th percentile can be made
MAX_CPU_SHARE = 0.9
MAX_UNREAD_BYTES = 128 * 1024
MAX_UNREAD_TIME = 0.05
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
        self.unread_samples = 0
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
        """What was seen while it was entered, judged against the latencies of the run.

        Args:
            records: of the run.
            start_lag_ms: for each request, how long after it could start it was sent.
        """
        seconds = max((self._ended_ns - self._began_ns) / 1e9, 1e-9)
        health = ClientHealth(
            loop_lag_ms=[lag / 1e6 for lag in self.lag_ns],
            backlog_bytes=self.backlog_bytes,
            start_lag_ms=start_lag_ms,
            cpu_share=self._cpu_s / seconds,
            sample_interval_s=self._interval_ns / 1e9,
        )
        waited_share = self._waited_ns / 1e9 / seconds
        seldom = self.unread_samples < FEWEST_DELAYED
        unread_share = 0.0 if seldom else self.unread_samples / len(self.backlog_bytes)
        health.reasons = reasons(health, records, waited_share, unread_share)
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
        self.unread_samples += self.backlog_bytes[-1] > MAX_UNREAD_BYTES


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


def reasons(
    health: ClientHealth, records: Sequence[RequestRecord], waited_share: float, unread_share: float
) -> list[str]:
    """Why the run is client-bound, a sentence each; none when it is not.

    Args:
        health: with everything but its reasons.
        records: of the run; only those that were answered count.
        waited_share: part of the run in which the client was ready and had no core.
        unread_share: part of the samples in which the sockets held more than MAX_UNREAD_BYTES.
    """
    first_ms, token_ms = _median_latencies(records)
    found = []
    late = health.start_lag_ms
    if (limit := _limit_ms(first_ms)) < p99(late) and _count_over(late, limit) >= FEWEST_DELAYED:
        found.append(
            f"requests were sent late, by {p99(late):.1f} ms at P99 (limit {limit:.1f} ms): latencies from the "
            f"schedule may be overstated by as much"
        )
    late = health.loop_lag_ms
    if (limit := _limit_ms(min(first_ms, token_ms))) < p99(late) and _count_over(late, limit) >= FEWEST_DELAYED:
        found.append(
            f"the client's event loop ran late, by {p99(late):.1f} ms at P99 (limit {limit:.1f} ms, exceeded in "
            f"{100 * _count_over(late, limit) / len(late):.1f} % of the time): latencies may be overstated by as much"
        )
    if unread_share > MAX_UNREAD_TIME:
        found.append(
            f"more than {MAX_UNREAD_BYTES // 1024} KiB of answers waited unread in the client's sockets in "
            f"{100 * unread_share:.0f} % of the time (limit {100 * MAX_UNREAD_TIME:.0f} %)"
        )
    if health.cpu_share > MAX_CPU_SHARE:
        found.append(
            f"the client used {health.cpu_share:.2f} of a core (limit {MAX_CPU_SHARE}): use fewer streams, or "
            f"several clients"
        )
    elif found and waited_share > 0.01:
        found.append(
            f"the client had no core in {100 * waited_share:.0f} % of the time, though it used only "
            f"{health.cpu_share:.2f} of one: other processes, perhaps the server, held it up"
        )
    return found


def p99(values: Sequence[float]) -> float:
    """The 99th percentile by nearest rank; 0 of nothing."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)] if values else 0.0


def _count_over(values: Sequence[float], limit: float) -> int:
    return sum(value > limit for value in values)


def _limit_ms(median_latency_ms: float) -> float:
    return min(MAX_DELAY_MS, max(MIN_DELAY_MS, DELAY_PER_LATENCY * median_latency_ms))


def _median_latencies(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """(TTFT from the send, mean gap between tokens of a request), medians in ms; infinite where there are none."""
    answered = [record for record in records if record.ok]
    first = [(record.first_token_ns - record.sent_ns) / 1e6 for record in answered]
    gaps = [
        (record.last_token_ns - record.first_token_ns) / 1e6 / (len(record.chunk_ns) - 1)
        for record in answered
        if len(record.chunk_ns) > 1
    ]
    return (statistics.median(first) if first else float("inf"), statistics.median(gaps) if gaps else float("inf"))
