"""How long calls take, and from that a rate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from headway.calibration.peaks import Rate

MIN_REPEATS = 5
MOST_REPEATS = 50
MOST_CAPTURED = 64  # calls in a CUDA graph
SAMPLE_S = 2e-3  # a repeat lasts at least about this long, so that starting the clock does not count


class Stopwatch(Protocol):
    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """Run `call` so often, one after the other, and return how long all of them took."""
        ...


class HostStopwatch:
    """Times calls that have done their work when they return."""

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """See Stopwatch."""
        began = time.perf_counter()
        _repeat(call, calls)
        return time.perf_counter() - began


class CudaStopwatch:
    """Times calls that only put work on the current CUDA stream, by the GPU's own clock."""

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """See Stopwatch."""
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began.record()
        _repeat(call, calls)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


class GraphStopwatch:
    """Times the kernels that calls launch, captured as a CUDA graph, as those of served decodes are.

    Launched one by one, a small kernel waits for the host, which takes far longer to launch it than the GPU to run it.
    Calls must launch the same each time.
    """

    def __init__(self) -> None:
        self._stopwatch = CudaStopwatch()
        self._taken: tuple[Callable[[], object], int] | None = None
        self._launch: Callable[[], object] = lambda: None

    def seconds(self, call: Callable[[], object], calls: int) -> float:
        """See Stopwatch. Graphs have several calls, so a few more may be made than asked for."""
        captured = min(calls, MOST_CAPTURED)
        self._take(call, captured)
        launches = math.ceil(calls / captured)
        return self._stopwatch.seconds(self._launch, launches) * calls / (launches * captured)

    def _take(self, call: Callable[[], object], calls: int) -> None:
        """Make a graph of so many calls, unless it is there. The first launch of a graph takes longer than others."""
        from headway.kernels.cuda.graphs import GraphMemory

        if self._taken == (call, calls):
            return
        self._launch = call  # frees the last graph and its memory
        call()  # compiles kernels, which cannot be captured
        self._launch, _ = GraphMemory()(lambda: _repeat(call, calls))
        self._taken = call, calls
        self._launch()


def _repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def stopwatch_of(device: str) -> Stopwatch:
    """The stopwatch of a device, "cpu" or "cuda"."""
    return GraphStopwatch() if device == "cuda" else HostStopwatch()


def measure_rate(
    amount: float, call: Callable[[], object], stopwatch: Stopwatch, budget_s: float, by: str, size: int
) -> Rate:
    """Repeat a call that does `amount` of something for about `budget_s` seconds, at least five times.

    The first calls are not counted: they bring memory and code into place.
    """
    once = max(stopwatch.seconds(call, 1), 1e-9)
    once = min(once, max(stopwatch.seconds(call, 1), 1e-9))
    calls = max(1, math.ceil(SAMPLE_S / once))
    repeats = min(MOST_REPEATS, max(MIN_REPEATS, int(budget_s / (once * calls))))
    rates = [amount * calls / max(stopwatch.seconds(call, calls), 1e-9) for _ in range(repeats)]
    return Rate(max(rates), statistics.median(rates), repeats, by, size)
