"""A run while it goes: a live view in a terminal, a line now and then elsewhere.

    with LiveView(console, total=len(requests)) as view:
        outcome = await run_load(..., listener=view)

The load generator's own event loop draws it, so a frame must be cheap: it is one text of a few lines, made twice a
second from counters that are kept up as requests end. That takes about half a millisecond, 0.1 % of a core.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from headway.bench.client.dispatch import LoadListener, LoadStage
from headway.load.record import RequestRecord
from headway.report.style import number, plain

FRAME_S = 0.5
LINE_S = 10.0
RATE_OVER_S = 5.0
RESERVOIR = 2000
ENOUGH_FOR_P99 = 100
LATE_MS = 10.0  # lag of the client from which on it is shown as a warning
STAGES = {
    LoadStage.WARM_UP: "warming up",
    LoadStage.LOAD: "measuring",
    LoadStage.DRAIN: "waiting for the last answers",
    LoadStage.DONE: "done",
}
NS_PER_MS = 1e6


class Reservoir:
    """A uniform sample of bounded size of all values so far (Vitter, algorithm R, 1985)."""

    def __init__(self, size: int = RESERVOIR) -> None:
        self.count = 0
        self.values: list[float] = []
        self._size = size
        self._random = random.Random(0)

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (place := int(self._random.random() * self.count)) < self._size:
            self.values[place] = value

    def quantiles(self, *shares: float) -> list[float | None]:
        """Quantiles without interpolation. One is None without a value, and for a P99 of too few values."""
        ordered = sorted(self.values)
        known = [bool(ordered) and not (share >= 0.99 and self.count < ENOUGH_FOR_P99) for share in shares]
        return [
            ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ok else None
            for share, ok in zip(shares, known, strict=True)
        ]


class LiveView(LoadListener):
    """Shows the progress of a run on a console.

    Args:
        console: where to draw; standard error is the place for it. Where it is no terminal, a line every 10 s.
        total: requests of the run, without warm-ups.
        label: which run it is, where there are several.
        expected_s: how long the schedule takes, where that is known; it gives the time left.
        generates: answers have tokens; those with vectors or scores are timed to their end only.
    """

    def __init__(
        self, console: Console, total: int, label: str = "", expected_s: float | None = None, generates: bool = True
    ) -> None:
        self.total = total
        self._generates = generates
        self.sent = self.done = self.tokens = 0
        self.failures: Counter[str] = Counter()
        self.ttft_ms, self.tpot_ms, self.e2el_ms, self.start_lag_ms = (Reservoir() for _ in range(4))
        self.loop_lag_ms = 0.0  # the worst since the last frame but one
        self._console = console
        self._label = plain(label)
        self._expected_s = expected_s
        self._stage = "starting"
        self._began_ns = time.monotonic_ns()
        self._in_flight: dict[int, RequestRecord] = {}
        self._first_seen: set[int] = set()
        self._waiting = 0
        self._past: deque[tuple[int, int, int]] = deque()  # time, done, tokens
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._line_due_ns = 0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._line_due_ns = time.monotonic_ns() + round(LINE_S * 1e9)
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._console.print(self.line(), highlight=False, soft_wrap=True)

    def stage(self, stage: LoadStage) -> None:
        self._stage = STAGES[stage]
        if self._timer is None and stage is not LoadStage.DONE:
            self._set_timer()
        self.refresh()

    def began(self, at_ns: int) -> None:
        self._began_ns = at_ns

    def started(self, record: RequestRecord) -> None:
        self.sent += 1
        self._in_flight[record.index] = record

    def waiting(self, count: int) -> None:
        self._waiting = count

    def ended(self, record: RequestRecord) -> None:
        self.done += 1
        self._in_flight.pop(record.index, None)
        self._note_first_token(record)
        self._first_seen.discard(record.index)
        self.tokens += len(record.chunk_ns) if record.output_tokens is None else record.output_tokens
        if record.sent_ns:
            self.start_lag_ms.add((record.sent_ns - record.scheduled_ns) / NS_PER_MS)
        if record.failure is not None and record.failed:
            self.failures[str(record.failure.kind)] += 1
        elif record.ok:
            self.e2el_ms.add((record.chunk_ns[-1] - record.scheduled_ns) / NS_PER_MS)
            if record.tokens > 1 and record.last_token_ns > record.first_token_ns:
                self.tpot_ms.add((record.last_token_ns - record.first_token_ns) / NS_PER_MS / (record.tokens - 1))

    def _note_first_token(self, record: RequestRecord) -> None:
        if record.chunk_ns and not record.is_vector and record.index not in self._first_seen:
            self._first_seen.add(record.index)
            self.ttft_ms.add((record.chunk_ns[0] - record.scheduled_ns) / NS_PER_MS)

    def _set_timer(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # told of the stage from outside of a loop: nobody to draw later
            return
        self._due_s = loop.time() + FRAME_S
        self._timer = loop.call_at(self._due_s, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop_lag_ms = max(0.6 * self.loop_lag_ms, (loop.time() - self._due_s) * 1e3)
        self.refresh()
        self._set_timer()

    def refresh(self) -> None:
        """Draw now."""
        for record in self._in_flight.values():
            self._note_first_token(record)
        now = time.monotonic_ns()
        self._past.append((now, self.done, self._tokens_so_far()))
        while len(self._past) > 2 and self._past[0][0] < now - RATE_OVER_S * 1e9:
            self._past.popleft()
        if self._live is not None:
            self._live.update(self.frame(now), refresh=True)
        elif now >= self._line_due_ns:
            self._line_due_ns = now + round(LINE_S * 1e9)
            self._console.print(self.line(now), highlight=False, soft_wrap=True)

    def _tokens_so_far(self) -> int:
        return self.tokens + sum(len(record.chunk_ns) for record in self._in_flight.values())

    def rates(self) -> tuple[float, float]:
        """Answered requests and output tokens per second, over the last few seconds."""
        if len(self._past) < 2:
            return 0.0, 0.0
        (then, done, tokens), (now, done_now, tokens_now) = self._past[0], self._past[-1]
        seconds = max((now - then) / 1e9, 1e-9)
        return (done_now - done) / seconds, max(tokens_now - tokens, 0) / seconds

    def line(self, now_ns: int | None = None) -> str:
        """The state in one line."""
        failures = f", not answered: {_counts(self.failures)}" if self.failures else ""
        waiting = f", {self._waiting} waiting for a place" if self._waiting else ""
        label = f"{self._label}: " if self._label else ""
        said = f"{label}{self._stage}, {_clock(self._elapsed_s(now_ns))}: {self.done}/{self.total} done{failures}"
        if self._stage == STAGES[LoadStage.DONE]:
            return said  # the figures of the last seconds would be taken for the run's
        requests_per_s, tokens_per_s = self.rates()
        said += f", {len(self._in_flight)} in flight{waiting}, {number(requests_per_s)} requests/s"
        if not self._generates:
            e2e = _milliseconds(self.e2el_ms.quantiles(0.5, 0.99))
            return f"{said}, end to end P50 {e2e[0]} P99 {e2e[1]} ms"
        ttft = _milliseconds(self.ttft_ms.quantiles(0.5, 0.99))
        return f"{said}, {number(tokens_per_s)} tokens/s, TTFT P50 {ttft[0]} P99 {ttft[1]} ms"

    def frame(self, now_ns: int | None = None) -> Text:
        """The state as a few lines of a terminal."""
        frame = Text(no_wrap=True, overflow="ellipsis")
        self._head(frame, self._elapsed_s(now_ns))
        requests_per_s, tokens_per_s = self.rates()
        frame.append(f"\n  sent {self.sent:,}   done {self.done:,} of {self.total:,}   ")
        frame.append(f"in flight {len(self._in_flight):,}", style="cyan")
        if self._waiting:
            frame.append(f"   waiting for a place {self._waiting:,}", style="yellow")
        tokens = f"   {number(tokens_per_s)} output tokens/s" * self._generates
        frame.append(f"\n  now {number(requests_per_s)} requests/s{tokens}")
        if self.failures:
            frame.append(f"\n  not answered: {_counts(self.failures)}", style="bold red")
        frame.append("\n\n  so far, from the schedule       P50       P90       P99\n", style="dim")
        named = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("end to end", self.e2el_ms))
        for name, sample in named if self._generates else named[-1:]:
            values = "".join(f"{text:>10}" for text in _milliseconds(sample.quantiles(0.5, 0.9, 0.99)))
            frame.append(f"  {name:<23} ms{values}\n")
        lag = self.start_lag_ms.quantiles(0.99)[0]
        late = self.loop_lag_ms > LATE_MS or (lag or 0.0) > LATE_MS
        frame.append(
            f"  this client: sends late by P99 {_milliseconds([lag])[0]} ms, event loop by {self.loop_lag_ms:.1f} ms",
            style="bold yellow" if late else "dim",
        )
        return frame

    def _head(self, frame: Text, elapsed_s: float) -> None:
        share = min(self.done / self.total, 1.0) if self.total else 0.0
        full = round(share * 30)
        frame.append(f"{self._label}  " if self._label else "", style="bold")
        frame.append("━" * full, style="bold green")
        frame.append("━" * (30 - full), style="dim")
        frame.append(f" {100 * share:3.0f} %  ", style="bold")
        frame.append(self._stage, style="bold magenta")
        frame.append(f"  {_clock(elapsed_s)}")
        left = self._left_s(elapsed_s)
        if left is not None:
            frame.append(f", about {_clock(left)} left", style="dim")

    def _elapsed_s(self, now_ns: int | None) -> float:
        return max(((now_ns or time.monotonic_ns()) - self._began_ns) / 1e9, 0.0)

    def _left_s(self, elapsed_s: float) -> float | None:
        if self._expected_s is not None and elapsed_s < self._expected_s:
            return self._expected_s - elapsed_s
        if not self.done or self.done >= self.total or elapsed_s < 1.0:
            return None
        return elapsed_s / self.done * (self.total - self.done)


def _counts(failures: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.most_common())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _milliseconds(values: list[float | None]) -> list[str]:
    return ["–" if value is None else number(value) for value in values]
