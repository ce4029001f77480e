"""`headway calibrate`: the machine's peaks, then pieces of a step in rounds, then what the cost model makes of them.

The pieces take turns, a run of each in every round, and the median of all rounds counts: a machine that is slow for
some seconds is slow for one run of everything, and not for all runs of something.
"""

from __future__ import annotations

import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import numba
import torch

from headway import __version__
from headway.calibration import machine
from headway.calibration.cases import FORMATS, Case, Pool, attention_case, element_case, linear_cases, stream_case
from headway.calibration.describe import hardware_of
from headway.calibration.efforts import EFFORTS, Effort
from headway.calibration.fit import errors, fit, residuals
from headway.calibration.host import HostBench, tiny_shape
from headway.calibration.measure import DTYPES, MIB, device_kind, measure
from headway.calibration.peaks import BUSY_CORES, MachinePeaks
from headway.calibration.samples import Kind, Sample, Timings
from headway.calibration.stopwatch import stopwatch_of
from headway.calibration.store import CalibratedMachine, check_name
from headway.cost.hardware import Hardware

# A function that is called with what is happening, and the share of all work that is done, 0 to 1.
Listener = Callable[[str, float], None]

LEAST_S = 5e-3  # a run is so long that the engine's threads, asleep before it, are awake for most of it, as in a step
# Bytes that are read before a tiny model's step: as many as weights of a small model, whose host counts most. Near
# caches hold fewer.
READ_BETWEEN = 32 * MIB
QUANTISED_STRIDE = 2  # every second number of tokens is measured with quantised weights, to save time
MOST_SCATTER = 0.25  # half of the rounds of half of the pieces so far above the best: the machine is busy


def calibrate(
    name: str | None = None,
    device: str = "auto",
    threads: int | None = None,
    effort: str = "default",
    on_progress: Listener = lambda stage, done: None,
    amount: Effort | None = None,
) -> CalibratedMachine:
    """Measure this machine and this engine on it. It wants the machine to itself.

    Args:
        name: the name of the entry; None makes one from the processor's or GPU's name.
        device: auto, cpu or cuda.
        threads: threads of a CPU; None takes one for each core that this process may use.
        effort: quick (some seconds, and coarse), default (about a minute) or full (some minutes).
        amount: what to measure, in place of what the effort names.

    Raises:
        CalibrationError, StoreError: it cannot be measured as asked, or the name cannot be one.
    """
    if name is not None:
        check_name(name)
    kind = device_kind(device)
    amount = amount or EFFORTS[kind, effort]
    began, others = time.perf_counter(), machine.others_cpu_seconds()
    peaks = _peaks(kind, threads, effort, amount.peaks_share, on_progress)
    hardware = hardware_of(name, peaks)
    with torch.inference_mode(), _no_garbage_collection():
        timings = _rounds(hardware, peaks, amount, threads, on_progress)
    samples = tuple(each.sample() for each in timings)
    on_progress("putting it together", 1.0)
    # The pieces of a CPU are repeated, with nothing between their kernels.
    gap_s = peaks.kernel_call_s if kind == "cuda" else 0.0
    efficiency = fit(hardware, samples, gap_s, tiny_shape)
    seconds, now = time.perf_counter() - began, machine.others_cpu_seconds()
    if others is not None and now is not None:
        peaks = replace(peaks, others_cores=max(0.0, now - others) / seconds)
    return CalibratedMachine(
        hardware=hardware,
        efficiency=efficiency,
        threads=peaks.threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={
            "headway": __version__,
            "torch": str(torch.__version__),
            "numba": numba.__version__,
            "python": platform.python_version(),
        },
        rounds=amount.rounds,
        seconds=seconds,
        peaks=peaks,
        samples=samples,
        fit_error=errors(hardware, efficiency, samples, gap_s, tiny_shape),
        residuals=residuals(hardware, efficiency, samples, gap_s, tiny_shape),
        busy=_busy(peaks, samples),
    )


