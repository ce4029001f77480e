"""What the device can do: copies, reads, products of random numbers, small operations, transfers from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.part import Machine, Row, Tasks
from headway.calibration.measure import filled
from headway.calibration.stopwatch import CudaStopwatch, HostStopwatch, Stopwatch, measure_rate

GIB = 2**30
_BUDGET_S = 0.7
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def stopwatch(machine: Machine) -> Stopwatch:
    return CudaStopwatch() if machine.device == "cuda" else HostStopwatch()


def random(machine: Machine, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers of the size of weights."""
    return filled(shape, dtype, machine.device)


def tasks(machine: Machine) -> Tasks:
    """Each gives a row of `name`, `rate` a second and `unit`."""
    found: Tasks = {"copy": partial(_copy, machine), "read": partial(_read, machine)}
    found |= {f"gemm {name}": partial(_products, machine, name) for name in DTYPES}
    found["launch"] = partial(_launches, machine)
    if machine.device == "cuda":
        found["from the host"] = partial(_from_host, machine)
    return found


def _bytes(machine: Machine) -> int:
    """More than any cache holds, and no more than a sixteenth of the memory."""
    if machine.small:
        return 2**20
    return min(4 * GIB, torch.cuda.get_device_properties(0).total_memory // 16)


def _measured(machine: Machine, name: str, amount: float, unit: str, call: Callable[[], object]) -> Row:
    rate = measure_rate(amount, call, stopwatch(machine), 0.01 if machine.small else _BUDGET_S, "torch", int(amount))
    return {"name": name, "rate": rate.best, "median": rate.median, "unit": unit}


@torch.inference_mode()
def _copy(machine: Machine) -> Iterable[Row]:
    """Measure a copy, whose bytes are those read and those written."""
    source = random(machine, _bytes(machine) // 2)
    target = torch.empty_like(source)
    yield _measured(machine, "copy", 2 * source.nbytes, "B/s", lambda: target.copy_(source))


@torch.inference_mode()
def _read(machine: Machine) -> Iterable[Row]:
    source = random(machine, _bytes(machine) // 4, dtype=torch.float32)
    yield _measured(machine, "read", source.nbytes, "B/s", source.sum)


@torch.inference_mode()
def _products(machine: Machine, name: str) -> Iterable[Row]:
    """Measure products of some sizes, and yield the best."""
    sides = (64,) if machine.small else (4096,) if name == "float32" else (4096, 8192, 16384)
    rows = []
    for side in sides:
        left, right = (random(machine, side, side, dtype=DTYPES[name]) for _ in range(2))
        call = partial(torch.mm, left, right)
        rows.append({**_measured(machine, f"gemm {name}", 2.0 * side**3, "FLOP/s", call), "side": side})
    yield max(rows, key=lambda row: row["median"])


@torch.inference_mode()
def _launches(machine: Machine) -> Iterable[Row]:
    """Small operations that are put on the stream one after the other."""
    x = torch.ones(16, device=machine.device)
    yield _measured(machine, "launch", 1.0, "1/s", lambda: torch.add(x, x, out=x))


@torch.inference_mode()
def _from_host(machine: Machine) -> Iterable[Row]:
    for name, pinned in (("from pinned memory", True), ("from pageable memory", False)):
        host = torch.empty(GIB // 2, dtype=torch.uint8, pin_memory=pinned)
        device = torch.empty_like(host, device=machine.device)
        call = partial(device.copy_, host, non_blocking=True)
        yield _measured(machine, name, host.nbytes, "B/s", call)
