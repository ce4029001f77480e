"""The operations of a decoder layer: one interface, three implementations (reference, cpu, cuda)."""

from __future__ import annotations

import mmap

import torch

from headway.kernels.interface import Kernels, LayerCache, Linear, StepGeometry
from headway.kernels.weights import Weight

__all__ = ["Kernels", "LayerCache", "Linear", "StepGeometry", "Weight", "kernels_for"]

CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels_for(device: str, dtype: torch.dtype, memory: mmap.mmap | None = None) -> Kernels:
    """The kernels for device ("cpu", "cuda", "cuda:1") and the dtype of weights, activations and cache.

    A CPU's weights are packed into `memory` first, where there is some (see LargePages).

    Raises ValueError for a device or dtype that no implementation covers.
    """
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"dtype {dtype} is not supported: use float32, bfloat16 or float16")
    kind = torch.device(device).type
    if kind == "cpu":
        from headway.kernels.cpu.kernels import CpuKernels

        return CpuKernels(memory)
    if kind == "cuda":
        from headway.kernels.cuda.kernels import CudaKernels

        return CudaKernels()
    raise ValueError(f"device {device!r} is not supported: use cpu or cuda")