def _peaks(kind: str, threads: int | None, effort: str, share: float, on_progress: Listener) -> MachinePeaks:
    stages = 0

    def say(stage: str) -> None:
        nonlocal stages
        stages += 1
        on_progress(stage, share * (1 - 0.85**stages))

    dtypes = ["float32", "bfloat16", "float16"] if kind == "cuda" else ["float32", "bfloat16"]
    return measure(kind, threads, dtypes, effort != "full", say)


def _rounds(
    hardware: Hardware, peaks: MachinePeaks, effort: Effort, threads: int | None, on_progress: Listener
) -> list[Timings]:
    """A run of every piece in every round, after one that does not count."""
    on_progress("making pieces ready", effort.peaks_share)
    cases = list(_cases(hardware, peaks, effort))
    between = [stream_case(Pool(READ_BETWEEN, "cpu"), torch.bfloat16).call] if peaks.device == "cpu" else []
    benches = [HostBench(layers, peaks.device, threads, effort.steps, *between) for layers in effort.depths]
    stopwatch = stopwatch_of(peaks.device)
    timings = [Timings(case.piece) for case in cases]
    calls = [1] * len(cases)
    steps = [(bench, batch, Timings(bench.piece(batch))) for bench in benches for batch in effort.batches]
    share, whole = 0.0, (1.0 - effort.peaks_share) / (effort.rounds + 1)
    for number in range(effort.rounds + 1):
        label = f"round {number} of {effort.rounds}" if number else "warming up"
        for index, (case, timing) in enumerate(zip(cases, timings, strict=True)):
            share = effort.peaks_share + (number + index / len(cases)) * whole
            on_progress(f"{label}: {case.piece.kind}", share)
            seconds = stopwatch.seconds(case.call, calls[index]) / calls[index]
            if number:
                timing.seconds.append(seconds / case.runs)
            else:
                calls[index] = max(1, math.ceil(LEAST_S / seconds))
        on_progress(f"{label}: {Kind.STEP}", share)
        for bench, batch, timing in steps:
            seconds = statistics.median(bench.seconds(batch))
            if number:
                timing.seconds.append(seconds)
    return timings + [timing for _, _, timing in steps]


def _cases(hardware: Hardware, peaks: MachinePeaks, effort: Effort) -> Iterator[Case]:
    pool = Pool(min(max(effort.pool, peaks.memory_read.size), peaks.memory_bytes // 8), peaks.device)
    dtypes = [DTYPES[name] for name in peaks.gemm_flops_per_s]
    main = torch.bfloat16
    yield stream_case(pool, main)
    for dtype in dtypes:
        most_flops = effort.piece_s * hardware.rate(FORMATS[dtype])
        for shape in effort.layers:
            yield from linear_cases(pool, shape, dtype, effort.tokens, most_flops)
    if peaks.device == "cpu":  # elsewhere the engine quantises nothing
        for quantization in ("int8", "int4"):
            most_flops = effort.piece_s * hardware.rate(quantization)
            few = effort.tokens[::QUANTISED_STRIDE]
            yield from linear_cases(pool, effort.layers[0], main, few, most_flops, quantization)
    for shape in effort.heads:
        for load in effort.loads:
            # Decodes read all that no cache can hold; chunks of prompts take long enough by themselves.
            yield attention_case(pool, shape, main, load, pool.size // 3 if load.tokens == 1 else 0)
    for shape in effort.layers:
        for tokens in effort.element_tokens:
            yield element_case(pool, shape, main, tokens)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from running, as the engine's process keeps it off what it has loaded."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _busy(peaks: MachinePeaks, samples: Sequence[Sample]) -> str | None:
    """Why the figures may be too low; None on a quiet machine."""
    if peaks.others_cores is not None and peaks.others_cores > BUSY_CORES:
        return (
            f"other processes used {peaks.others_cores:.1f} cores while the machine was measured: it may be faster "
            "than measured"
        )
    scatter = statistics.median(each.scatter for each in samples)
    if scatter <= MOST_SCATTER:
        return peaks.busy
    return (
        f"half of the pieces took {1 / (1 - scatter) - 1:.0%} or more longer in half of the rounds than in the best: "
        "other processes use this machine, so it may be faster than measured"
    )
