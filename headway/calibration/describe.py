"""A measured device as the cost model's hardware."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from headway.calibration.cases import FORMATS
from headway.calibration.measure import DTYPES
from headway.calibration.peaks import MachinePeaks
from headway.calibration.stopwatch import stopwatch_of
from headway.calibration.store import slug
from headway.cost.hardware import Hardware

# Names of cost/tables/efficiency.toml by CUDA compute capability.
_ARCHITECTURES = {
    (7, 0): "volta",
    (7, 5): "turing",
    (8, 0): "ampere",
    (8, 6): "ampere",
    (8, 9): "ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell",
    (12, 0): "blackwell",
}
# Sides of the square matrices by which formats are measured that the engine multiplies by torch, if at all.
_FP16_SIDE = 256
_INT8_SIDES = {"cpu": 1024, "cuda": 4096}
_TRIES = 3


def hardware_of(name: str | None, peaks: MachinePeaks) -> Hardware:
    """The device by its measured peaks, with the rates of fp16 and int8 as torch has them, where it has them.

    Args:
        name: the name of the entry; None makes one from the device's name.
    """
    cuda = peaks.device == "cuda"
    flops = {
        FORMATS[DTYPES[name]] if name in DTYPES else name: rate.best for name, rate in peaks.gemm_flops_per_s.items()
    }
    sides = {"fp16": (torch.float16, _FP16_SIDE), "int8": (torch.int8, _INT8_SIDES[peaks.device])}
    for format_, (dtype, side) in sides.items():
        if format_ not in flops and (rate := _rate(torch.ones((side, side), dtype=dtype, device=peaks.device))):
            flops[format_] = rate
    return Hardware(
        key=name or slug(peaks.name),
        name=peaks.name,
        kind="gpu" if cuda else "cpu",
        architecture=_ARCHITECTURES.get(torch.cuda.get_device_capability(), "unknown") if cuda else platform.machine(),
        memory_bytes=peaks.memory_bytes,
        bytes_per_s=peaks.memory_read.best,
        flops_per_s=flops,
        reads=tuple((rate.size, rate.best) for rate in peaks.read_bytes_per_s),
        sources=("headway calibrate",),
        note="" if cuda else f"Measured with {peaks.threads} threads.",
        measured=True,
    )


def _rate(square: Tensor) -> float:
    """FLOPs in a second of the matrix times itself; 0 where torch has no such product."""
    multiply = torch._int_mm if square.dtype == torch.int8 else torch.mm
    try:
        multiply(square, square)
    except RuntimeError:
        return 0.0
    stopwatch = stopwatch_of(square.device.type)
    best = min(stopwatch.seconds(lambda: multiply(square, square), 1) for _ in range(_TRIES))
    return 2.0 * len(square) ** 3 / best
