"""Measures a device: streaming reads, matrix products, and the cost of a call.

Streaming reads are timed with what reads fastest here: on a CPU the engine's own linear layer with one token, which
streams weights through all threads as decoding does, or torch's sum, whichever is faster. Products are timed with
torch's and with the engine's own. The best repeat of the best implementation counts as the machine's peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headway.calibration import machine
from headway.calibration.peaks import MachinePeaks, Rate
from headway.calibration.stopwatch import measure_rate, stopwatch_of
from headway.engine.host import total_memory, usable_threads
from headway.kernels import kernels_for
from headway.kernels.weights import Weight

MIB = 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = (*DTYPES, "int8")
_ROW = 4096  # elements in a row of streamed weights
_PASSES = 3

Listener = Callable[[str], None]


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Numbers of the size of weights, of which pairs of half precision are one of float32 too.

    On a GPU they are random: with equal ones fewer wires change, the clock stays higher, and no model is as fast.
    """
    if device == "cpu":
        return torch.full(shape, 0.01, dtype=dtype)
    return torch.randn(shape, dtype=dtype, device=device).mul_(0.01)


class CalibrationError(ValueError):
    """The machine can't be measured as asked; one line says what to change."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    budget_s: float  # the seconds for each implementation and size
    read_sizes: tuple[int, ...]  # bytes, beside one far larger than the cache
    gemm_sizes: tuple[int, ...]  # sides of square matrices


EFFORTS = {
    ("cpu", True): Effort(0.12, tuple(n * MIB for n in (4, 16, 32, 64, 256)), (512, 1024, 2048)),
    ("cpu", False): Effort(0.6, tuple(2**n * MIB for n in range(10)), (256, 512, 1024, 1536, 2048, 3072)),
    ("cuda", True): Effort(0.1, (16 * MIB, 64 * MIB, 256 * MIB), (2048, 4096, 8192)),
    ("cuda", False): Effort(0.5, tuple(2**n * MIB for n in range(2, 12)), (1024, 2048, 4096, 8192, 16384)),
}


def measure(
    device: str = "auto",
    threads: int | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    quick: bool = True,
    on_stage: Listener = lambda stage: None,
) -> MachinePeaks:
    """Measure a device. It wants the machine to itself: torch's number of threads is set for the whole process.

    Args:
        device: auto, cpu or cuda.
        threads: threads of a CPU; None takes as many as the engine would.
        quick: some seconds; otherwise more sizes and repeats, about a minute.
        on_stage: hears what is measured next.

    Raises:
        CalibrationError: no such device, dtype or number of threads.
    """
    kind = device_kind(device)
    unknown = [name for name in dtypes if name not in PRODUCTS]
    if unknown or not dtypes:
        raise CalibrationError(f"dtype is {', '.join(unknown) or 'missing'}; choose of {', '.join(PRODUCTS)}")
    if threads is not None and threads < 1:
        raise CalibrationError(f"threads is {threads}; it must be at least 1")
    if kind == "cpu":
        torch.set_num_threads(threads or usable_threads())
    with torch.inference_mode():
        return _Bench(kind, EFFORTS[kind, quick], on_stage).run(dtypes)


def device_kind(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        raise CalibrationError(f"device is {name!r}; it must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise CalibrationError("device is cuda, but torch finds no CUDA device; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


class _Bench:
    def __init__(self, kind: str, effort: Effort, on_stage: Listener) -> None:
        self._kind = kind
        self._effort = effort
        self._on_stage = on_stage
        self._stopwatch = stopwatch_of(kind)

    def run(self, dtypes: Sequence[str]) -> MachinePeaks:
        began, others = time.perf_counter(), machine.others_cpu_seconds()
        cuda = torch.cuda.get_device_properties(0) if self._kind == "cuda" else None
        memory = cuda.total_memory if cuda else total_memory()
        cache = int(getattr(cuda, "L2_cache_size", 0)) if cuda else machine.largest_cache_bytes()
        peaks = MachinePeaks(
            device=self._kind,
            name=cuda.name if cuda else machine.processor_name(),
            threads=0 if cuda else torch.get_num_threads(),
            memory_bytes=memory,
            cache_bytes=cache,
            read_bytes_per_s=tuple(self._reads(self._read_sizes(cache, memory))),
            gemm_flops_per_s={name: self._gemm(name) for name in dtypes},
            small_op_s=self._small_op(),
            kernel_call_s=self._kernel_call(),
            seconds=time.perf_counter() - began,
        )
        now = machine.others_cpu_seconds()
        if others is None or now is None:
            return peaks
        return replace(peaks, others_cores=max(0.0, now - others) / peaks.seconds)

    def _read_sizes(self, cache: int, memory: int) -> list[int]:
        """Ending with one eight times the cache, 1 GiB at least, as far as an eighth of the memory allows.

        A part of what is read again is still in a cache up to far beyond its size, and a virtual machine may not say
        how large the caches are.
        """
        largest = min(max(1024 * MIB, 8 * cache, *self._effort.read_sizes), memory // 8)
        return [*(size for size in self._effort.read_sizes if size < largest), largest]

    def _reads(self, sizes: Sequence[int]) -> Iterator[Rate]:
        """The best of some passes over all sizes, as memory is fast one second and slow the next where it is shared.

        A part is read no slower than the whole: where it seemed so, the whole's rate counts for it too.
        """
        rows = [max(8, size // (2 * _ROW)) for size in sizes]
        weight = torch.full((rows[-1], _ROW), 0.01, dtype=torch.bfloat16, device=self._kind)
        found: dict[int, Rate] = {}
        for _ in range(_PASSES):
            for count in rows:
                self._on_stage(f"reads of {count * _ROW * 2 / MIB:,.0f} MiB")
                rate = self._read(weight[:count])
                found[count] = max(rate, found.get(count, rate), key=lambda each: each.best)
        for place, count in enumerate(rows):
            most = max(found[each].best for each in rows[place:])
            yield replace(found[count], best=most)

    def _read(self, weight: Tensor) -> Rate:
        size = weight.numel() * 2
        calls: dict[str, Callable[[], object]] = {
            "torch": weight.view(torch.float32).sum,
            "headway": self._streaming(weight),
        }
        return self._best(size, size, calls, self._effort.budget_s / _PASSES)

    def _streaming(self, weight: Tensor) -> Callable[[], object]:
        linear = kernels_for(self._kind, weight.dtype).linear(Weight(weight), None)
        token = torch.full((1, weight.shape[1]), 0.01, dtype=weight.dtype, device=self._kind)
        return lambda: linear(token)

    def _gemm(self, name: str) -> Rate:
        """The best over sizes and implementations: small matrices stay in caches, large ones amortise their start."""
        self._on_stage(f"products in {name}")
        rates = []
        for side in self._effort.gemm_sizes:
            calls = self._int8_products(side) if name == "int8" else self._products(side, DTYPES[name])
            rates.append(self._best(2 * side**3, side, calls))
        return max(rates, key=lambda rate: rate.best)

    def _products(self, side: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
        left, right = (filled((side, side), dtype, self._kind) for _ in range(2))
        linear = kernels_for(self._kind, dtype).linear(Weight(right), None)
        return {"torch": partial(torch.mm, left, right), "headway": partial(linear, left)}

    def _int8_products(self, side: int) -> dict[str, Callable[[], object]]:
        """The engine's own, which rounds what comes in, and torch's where it has one."""
        calls: dict[str, Callable[[], object]] = {}
        if self._kind == "cpu":
            left, right = (torch.full((side, side), 0.01, dtype=torch.bfloat16) for _ in range(2))
            calls["headway"] = partial(kernels_for("cpu", left.dtype).linear(Weight(right, "int8"), None), left)
        whole = torch.ones((side, side), dtype=torch.int8, device=self._kind)
        with suppress(RuntimeError):
            torch._int_mm(whole, whole)
            calls["torch"] = partial(torch._int_mm, whole, whole)
        if not calls:
            raise CalibrationError(f"this {self._kind} has no products in int8; leave that dtype out")
        return calls

    def _best(
        self, amount: float, size: int, calls: dict[str, Callable[[], object]], budget_s: float | None = None
    ) -> Rate:
        budget_s = self._effort.budget_s if budget_s is None else budget_s
        rates = [measure_rate(amount, call, self._stopwatch, budget_s, by, size) for by, call in calls.items()]
        return max(rates, key=lambda rate: rate.best)

    def _small_op(self) -> float:
        self._on_stage("small operations")
        x = torch.ones(16, device=self._kind)
        return 1.0 / self._best(1.0, 1, {"torch": lambda: torch.add(x, x, out=x)}).median

    def _kernel_call(self) -> float:
        weight = torch.ones(16, 64, dtype=torch.float32, device=self._kind)
        linear = kernels_for(self._kind, weight.dtype).linear(Weight(weight), None)
        token = torch.ones(1, 64, device=self._kind)
        return 1.0 / self._best(1.0, 1, {"headway": lambda: linear(token)}).median
