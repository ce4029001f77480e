"""When kernels ran on a GPU: torch's profiler asks CUPTI, which sees them inside of graphs, too."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from torch.profiler import ProfilerActivity, profile

from headway.kernels.interface import KernelTime

_MOST_TIMES = 1 << 17  # of some hundred steps
# What the name of a kernel that multiplies or attends has in it: cuBLAS's first, then our own.
_KINDS = {
    "product": ("gemm", "nvjet", "cutlass", "gemv", "one_row_kernel", "rows_kernel", "add_parts_kernel"),
    "attend": ("attention_kernel", "merge_kernel"),
}


class KernelTimes:
    """The last kernels of a device. CUPTI keeps 128 MiB of them at most; what comes after that is lost."""

    def __init__(self) -> None:
        self._times: deque[KernelTime] = deque(maxlen=_MOST_TIMES)
        self._profiler = self._started()

    def taken(self) -> list[KernelTime]:
        """All so far, oldest first. It waits for the device."""
        self.stop()
        self._profiler = self._started()
        return list(self._times)

    def stop(self) -> None:
        """Time no more."""
        self._profiler.stop()
        to_monotonic_ns = time.monotonic_ns() - time.time_ns()
        found = self._profiler.profiler.kineto_results.events()
        spans = [
            (_named(each.name()), each.start_ns() + to_monotonic_ns, each.end_ns() + to_monotonic_ns)
            for each in found
            if each.device_type().name == "CUDA"
        ]
        self._times.extend(sorted(spans, key=lambda span: span[1]))

    @staticmethod
    def _started() -> Any:
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
        return profiler


def _named(kernel: str) -> str:
    """The name of a kernel, with what it is for before it where that is known, as a profile wants it."""
    kind = next((kind for kind, parts in _KINDS.items() if any(part in kernel for part in parts)), None)
    return f"{kind} {kernel}" if kind else kernel
